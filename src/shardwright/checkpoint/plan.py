"""What to read for any target: from where each part of a tensor is stored to what a rank wants of it. Pure.

Everything is boxes. A box is a range per dimension of the whole tensor. What a file holds of a tensor is a box, or, for a
piece of a flat buffer, a few of them: a run of elements in row-major order is a partial row, full rows, and a partial row,
each of which is the same question with one dimension less. What a rank wants is a box, or a run as well. Reading is
cutting boxes with boxes, until nothing of what is wanted remains; so each element is read once, however often it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.checkpoint.manifest import Entry, KeyPath, Slice
from shardwright.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""[start, stop) per dimension."""


@dataclass(frozen=True)
class Stored:
    """One box of a tensor in a file.

    box: in the whole tensor.
    flat: None where the stored tensor has the box's shape; else the box's first element in the stored, one-dimensional
        one, from where on it lies without gaps.
    order: then: the dimensions from the slowest to the fastest.
    """

    file: str
    key: KeyPath
    box: Box
    flat: int | None = None
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Read this box, which lies inside the stored one and inside what is wanted."""

    source: Stored
    box: Box

    @property
    def num_elements(self) -> int:
        return volume(self.box)


def box_of(offset: Sequence[int], shape: Sequence[int]) -> Box:
    """The box that begins at `offset`."""
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def volume(box: Box) -> int:
    """Elements in a box."""
    return prod(stop - start for start, stop in box)


def plan(entry: Entry, wanted: Sequence[Box]) -> list[Copy]:
    """Say which parts of which files make up the wanted boxes of one tensor.

    wanted: boxes of the whole tensor that don't overlap.
    Returns: copies that don't overlap, in the order of the files they read from.
    Raises: CheckpointError naming the tensor and a part of it that is nowhere.
    """
    remaining = [box for box in wanted if volume(box)]
    around = _hull(remaining) if remaining else None
    copies: list[Copy] = []
    for part in entry.slices:
        if not remaining:
            break
        if around is None or not _touches(box_of(part.offset, part.shape), around):
            continue
        for source in stored(part):
            left: list[Box] = []
            for box in remaining:
                common = intersection(box, source.box)
                if common is None:
                    left.append(box)
                else:
                    copies.append(Copy(source, common))
                    left.extend(_without(box, common))
            remaining = left
    if remaining:
        label = entry.name if entry.state is None else f"{entry.name} ({entry.state})"
        raise CheckpointError(
            f"the checkpoint lacks a part of {label!r}: {_shown(remaining[0])} of {list(entry.shape)} is in no file",
            remedy="resume from another checkpoint; this one is incomplete",
        )
    return sorted(copies, key=lambda copy: (copy.source.file, copy.source.flat or 0))


def stored(part: Slice) -> Iterator[Stored]:
    """The boxes of what a file holds."""
    if part.span is None:
        yield Stored(part.file, part.key, box_of(part.offset, part.shape))
        return
    start, stop = part.span
    order = slow_to_fast(part.shape, part.strides)
    for box, first in run_boxes([part.shape[dim] for dim in order], start, stop):
        placed = [(0, 0)] * len(order)
        for dim, (low, high) in zip(order, box, strict=True):
            placed[dim] = (part.offset[dim] + low, part.offset[dim] + high)
        yield Stored(part.file, part.key, tuple(placed), part.at + first - start, order)


def slow_to_fast(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...]:
    """Dimensions in the order of memory; that of the shape without strides."""
    if strides is None:
        return tuple(range(len(shape)))
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] != 1, dim)))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut a run of elements, in row-major order, into boxes, each with the place of its first element."""
    if start >= stop:
        return
    if not shape:
        yield (), 0
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows
    if first > last:  # inside one row
        yield from _inside(shape, last, start, stop)
        return
    if start < first * row:
        yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:])), first * row
    if last * row < stop:
        yield from _inside(shape, last, last * row, stop)


def _inside(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    begin = index * prod(shape[1:])
    for box, first in run_boxes(shape[1:], start - begin, stop - begin):
        yield ((index, index + 1), *box), begin + first


def cut_up(box: Box, most_elements: int) -> Iterator[Box]:
    """Boxes of at most so many elements, one after the other in row-major order, that make up a box."""
    if volume(box) <= most_elements:
        yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, most_elements * (stop - start) // volume(box))
    for first in range(start, stop, step):
        yield from cut_up((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), most_elements)


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def _touches(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _hull(boxes: Sequence[Box]) -> Box:
    return tuple((min(r[0] for r in ranges), max(r[1] for r in ranges)) for ranges in zip(*boxes, strict=True))


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Boxes that make up a box less one that lies inside it."""
    rest = list(box)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        if start < low:
            yield (*rest[:dim], (start, low), *rest[dim + 1 :])
        if high < stop:
            yield (*rest[:dim], (high, stop), *rest[dim + 1 :])
        rest[dim] = (low, high)


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
