"""State dicts that others have written: DCP folders, Hugging Face folders, safetensors and torch files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.checkpoint import full, full_files, layout, state, storage, unread
from shardwright.checkpoint.deferred import Deferred
from shardwright.checkpoint.exchange import dcp
from shardwright.checkpoint.safe_loading import TRUST_ENV
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError, CheckpointNotFoundError

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Imported:
    """What was found. Tensors are mapped from a file, or deferred.

    model: tensors by name.   optimizer: in torch's form with `state.PARAM_NAMES`; None if there is none.   values: gets tensors
    that are deferred.   rest: other values that lay beside them.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    values: full.Values
    rest: dict[str, Any] = field(default_factory=dict)


def read(
    source: Place,
    *,
    model_key: str | None,
    optimizer_key: str | None,
    with_optimizer: bool,
    remove_prefix: str,
    trust: bool,
) -> Imported:
    """Read what a file or folder holds, without the content of tensors.

    model_key, optimizer_key: where they lie in nested content, if not under one of the usual names.
    remove_prefix: of names, such as "module.".
    Raises: CheckpointError naming what is wrong; CheckpointNotFoundError.
    """
    content, values = _content(source, trust=trust)
    model, optimizer, rest = _parts(content, source, model_key, optimizer_key)
    model = {_without(name, remove_prefix): value for name, value in model.items()}
    if not any(isinstance(value, Tensor) for value in model.values()):
        raise CheckpointError("there are no tensors by name here", where=str(source), remedy="say where with --model-key")
    named = None
    if optimizer is not None and with_optimizer:
        named = _named(optimizer, model, source, remove_prefix)
    return Imported(model, named, values, rest)


def _content(source: Place, *, trust: bool) -> tuple[dict[str, Any], full.Values]:
    """Tensors by name, or such dicts by key; and what gets deferred tensors."""
    if (source / dcp.METADATA).is_file():
        if not trust:
            raise CheckpointError(
                f"a folder of torch.distributed.checkpoint describes itself in a pickle, {dcp.METADATA}, which could run code",
                where=str(source),
                remedy=f"if you know who wrote it: --trust or {TRUST_ENV}=1",
            )
        folder = dcp.Folder(source)
        return folder.content, folder.values
    if source.is_dir():
        found = full_files.plain_files(source, "pytorch_model.bin")
    elif source.is_file():
        found = (source,)
    else:
        raise CheckpointNotFoundError(f"there is no {source}", remedy="give a file, a DCP folder or a Hugging Face folder")
    content: dict[str, Any] = {}
    for file in found:
        content.update(full_files.read_state_dict(file, trust=trust))
    return content, unread.here


def _parts(
    content: Mapping[str, Any], source: Place, model_key: str | None, optimizer_key: str | None
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, dict[str, Any]]:
    """The model, the optimizer, and the rest."""
    if model_key is None and any(isinstance(value, Tensor) for value in content.values()):
        return content, None, {}
    dicts = [key for key, value in content.items() if isinstance(value, Mapping)]
    known = (*MODEL_KEYS, *OPTIMIZER_KEYS, model_key, optimizer_key)
    if len(content) == 1 and dicts and dicts[0] not in known:
        return _parts(content[dicts[0]], source, model_key, optimizer_key)
    model = _pick("--model-key", model_key, MODEL_KEYS, dicts, source)
    if model is None:
        raise CheckpointError(
            f"nothing here is called {', '.join(MODEL_KEYS)}; there is {', '.join(map(str, content)) or 'nothing'}",
            where=str(source),
            remedy="say where the model is with --model-key",
        )
    optimizer = _pick("--optimizer-key", optimizer_key, OPTIMIZER_KEYS, dicts, source)
    rest = {key: value for key, value in content.items() if key not in (model, optimizer)}
    return content[model], None if optimizer is None else content[optimizer], rest


def _pick(option: str, wanted: str | None, usual: Sequence[str], dicts: Sequence[str], source: Place) -> str | None:
    if wanted is not None and wanted not in dicts:
        raise CheckpointError(
            f"{option} is {wanted!r}, but no dict is called so", where=str(source), remedy=f"one of {', '.join(dicts)}"
        )
    return wanted if wanted is not None else next((key for key in usual if key in dicts), None)


# ------------------------------------------------------------------ the optimizer


