"""State dicts of the model: the whole one gathered, this rank's own, and loading either.

All names are those of the plain user module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.state import PARTIAL_MARK
from shardwright.checkpoint.unread import landing_together
from shardwright.data_parallel import shards
from shardwright.engine.collective_calls import collective_call
from shardwright.engine.part import Part
from shardwright.topology import context
from shardwright.transport import collectives, objects

StateDict = dict[str, Any]
Keys = nn.modules.module._IncompatibleKeys
CALLERS = "every rank of an MP_GROUP (pipeline and tensor parallel peers)"


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that travels by itself: its number among the tensors of its owner."""

    index: int


def gather(part: Part, mine: Mapping[str, Any], call: str) -> StateDict:
    """Join what the ranks of an MP_GROUP answer for; tensors are whole, and copies on the CPU.

    Called by: every rank of an MP_GROUP; with sharded parameters every rank.
    Collectives: one object gather over PP_GROUP; per tensor one all-gather over the shard group if it is sharded, one over
        TP_GROUP if it is cut, and one broadcast over PP_GROUP.
    mine: tensors and other values of this rank, by names that no other rank has.
    call: the public call, for errors.
    Tied tensors travel once, and are one tensor in the result.
    """
    device = context.world().device
    unique = {id(value): value for value in mine.values() if isinstance(value, torch.Tensor)}
    index_of = {key: index for index, key in enumerate(unique)}
    told = {n: _Sent(index_of[id(v)]) if id(v) in index_of else v for n, v in mine.items()}
    name_of = {id(value): name for name, value in reversed(list(mine.items()))}
    whole_shape, whole = part.distribution.whole_shape, part.distribution.whole
    specs = [(whole_shape(name_of[key], tensor), tensor.dtype) for key, tensor in unique.items()]
    found: StateDict = {}
    with collective_call(call, "every rank" if part.is_sharded else CALLERS):
        for owner, (names, owned) in enumerate(objects.allgather_object((told, specs), "pp")):
            own = list(unique.items()) if owner == part.stage else None
            received = []
            for index, (shape, dtype) in enumerate(owned):
                if own is not None:
                    key, held = own[index]
                    tensor = whole(name_of[key], shards.whole(held).detach().to(device)).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                collectives.broadcast_tensor(tensor, "pp", src_group_rank=owner)
                received.append(tensor.to("cpu", copy=own is not None))
            found.update((n, received[v.index] if isinstance(v, _Sent) else v) for n, v in names.items())
    order = {name: index for index, name in enumerate(part.keys())}
    return OrderedDict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def merge(content: StateDict) -> StateDict:
    """Join the partial state dicts of all stages.

    Called by: every rank of a pipeline group. Collectives: one object gather over it.
    """
    merged: StateDict = OrderedDict()
    with collective_call("model.load_state_dict() of a partial state dict", CALLERS):
        for part in objects.allgather_object({n: on_cpu(v) for n, v in content.items()}, "pp"):
            merged.update(part)
    return merged


def load(
    part: Part, content: StateDict, expected: Collection[str], *, strict: bool, slices: bool = False
) -> Keys:
    """Copy values into what this rank holds; a model that is complete loads by its own `load_state_dict`.

    content: without the mark of partial state dicts; may be changed.   expected: the names it should have.
    slices: tensors that are cut over tp ranks, or sharded, are this rank's parts; otherwise all tensors are whole.
    Called by: any rank by itself. Copies of what another stage owns get the value if `content` has it.
    Returns: expected names that are missing, and those that are not expected.
    Raises: RuntimeError listing them if strict, and tensors of another size in any case.
    """
    if part.is_complete:
        with landing_together() if _loads_plainly(part.module) else nullcontext():
            loaded: Keys = part.module.load_state_dict(content, strict=strict)
        return loaded
    here = part.here()
    wanted = {
        n: tuple(shards.local(t).shape) if slices else part.distribution.whole_shape(n, t)
        for n, t in here.items()
        if isinstance(t, torch.Tensor)
    }
    keys = _compared(part, content, expected, wanted, strict=strict)
    with torch.no_grad(), landing_together():
        for name, target in here.items():
            if name not in content:
                continue
            if isinstance(target, torch.Tensor):
                value = content[name]
                shards.local(target).copy_(
                    value if slices else shards.cut(target, part.distribution.cut(name, value))
                )
            else:
                part.module.get_submodule(name.rpartition(".")[0]).set_extra_state(content[name])
    return keys


def check(part: Part, content: StateDict, *, strict: bool) -> None:
    """Make sure, before anything changes, that a whole state dict in the model's own names fits it, on whichever rank.

    Called by: any rank by itself. A complete model with loading code of its own is left to that.
    Raises: as `load`.
    """
    own_code = any(module._load_state_dict_pre_hooks for module in part.module.modules()) or not _loads_plainly(part.module)
    if not (part.is_complete and own_code):
        _compared(part, content, part.keys(), part.shapes(), strict=strict)


def _compared(
    part: Part, content: StateDict, expected: Collection[str], wanted: Mapping[str, tuple[int, ...]], *, strict: bool
) -> Keys:
    """Names of a state dict that are missing, and those that aren't expected; RuntimeError if it may not be loaded."""
    missing = sorted(set(expected) - content.keys())
    unexpected = sorted(content.keys() - set(expected))
    sizes = [
        f"size mismatch for {n}: {_size(content[n])} in the dict, {list(shape)} in the model"
        for n, shape in wanted.items()
        if n in content and _size(content[n]) != str(list(shape))
    ]
    problems = sizes
    if strict and (missing or unexpected):
        problems = [f"missing keys {missing}, unexpected keys {unexpected}", *sizes]
    if problems:
        name = type(part.module).__name__
        raise RuntimeError(f"Error(s) in loading state_dict for {name}: {'; '.join(problems)}")
    return Keys(missing, unexpected)


def _loads_plainly(module: nn.Module) -> bool:
    """Does nothing in it look at values while they are loaded?"""
    plain = nn.Module._load_from_state_dict
    return all(type(m)._load_from_state_dict is plain and not m._load_state_dict_post_hooks for m in module.modules())


def _size(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else f"no tensor ({type(value).__name__})"


def split_mark(state_dict: Mapping[str, Any]) -> tuple[StateDict, bool | None]:
    """A copy of the dict without the mark of partial ones, with torch's notes; and the mark, None if there is none."""
    content = with_metadata(OrderedDict(state_dict), state_dict)
    mark = content.pop(PARTIAL_MARK, None)
    return content, None if mark is None else bool(mark)


def with_metadata(content: StateDict, source: Mapping[str, Any]) -> StateDict:
    """Give a state dict the notes that torch keeps on another: the versions of its modules' formats."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None and isinstance(content, OrderedDict):
        content._metadata = metadata  # type: ignore[attr-defined]
    return content


def on_cpu(value: Any) -> Any:
    """A tensor detached and on the CPU; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
