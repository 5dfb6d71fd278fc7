"""A folder that `from_pretrained` of transformers loads: weights, configuration, generation settings. Never half there.

What is written: the model's tensors under the names of the original class, each weight once, tied ones under the name that
transformers looks for, in the form in which transformers itself keeps them on disk.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint import storage
from shardwright.checkpoint.collective import absolute, agree, run_on_rank_zero
from shardwright.checkpoint.deferred import Deferred
from shardwright.checkpoint.exchange.safetensors_files import SafetensorsFiles
from shardwright.checkpoint.exchange.source import Source, dtype_of
from shardwright.checkpoint.exchange.spooled import Spooled
from shardwright.checkpoint.manifest import OBJECT
from shardwright.checkpoint.storage import Place
from shardwright.checkpoint.whole import Delivery, WholeModel
from shardwright.engine.checkpointing import SavedModel
from shardwright.engine.model import DistributedModel
from shardwright.engine.origin import original_of
from shardwright.engine.state import state
from shardwright.engine.substitution import renamed
from shardwright.errors import CheckpointError, UsageError
from shardwright.integrations.huggingface import renaming
from shardwright.log import get_logger, rank_zero

_log = get_logger(__name__)
_CALL = "export_huggingface"
_CONFIG = "config.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def export_huggingface(
    folder: str | os.PathLike[str], model: DistributedModel | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write the wrapped transformers model as a folder for `from_pretrained`, weights in safetensors files.

    Called by: every rank of the world, outside a step. Collectives: messages of tensors to world rank 0, which writes them as they
        come; a few small ones. No rank needs memory for more than the largest tensor (where the original's is made of several of
        ours, for those).
    folder: a new one, or an empty one; it appears when it is complete. Or a URL: then rank 0 needs room for it in its folder of
        temporary files, and config.json comes last.   model: by default the one wrapped last.
    max_shard_size: of a file: bytes, or a number with a unit such as "5GB" or "500MiB". With several files there is an index.
    Raises: the same error on every rank: UsageError if the model is none of transformers, or the folder holds something;
        CheckpointError if the disk refuses.
    """
    where = absolute(folder)
    agree(_CALL, {"folder": where, "max_shard_size": max_shard_size})
    wrapped = state.model if model is None else model
    if not isinstance(wrapped, DistributedModel):
        raise UsageError(f"{_CALL}() got no wrapped model", remedy="pass what smp.DistributedModel returned")
    saved = SavedModel(wrapped)
    whole = WholeModel(_CALL, saved)
    content = whole.in_original_names(saved)
    targets: list[_Folder] = []

    def begin() -> None:
        original = original_of(wrapped.get_module())
        if original is None:
            raise UsageError(
                f"{type(wrapped.get_module()).__name__} is no model of transformers: it has no configuration to go with its weights",
                remedy="smp.save_checkpoint(partial=False) writes any model",
            )
        shell = _shell(original.cls, original.config)
        if original.generation_config is not None:
            shell.generation_config = copy.deepcopy(original.generation_config)
        targets.append(_Folder(storage.place(where), shell, content, parse_size(max_shard_size)))

    try:
        run_on_rank_zero(_CALL, begin)
        target = targets[0] if targets else None
        wanted = () if target is None else target.content.values()
        whole.send(lambda deferred, tensor: targets[0].put(deferred, tensor), wanted)
        run_on_rank_zero(_CALL, lambda: targets[0].publish())
    except BaseException:
        for started in targets:
            started.discard()
        raise
    if rank_zero():
        _log.info("wrote %s for from_pretrained", where)


