"""Make replicas equal, and prove that they are.

All functions are collective over one axis ("dp", or "rdp" for slices of distributed modules): every rank of
it calls them in the same order, with the tensors it holds, under equal names and in equal order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwright.data_parallel.buckets import (
    MIB,
    TensorInfo,
    dense_strides,
    flat_memory,
    is_dense,
    plan_buckets,
)
from shardwright.errors import ShapeError, ShardwrightError
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives, objects

Named = tuple[str, Tensor]

_CHUNK_BYTES = 25 * MIB


class ReplicaMismatchError(ShardwrightError, RuntimeError):
    """Tensors that have to be equal on all replicas are not."""


def broadcast_parameters(
    named_tensors: Iterable[tuple[str, Tensor]],
    axis: Axis = "dp",
    *,
    source: int = 0,
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Give every rank the values of one rank, after checking that all hold the same tensors.

    Called by: every rank of the axis, after partitioning, with parameters and buffers; tensors listed twice
        are sent once.
    Collectives: one small object gather, then one broadcast per chunk.
    source: rank within the axis whose values count.
    chunk_bytes: small tensors travel together in flat buffers of this size, larger dense ones in place.
    Raises: ShapeError naming the first tensor that differs in name, shape or dtype, and every rank's version.
    """
    named = list(_once_each(named_tensors))
    check_same_layout(named, axis)
    _broadcast(named, axis, source, chunk_bytes)


