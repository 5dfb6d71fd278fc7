"""A model to plan for: from a Python file, or from a transformers config without its weights."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_DEFAULT_TOKENS = 128
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model without need for real weights, and the inputs of one microbatch if they are known.

    loss: from the model's output to the number to minimise, if the file defines it.
    """

    title: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    has_inputs: bool = True
    loss: Callable[[Any], Any] | None = None


def load_model(source: str, *, batch: int, seq: int | None) -> LoadedModel:
    """Build the model that `source` names.

    source: a .py file, a config.json, or a folder with one. batch, seq: shape of the inputs of a transformers
    model. A Python file's `model` and `example_inputs` are called on the meta device, or without it if that
    fails.
    Raises: UsageError that says what is missing.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UsageError(
            f"'{source}' is neither a file nor a folder with a config.json",
            remedy="give a Python file that defines model(), or a transformers config",
        )
    if path.suffix == ".py":
        return _from_script(path)
    if path.suffix == ".json":
        return _from_config(path, batch, seq)
    raise UsageError(f"'{source}' is a {path.suffix or 'nameless'} file, expected .py or .json")


def _from_script(path: Path) -> LoadedModel:
    import torch
    from torch import nn

    sys.path.insert(0, str(path.resolve().parent))
    try:
        names = runpy.run_path(str(path), run_name="shardwright_plan")
    except SystemExit as error:
        raise UsageError(
            f"'{path}' ended the process while it was read, before model() could be called",
            remedy="give a file that defines model() and does nothing else; a training script may import it",
        ) from error
    finally:
        sys.path.pop(0)
    make = names.get("model")
    if not callable(make):
        raise UsageError(
            f"'{path}' does not define a function model()",
            remedy="add one that returns the torch.nn.Module; the file is run to find it, so keep training out of it",
        )
    try:
        with torch.device("meta"):
            module = make()
    except (RuntimeError, NotImplementedError):  # it reads values while it is built
        module = make()
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"model() of '{path}' returned a {type(module).__name__}, expected a torch.nn.Module"
        )
    title = f"{type(module).__name__} ({path.name})"
    inputs = names.get("example_inputs")
    if not callable(inputs):
        return LoadedModel(title, module, has_inputs=False)
    args, kwargs = _split_inputs(inputs())
    return LoadedModel(title, module, args, kwargs, loss=names.get("loss") if callable(names.get("loss")) else None)


def _split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple or list is positional arguments, a mapping keyword arguments, anything else one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def _from_config(path: Path, batch: int, seq: int | None) -> LoadedModel:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"'{path}' is a transformers config, but transformers is not installed",
            remedy='pip install "shardwright[hf]"',
        ) from error
    import torch

    transformers.logging.set_verbosity_error()  # remarks on a configuration without a trained model
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**data)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"'{path}' is not a transformers config: {error}",
            remedy='it must be JSON with a known "model_type"',
        ) from error
    with torch.device("meta"):
        module = _build(transformers, config, path)
    kwargs = _inputs(module, config, batch, seq)
    return LoadedModel(f"{type(module).__name__} ({path})", module, kwargs=kwargs)


def _build(transformers: Any, config: Any, path: Path) -> nn.Module:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            module: nn.Module = found._from_config(config)  # as AutoModel does it: in the config's dtype
            return module
    for name in _AUTO_CLASSES:
        try:
            module = getattr(transformers, name).from_config(config)
        except ValueError:  # not a model of this kind
            continue
        return module
    raise UsageError(
        f"no model class of transformers takes the config '{path}' (model_type '{config.model_type}')",
        remedy="name one in its 'architectures', or write a Python file that defines model()",
    )


def _inputs(module: Any, config: Any, batch: int, seq: int | None) -> dict[str, Any]:
    import torch

    main = module.main_input_name
    if main == "pixel_values":
        sub = getattr(config, "vision_config", config)
        size = sub.image_size
        height, width = (size, size) if isinstance(size, int) else size
        image = torch.zeros(batch, getattr(sub, "num_channels", 3), height, width)
        return {main: image, **_labels(module, torch.zeros(batch, dtype=torch.long), None)}
    if main != "input_ids":
        raise UsageError(
            f"{type(module).__name__} takes '{main}', for which no example can be made",
            remedy="write a Python file that defines model() and example_inputs()",
        )
    longest = getattr(config, "max_position_embeddings", None) or _DEFAULT_TOKENS
    tokens = torch.zeros(batch, seq or min(_DEFAULT_TOKENS, longest), dtype=torch.long)
    inputs: dict[str, Any] = {main: tokens}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.clone()
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return {**inputs, **_labels(module, torch.zeros(batch, dtype=torch.long), tokens)}


def _labels(module: Any, classes: Any, tokens: Any) -> dict[str, Any]:
    """What lets the model compute its loss, which often takes most memory: none where its name doesn't tell the task."""
    name = type(module).__name__
    if name.endswith(("Classification",)) and not name.endswith("TokenClassification"):
        return {"labels": classes}
    ends = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    return {"labels": tokens.clone()} if tokens is not None and name.endswith(ends) else {}