def export_from_files(
    source: Source,
    out: Place,
    *,
    max_shard_size: int | str = "5GB",
    config: Path | None = None,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> int:
    """The same from a checkpoint, without a job. Returns: how many tensors were written.

    config: a file or folder with the configuration; by default what the checkpoint says of its model.
    advance: called with the bytes of each tensor that was read.
    Raises: UsageError if the checkpoint doesn't say what model of transformers it is of, and there is no `config`.
    """
    entries = [entry for entry in source.entries("model") if entry.dtype != OBJECT]
    content: dict[str, Any] = {e.name: Deferred.named(e.name, e.shape, dtype_of(e)) for e in entries}
    for names in source.manifest.ties:
        known = [name for name in names if name in content]
        content.update((name, content[known[0]]) for name in known[1:])
    origin = source.manifest.origin or {}
    renamings = [(prefix, renaming.from_record(record)) for prefix, record in origin.get("renamings", ())]
    content = renamed(content, [(prefix, table.to_huggingface) for prefix, table in renamings])
    shell = _shell_of(source, origin, config)
    target = _Folder(out, shell, content, parse_size(max_shard_size))
    try:
        delivery = Delivery(target.put, target.content.values())
        for entry in entries:
            tensor = source.whole(entry)
            delivery.take(entry.name, tensor)
            advance(tensor.numel() * tensor.element_size())
            del tensor
        target.publish()
    except BaseException:
        target.discard()
        raise
    return len(target.content)


class _Folder:
    """One folder while it is written. content: what goes into it, in that order.

    Protocol: put for every tensor of `content`, publish; or discard.
    """

    def __init__(self, folder: Place, shell: Any, content: Mapping[str, Any], most_bytes: int) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and isn't empty", remedy="give the name of a new folder")
        self.content = _on_disk(_each_once(content, shell), shell)
        self._names = {id(value): name for name, value in self.content.items()}
        if isinstance(folder, Path):
            folder.parent.mkdir(parents=True, exist_ok=True)
        self._spooled = Spooled(folder, last=_CONFIG)
        temporary = self._spooled.path
        try:
            temporary.mkdir()
            dtype = next((t.dtype for t in self.content.values() if t.is_floating_point()), torch.get_default_dtype())
            shell.config.dtype = str(dtype).removeprefix("torch.")
            shell.config.architectures = [type(shell).__name__]
            shell.config.save_pretrained(temporary)
            if shell.can_generate():
                shell.generation_config.save_pretrained(temporary)
            self._files = SafetensorsFiles(temporary, self.content, most_bytes)
            for name, value in self.content.items():
                if not isinstance(value, Deferred):
                    self._files.write(name, value)
        except BaseException:
            self._spooled.discard()
            raise

    def put(self, deferred: Deferred, tensor: Tensor) -> None:
        self._files.write(self._names[id(deferred)], tensor)

    def publish(self) -> None:
        self._files.finish()
        self._spooled.publish()
        self._spooled.discard()

    def discard(self) -> None:
        self._files.close()
        self._spooled.discard()


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "500MiB" or a plain number. Raises: UsageError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in ("", *_UNITS):
        raise UsageError(f"'max_shard_size' is {size!r}, expected bytes or a number with a unit", remedy='such as "5GB"')
    return int(float(found[1]) * _UNITS.get(found[2].upper(), 1))


# ------------------------------------------------------------------ what transformers expects


def _shell(cls: type[nn.Module], config: Any) -> Any:
    """A model of the class without memory, which knows what transformers knows of it."""
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


def _shell_of(source: Source, origin: Mapping[str, Any], config: Path | None) -> Any:
    import transformers

    if config is None and not origin:
        raise UsageError(
            f"{source.checkpoint.name} doesn't say what model of transformers it is of",
            remedy="--config FOLDER, with the config.json of the model",
        )
    described = origin.get("config", {})
    if config is not None:
        file = config / _CONFIG if config.is_dir() else config
        described = json.loads(file.read_text())
    names = described.get("architectures") or [origin.get("architecture", "")]
    cls = getattr(transformers, origin.get("architecture") or names[0], None)
    if cls is None:
        raise UsageError(f"transformers {transformers.__version__} has no class {names[0]!r}", remedy="install a version that has it")
    shell = _shell(cls, cls.config_class.from_dict(described))
    if origin.get("generation_config"):
        shell.generation_config = transformers.GenerationConfig.from_dict(origin["generation_config"])
    return shell


def _each_once(content: Mapping[str, Any], shell: Any) -> dict[str, Tensor]:
    """The tensors of a state dict without second names of tied ones, and without what is not to be saved.

    Raises: CheckpointError if the names are not those of the model.
    """
    expected = shell.state_dict().keys()
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    groups: dict[int, list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(id(value), []).append(name)
    strange = sorted(tensors.keys() - expected)
    missing = sorted(expected - tensors.keys() - _second_names(shell, expected))
    if strange or missing:
        told = [f"{what} {', '.join(names[:5])}" for what, names in (("unknown:", strange), ("missing:", missing)) if names]
        raise CheckpointError(
            f"the tensors are not those of {type(shell).__name__}; {'; '.join(told)}",
            remedy="export the model that was saved, with its own configuration",
        )
    second = _second_names(shell, tensors)
    kept = {next((name for name in names if name not in second), names[0]) for names in groups.values()}
    ignored = [re.compile(pattern) for pattern in getattr(shell, "_keys_to_ignore_on_save", None) or ()]
    return {n: t for n, t in tensors.items() if n in kept and not any(pattern.search(n) for pattern in ignored)}


def _second_names(shell: nn.Module, names: Any) -> set[str]:
    """Which names transformers doesn't look for if the weight is there under another one: keys of `_tied_weights_keys`."""
    found: set[str] = set()
    for path, module in shell.named_modules():
        for pattern in getattr(module, "_tied_weights_keys", None) or ():
            whole = re.compile((re.escape(f"{path}.") if path else "") + pattern.removeprefix("^"))
            found.update(name for name in names if whole.match(name))
    return found


def _on_disk(content: dict[str, Tensor], shell: Any) -> dict[str, Tensor]:
    """The form on disk, which for some models of transformers 5 isn't that in memory (experts apart, older names)."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return content
    order = {name: position for position, name in enumerate(content)}
    made: dict[str, Tensor] = revert_weight_conversion(shell, dict(content))
    return dict(sorted(made.items(), key=lambda item: order.get(item[0], len(order))))