def sync_buffers(
    named_buffers: Iterable[tuple[str, Tensor]],
    axis: Axis = "dp",
    *,
    source: int = 0,
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Give every rank the buffers of one rank (`broadcast_buffers`), without checks.

    Called by: every rank of the axis, at the start of a step; `source` is `Join.source` inside `join()`.
    Collectives: one broadcast per chunk; none if there are no buffers.
    """
    _broadcast(list(_once_each(named_buffers)), axis, source, chunk_bytes)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, axis: Axis = "dp", *, source: int) -> None:
    """Give every rank's optimizer the state and the parameter-group settings of one rank's.

    Called by: every rank of the axis at the end of `join()`, where ranks without data have missed updates.
    Learning-rate schedulers keep state of their own, which is the script's to bring along.
    Collectives: one object broadcast, then one broadcast per chunk.
    """
    world = context.world()
    sending = world.groups.ranks(axis)[source] == world.rank
    tensors: list[Tensor] = []
    outline = _take_apart(optimizer.state_dict(), tensors) if sending else None
    outline = objects.broadcast_object(outline, axis, source)
    if not sending:
        _allocate(outline, tensors)
    _broadcast([(str(i), t) for i, t in enumerate(tensors)], axis, source, _CHUNK_BYTES)
    if not sending:
        optimizer.load_state_dict(_put_together(outline, iter(tensors)))


def check_same_layout(named_tensors: Iterable[tuple[str, Tensor]], axis: Axis = "dp") -> None:
    """Raise ShapeError unless all ranks hold tensors of the same names, shapes, strides and dtypes.

    Collectives: one gather of a digest; one of the descriptions only if the digests differ.
    """
    mine = [(n, *_layout(t), str(t.dtype)) for n, t in named_tensors]
    digest = xxhash.xxh3_64_hexdigest(repr(mine).encode())
    if len(set(objects.allgather_object(digest, axis))) == 1:
        return
    ranks = context.world().groups.ranks(axis)
    everyone = objects.allgather_object(mine, axis)
    for position in range(max(len(m) for m in everyone)):
        versions = [m[position] if position < len(m) else None for m in everyone]
        if len(set(versions)) == 1:
            continue
        raise ShapeError(
            f"replicas hold different models: tensor {position} in order is "
            + ", ".join(f"{_describe(v)} on rank {r}" for r, v in zip(ranks, versions, strict=True)),
            where=context.world().describe(),
            remedy="build the same model, in the same order, on every rank",
        )


def check_equal(
    named_tensors: Iterable[tuple[str, Tensor]], axis: Axis = "dp", *, what: str = "parameter"
) -> None:
    """Raise unless every tensor is bitwise equal on all ranks of the axis.

    Called by: tests, and users who want proof. Costs one pass over the data on the host.
    Collectives: the gather of `check_same_layout`, one all-gather of 8 bytes per tensor.
    Raises: ReplicaMismatchError naming the first tensor that differs and the ranks that hold each version.
    """
    named = list(named_tensors)
    check_same_layout(named, axis)
    hashes = torch.tensor([_hash(t) for _, t in named], dtype=torch.int64)
    everyone = torch.stack(list(collectives.all_gather(hashes, axis)))
    differing = (everyone != everyone[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return
    first = differing[0]
    holders: dict[int, list[int]] = {}
    for rank, value in zip(context.world().groups.ranks(axis), everyone[:, first].tolist(), strict=True):
        holders.setdefault(value, []).append(rank)
    versions = " / ".join(f"ranks {ranks}" for ranks in holders.values())
    raise ReplicaMismatchError(
        f"{what} '{named[first][0]}' differs between replicas: {versions} hold different values; "
        f"{len(differing)} of {len(named)} {what}s differ",
        where=context.world().describe(),
        remedy="look for code that changes it on some replicas only, or for a generator seeded by rank",
    )


def _once_each(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in named_tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _broadcast(named: Sequence[tuple[str, Tensor]], axis: Axis, source: int, chunk_bytes: int) -> None:
    """Broadcast in flat chunks. Bytes travel, so that every dtype does (bool, complex, 8-bit floats)."""
    groups = context.world().groups
    if len(groups.ranks(axis)) == 1:
        return
    sending = groups.ranks(axis)[source] == context.world().rank
    tensors = [t.detach() for _, t in named]
    plan = plan_buckets([TensorInfo.of(n, t) for n, t in named], cap_bytes=chunk_bytes)
    spare: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for chunk in plan:
            if chunk.num_bytes == 0:
                continue
            members = [tensors[s.position] for s in chunk.slots]
            if len(members) == 1 and is_dense(members[0]):
                collectives.broadcast_tensor(flat_memory(members[0]).view(torch.uint8), axis, source)
                continue
            if chunk.device not in spare or spare[chunk.device].numel() < chunk.num_bytes:
                spare[chunk.device] = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=chunk.device)
            raw = spare[chunk.device][: chunk.num_bytes]
            views = [s.view_of(raw.view(chunk.dtype)) for s in chunk.slots]
            if sending:
                torch._foreach_copy_(views, members)
            collectives.broadcast_tensor(raw, axis, source)
            if not sending:
                torch._foreach_copy_(members, views)


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Copy dicts and lists with a TensorInfo in place of every tensor; the tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorInfo.of("", value)
    if isinstance(value, dict):
        return {key: _take_apart(element, tensors) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take_apart(element, tensors) for element in value)
    return value


def _allocate(outline: Any, tensors: list[Tensor]) -> None:
    """Append an empty tensor for every TensorInfo, in order, on this rank's device of the same kind."""
    if isinstance(outline, TensorInfo):
        here = context.world().device
        device = here if outline.device.type == here.type else outline.device
        strides = dense_strides(outline.shape, outline.stride)
        tensors.append(torch.empty_strided(outline.shape, strides, dtype=outline.dtype, device=device))
    elif isinstance(outline, dict):
        for element in outline.values():
            _allocate(element, tensors)
    elif isinstance(outline, (list, tuple)):
        for element in outline:
            _allocate(element, tensors)


def _put_together(outline: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(outline, TensorInfo):
        return next(tensors)
    if isinstance(outline, dict):
        return {key: _put_together(element, tensors) for key, element in outline.items()}
    if isinstance(outline, (list, tuple)):
        return type(outline)(_put_together(element, tensors) for element in outline)
    return outline


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = tuple(tensor.shape)
    return shape, dense_strides(shape, tuple(tensor.stride()))


def _hash(tensor: Tensor) -> int:
    """Signed 64-bit hash of a tensor's values in index order."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(xxhash.xxh3_64_digest(data.numpy().data), "big", signed=True)


def _describe(version: tuple[str, tuple[int, ...], tuple[int, ...], str] | None) -> str:
    if version is None:
        return "absent"
    name, shape, stride, dtype = version
    return f"'{name}' {list(shape)} strides {list(stride)} {dtype}"
