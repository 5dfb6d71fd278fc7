"""Optimizer state of pieces: cut from that of whole parameters, and joined to it. Pure.

A tensor of a parameter's shape is cut like the parameter; anything else, and what is called "step" as in torch's own
`load_state_dict`, belongs to each piece alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.checkpoint.state import Spans
from shardwright.data_parallel.buckets import contiguous_strides
from shardwright.data_parallel.optimizer_state import Piece
from shardwright.errors import UsageError


@dataclass(frozen=True)
class Part:
    """One owner's state of one parameter. start, stop, shape, stride: see `Piece`."""

    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    values: Any


def part_of(piece: Piece, values: Any) -> Part:
    """What a rank tells others of its piece."""
    return Part(piece.start, piece.stop, piece.slot.shape, piece.slot.stride, values)


def cut(values: Any, piece: Piece, key: Any = None) -> Any:
    """The state of a piece from that of its whole parameter. Tensors are copies."""
    if isinstance(values, torch.Tensor):
        if key != "step" and tuple(values.shape) == piece.slot.shape:
            return piece.cut(values.detach())
        return values.detach().clone()
    if isinstance(values, dict):
        return {name: cut(value, piece, name) for name, value in values.items()}
    return values


def joined(parts: Sequence[Part], key: Any = None) -> Any:
    """The state of a whole parameter from that of all its pieces."""
    first = parts[0].values
    if isinstance(first, torch.Tensor):
        fits = all(tuple(part.values.shape) == (part.stop - part.start,) for part in parts)
        if key == "step" or not fits:
            return first
        whole = first.new_empty_strided(parts[0].shape, parts[0].stride)
        flat = whole.as_strided((whole.numel(),), (1,))
        for part in parts:
            flat[part.start : part.stop] = part.values
        return whole
    if isinstance(first, dict):
        inner = {name: [Part(p.start, p.stop, p.shape, p.stride, p.values[name]) for p in parts] for name in first}
        return {name: joined(values, name) for name, values in inner.items()}
    return first


def span_of(piece: Piece) -> list[Any]:
    """How a state dict says what a piece is, see `checkpoint.state.SPANS`."""
    slot = piece.slot
    plain = slot.stride == contiguous_strides(slot.shape)
    return [piece.start, piece.stop, slot.num_elements, *([] if plain else [list(slot.stride)])]


def check_spans(saved: Spans, present: Spans) -> None:
    """Raise UsageError unless a shard of an optimizer's state belongs to the pieces that this rank has now."""
    other = [name for name, span in present.items() if name in saved and list(saved[name]) != list(span)]
    missing = sorted(saved.keys() - present.keys())
    if other:
        name = other[0]
        raise UsageError(
            f"this shard of the optimizer state has elements {saved[name][0]} to {saved[name][1]} of {saved[name][2]} of"
            f" '{name}', this rank now owns {present[name][0]} to {present[name][1]} of {present[name][2]}",
            remedy="load the shard of this rank, with the degrees, bucket_cap_mb and frozen parameters it was saved"
            " with; optimizer.state_dict() is whole and fits everywhere",
        )
    if missing:
        raise UsageError(
            f"this shard of the optimizer state belongs to pieces of {len(missing)} parameters that aren't sharded here,"
            f" the first is '{missing[0]}'",
            remedy="set 'shard_optimizer_state' as when it was saved; optimizer.state_dict() is whole and fits"
            " everywhere",
        )
