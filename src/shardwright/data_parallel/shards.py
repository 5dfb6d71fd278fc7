"""This rank's shards of parameters under `fully_shard`: taken out, put in, and joined to whole tensors.

A shard is a DTensor over the shard group, cut along its first dim. Tensors that are not sharded pass through every function
here as they are, so that callers need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.data_parallel.flat_layout import ShardLayout, sent
from shardwright.topology import context
from shardwright.transport import collectives


def is_shard(value: Any) -> bool:
    """Is it one rank's shard of a tensor? True of nothing unless `fully_shard` is used."""
    return isinstance(value, Tensor) and hasattr(value, "placements")


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, sharing memory; an ordinary tensor as it is."""
    found: Tensor = tensor._local_tensor if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found


def layout_of(shard: Tensor) -> ShardLayout:
    """How a tensor is cut over the shard group."""
    return ShardLayout(tuple(shard.shape), context.world().table.degrees.sdp)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor from all shards.

    Called by: every rank of a shard group, with the same tensors in the same order. Collectives: one all-gather.
    """
    if not is_shard(tensor):
        return tensor
    held = local(tensor).detach()
    padded = held.new_zeros((layout_of(tensor).num_rows, *tensor.shape[1:]))
    padded[: held.shape[0]] = held
    return torch.cat(collectives.all_gather(padded, "shard"))[: tensor.shape[0]]


def cut(shard: Tensor, value: Tensor) -> Tensor:
    """This rank's rows of a whole tensor, as a view."""
    if not is_shard(shard):
        return value
    start, stop = layout_of(shard).rows(context.world().coordinates.shard)
    return value[start:stop]


def like(shard: Tensor, value: Tensor) -> Tensor:
    """A shard beside another: of a tensor of the same shape, with this rank's rows `value`."""
    if not is_shard(shard):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(shard, DTensor)
    mesh, placements = shard.device_mesh, shard.placements
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride())


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Nested dicts and lists with every shard changed; all else stays."""
    if is_shard(value):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return value


# ------------------------------------------------------------------ flat blocks


def missing_elements(
    shards: Sequence[Tensor], layouts: Sequence[ShardLayout]
) -> list[list[tuple[int, Tensor]]]:
    """For each tensor what other ranks hold of this rank's flat block: (first element, values).

    shards: a shard, or its rows as an ordinary tensor, for each layout.
    Called by: every rank of a shard group, with the same tensors. Collectives: one all-to-all for each dtype, of less than
    one row of a tensor for each rank and rank, where rows don't divide evenly; else none.
    """
    found: list[list[tuple[int, Tensor]]] = [[] for _ in shards]
    uneven = [i for i, layout in enumerate(layouts) if layout.shape and not layout.is_flat]
    for dtype in dict.fromkeys(shards[i].dtype for i in uneven):
        members = [i for i in uneven if shards[i].dtype is dtype]
        pieces = _exchanged([shards[i] for i in members], [layouts[i] for i in members])
        for index, piece in zip(members, pieces, strict=True):
            found[index] = piece
    return found


def _exchanged(shards: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> list[list[tuple[int, Tensor]]]:
    here, degree = context.world().coordinates.shard, context.world().table.degrees.sdp
    outgoing, sizes_out, sizes_in = [], [], []
    for other in range(degree):
        away = sent(layouts, here, other)
        for shard, layout, (start, stop) in zip(shards, layouts, away, strict=True):
            first = layout.held(here)[0]
            outgoing.append(local(shard).detach().reshape(-1)[start - first : stop - first] if stop > start else None)
        sizes_out.append(sum(stop - start for start, stop in away))
        sizes_in.append(sum(stop - start for start, stop in sent(layouts, other, here)))
    empty = local(shards[0]).detach().reshape(-1)[:0]
    source = torch.cat([empty, *(piece for piece in outgoing if piece is not None)])
    result = source.new_empty(sum(sizes_in))
    collectives.all_to_all_into(result, source, "shard", sizes_in, sizes_out)
    found: list[list[tuple[int, Tensor]]] = [[] for _ in shards]
    position = 0
    for other in range(degree):
        for index, (start, stop) in enumerate(sent(layouts, other, here)):
            if stop > start:
                found[index].append((start, result[position : position + stop - start]))
                position += stop - start
    return found


def flat_block(tensor: Tensor, layout: ShardLayout, missing: Sequence[tuple[int, Tensor]]) -> Tensor:
    """This rank's flat block, padded with zeros.

    missing: see `missing_elements`. Where the shard is the block, the result shares its memory; else it is a copy.
    """
    parts = flat_parts(tensor, layout, missing)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def flat_parts(tensor: Tensor, layout: ShardLayout, missing: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """What lies back to back in this rank's flat block: of the shard, sharing its memory, what others sent, and zeros."""
    here = context.world().coordinates.shard
    (first, last), (start, stop) = layout.held(here), layout.flat(here)
    held = local(tensor).detach().reshape(-1)
    begin, end = max(first, start), min(last, stop)
    own = held[begin - first : end - first] if end > begin else held[:0]
    found = [(begin, own), *missing] if own.numel() or not missing else list(missing)
    padding = layout.block - (stop - start)
    zeros = [held.new_zeros(padding)] if padding else []
    return [*(values for _, values in sorted(found, key=lambda part: part[0])), *zeros]