def _named(
    optimizer: Mapping[str, Any], model: Mapping[str, Any], source: Place, remove_prefix: str
) -> dict[str, Any]:
    """The optimizer's state in torch's form, with the name of every index."""
    try:
        saved, groups = optimizer["state"], optimizer["param_groups"]
        members = [list(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "the optimizer's state is not in torch's form, with 'state' and 'param_groups'",
            where=str(source),
            remedy="--no-optimizer imports the model alone",
        ) from error
    flat = [index for group in members for index in group]
    numbered = {str(index): index for index in flat}  # DCP makes strings of keys
    saved = {numbered.get(index, index): values for index, values in saved.items()}
    if all(isinstance(index, str) for index in flat):
        names = list(flat)
    elif all(state.PARAM_NAMES in group for group in groups):
        names = [name for group in groups for name in group[state.PARAM_NAMES]]
    else:
        names = _by_order(flat, saved, len(groups), model, source)
    names = [_without(name, remove_prefix) for name in names]
    if unknown := [name for name in names if name not in model]:
        raise CheckpointError(
            f"the optimizer has {len(unknown)} parameters that the model lacks, the first is {unknown[0]!r}",
            where=str(source),
            remedy="--no-optimizer imports the model alone",
        )
    numbers = {index: number for number, index in enumerate(flat)}
    packed, first = [], 0
    for group, own in zip(groups, members, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", state.PARAM_NAMES)}
        packed.append({**options, "params": list(range(first, first + len(own)))})
        first += len(own)
    more = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups", state.PARAM_NAMES)}
    states = {numbers[index]: values for index, values in saved.items()}
    return {**more, "state": states, "param_groups": packed, state.PARAM_NAMES: names}


def _by_order(
    flat: Sequence[Any], saved: Mapping[Any, Any], num_groups: int, model: Mapping[str, Any], source: Place
) -> list[str]:
    """Names of an optimizer that knows numbers only: those of the model's parameters in order, if that is the one way."""
    shapes = [_shape(saved.get(index, {})) for index in flat]
    names = in_order(shapes, _candidates(model)) if num_groups == 1 else None
    if names is None:
        why = "there are several groups" if num_groups > 1 else "shapes leave more than one way, or none"
        raise CheckpointError(
            f"the optimizer numbers its parameters, and which numbers are which names isn't certain: {why}",
            where=str(source),
            remedy="save it again from an optimizer made with model.named_parameters(); or --no-optimizer",
        )
    return names


def in_order(shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[tuple[str, tuple[int, ...]]]) -> list[str] | None:
    """Names for these shapes (None fits any) out of a longer list, in order; None unless there is exactly one way."""
    first = _leftmost(shapes, candidates)
    last = _leftmost(shapes[::-1], candidates[::-1])
    return first if first is not None and last is not None and first == last[::-1] else None


def _leftmost(
    shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> list[str] | None:
    names = []
    rest = iter(candidates)
    for shape in shapes:
        name = next((name for name, found in rest if shape is None or shape == found), None)
        if name is None:
            return None
        names.append(name)
    return names


def _candidates(model: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors that may be parameters, tied ones once. Running statistics are known by the counter beside them."""
    left_out = {name for names in ties(model) for name in names[1:]}
    norms = {name.removesuffix(_COUNTER) for name in model if name.endswith(_COUNTER)}
    left_out |= {f"{norm}{statistic}" for norm in norms for statistic in ("running_mean", "running_var")}
    tensors = [(n, t) for n, t in model.items() if isinstance(t, Tensor) and t.is_floating_point()]
    return [(name, tuple(tensor.shape)) for name, tensor in tensors if name not in left_out]


def _shape(values: Any) -> tuple[int, ...] | None:
    """The shape of a parameter, from its state."""
    items = values.items() if isinstance(values, Mapping) else ()
    shapes = {tuple(value.shape) for key, value in items if isinstance(value, Tensor) and key != "step"}
    return next(iter(shapes)) if len(shapes) == 1 else None


def ties(model: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Names that are one tensor in the file."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, value in model.items():
        if isinstance(value, Tensor):
            groups.setdefault(_identity(value), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one."""
    if isinstance(tensor, unread.Unread):
        return unread.identity(tensor)
    if isinstance(tensor, Deferred) or tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _without(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


# ------------------------------------------------------------------ writing


def write(root: Place, tag: str, imported: Imported, *, trust: bool) -> int:
    """Make a full checkpoint of it, under a tag that is new, and the newest. Returns: bytes.

    Raises: CheckpointError if the tag is taken, or content can't be loaded again.
    """
    layout.check_tag(tag)
    if tag.endswith(".safetensors"):
        raise CheckpointError(f"tag {tag!r} would name a file of torch's form", remedy="leave out .safetensors")
    storage.of(root).prepare(root)
    optimizer = imported.optimizer
    groups: tuple[tuple[str, ...], ...] = ()
    if optimizer is not None:
        names = optimizer[state.PARAM_NAMES]
        groups = tuple(tuple(names[index] for index in group["params"]) for group in optimizer["param_groups"])
    model, optimizer, rest = _each_once((imported.model, optimizer, imported.rest))
    return full.write_new(
        root,
        tag,
        model,
        optimizer,
        rest,
        ties=ties(imported.model),
        groups=groups,
        layout_then=layout.Layout(1, 1, 1, precision=_precision(imported)),
        values=imported.values,
        trust=trust,
    )


def _each_once(content: Any) -> Any:
    """The same with one object for all tensors that are one, so that it is written once."""
    known: dict[tuple[Any, ...], Tensor] = {}
    return tree_map_only(Tensor, lambda tensor: known.setdefault(_identity(tensor), tensor), content)


def _precision(imported: Imported) -> layout.Precision:
    """Half if there are fp32 masters beside half precision weights."""
    states = {} if imported.optimizer is None else imported.optimizer["state"]
    if any(state.MASTER in values for values in states.values()):
        dtypes = {value.dtype for value in imported.model.values() if isinstance(value, Tensor)}
        return "fp16" if torch.float16 in dtypes else "bf16" if torch.bfloat16 in dtypes else "fp32"
    return "fp32"
