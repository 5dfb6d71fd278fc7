"""State dicts of the model: the whole one gathered, this rank's own, and loading either.

All names are those of the plain user module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.state import PARTIAL_MARK
from shardwright.engine.collective_calls import collective_call
from shardwright.engine.part import Part
from shardwright.topology import context
from shardwright.transport import collectives, objects

StateDict = dict[str, Any]
Keys = nn.modules.module._IncompatibleKeys


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that travels by itself: its number among the tensors of its owner."""

    index: int


def gather(part: Part, mine: Mapping[str, Any], call: str, *, keep: bool) -> StateDict:
    """Join what the ranks of a pipeline group answer for; tensors are copies on the CPU.

    Called by: every rank of a pipeline group, after partitioning.
    Collectives: one object gather over it, one broadcast per tensor.
    mine: tensors and other values of this rank, by names that no other rank has.
    call: the public call, for errors.
    keep: False takes part and returns {}, holding no more than one tensor at a time.
    Tied tensors travel once, and are one tensor in the result.
    """
    device = context.world().device
    unique = {id(value): value for value in mine.values() if isinstance(value, torch.Tensor)}
    index_of = {key: index for index, key in enumerate(unique)}
    told = {n: _Sent(index_of[id(v)]) if id(v) in index_of else v for n, v in mine.items()}
    specs = [(tuple(tensor.shape), tensor.dtype) for tensor in unique.values()]
    found: StateDict = {}
    with collective_call(call, "every rank of a pipeline group"):
        for owner, (names, owned) in enumerate(objects.allgather_object((told, specs), "pp")):
            own = list(unique.values()) if owner == part.stage else None
            received = []
            for index, (shape, dtype) in enumerate(owned):
                if own is not None:
                    tensor = own[index].detach().to(device).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                collectives.broadcast_tensor(tensor, "pp", src_group_rank=owner)
                if keep:
                    received.append(tensor.to("cpu", copy=own is not None))
            if keep:
                found.update((n, received[v.index] if isinstance(v, _Sent) else v) for n, v in names.items())
    order = {name: index for index, name in enumerate(part.keys())}
    return OrderedDict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def merge(content: StateDict) -> StateDict:
    """Join the partial state dicts of all stages.

    Called by: every rank of a pipeline group. Collectives: one object gather over it.
    """
    merged: StateDict = OrderedDict()
    with collective_call("model.load_state_dict() of a partial state dict", "every rank of a pipeline group"):
        for part in objects.allgather_object({n: on_cpu(v) for n, v in content.items()}, "pp"):
            merged.update(part)
    return merged


def load(part: Part, content: StateDict, expected: Collection[str], *, strict: bool) -> Keys:
    """Copy values into what this rank holds; a model that is whole loads by its own `load_state_dict`.

    content: without the mark of partial state dicts; may be changed.   expected: the names it should have.
    Called by: any rank by itself. Copies of what another stage owns get the value if `content` has it.
    Returns: expected names that are missing, and those that are not expected.
    Raises: RuntimeError listing them if strict, and tensors of another size in any case.
    """
    if part.is_whole:
        keys: Keys = part.module.load_state_dict(content, strict=strict)
        return keys
    missing = sorted(set(expected) - content.keys())
    unexpected = sorted(content.keys() - set(expected))
    here = part.here()
    sizes = [
        f"size mismatch for {n}: {_size(content[n])} in the dict, {_size(target)} in the model"
        for n, target in here.items()
        if isinstance(target, torch.Tensor) and n in content and _size(target) != _size(content[n])
    ]
    problems = sizes
    if strict and (missing or unexpected):
        problems = [f"missing keys {missing}, unexpected keys {unexpected}", *sizes]
    if problems:
        name = type(part.module).__name__
        raise RuntimeError(f"Error(s) in loading state_dict for {name}: {'; '.join(problems)}")
    with torch.no_grad():
        for name, target in here.items():
            if name not in content:
                continue
            if isinstance(target, torch.Tensor):
                target.copy_(content[name])
            else:
                part.module.get_submodule(name.rpartition(".")[0]).set_extra_state(content[name])
    return Keys(missing, unexpected)


def _size(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else f"no tensor ({type(value).__name__})"


def split_mark(state_dict: Mapping[str, Any]) -> tuple[StateDict, bool]:
    """A copy of the dict without the mark of partial ones, with torch's notes; and was it marked?"""
    content = with_metadata(OrderedDict(state_dict), state_dict)
    return content, bool(content.pop(PARTIAL_MARK, False))


def with_metadata(content: StateDict, source: Mapping[str, Any]) -> StateDict:
    """Give a state dict the notes that torch keeps on another: the versions of its modules' formats."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None and isinstance(content, OrderedDict):
        content._metadata = metadata  # type: ignore[attr-defined]
    return content


def on_cpu(value: Any) -> Any:
    """A tensor detached and on the CPU; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
