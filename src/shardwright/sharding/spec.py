"""How one tensor is cut over the ranks of a group: full shape, dim, and every rank's range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.errors import ShapeError
from shardwright.sharding.slices import Range, Units, overlapping

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """A tensor of `full_shape` of which rank r of the group holds `ranges[r]` of `dim`.

    dim: None for a replicated tensor; its `ranges` are empty.
    ranges: may differ in length (nothing is padded) and may overlap (a key-value head that two ranks need);
        together they cover the dim.
    units: what the ranges are made of, so that they follow for another number of ranks.
    """

    full_shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[Range, ...] = ()
    units: Units = Units()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.ranges:
                raise ShapeError(f"a replicated tensor has ranges {self.ranges}, expected none")
            return
        if not 0 <= self.dim < len(self.full_shape):
            raise ShapeError(f"'dim' is {self.dim}, expected 0 to {len(self.full_shape) - 1}")
        size = self.full_shape[self.dim]
        covered = 0
        for start, stop in sorted(self.ranges):
            if start > covered or stop < start or stop > size:
                raise ShapeError(f"'ranges' {self.ranges} don't cover dim {self.dim} of {self.full_shape}")
            covered = max(covered, stop)
        if covered != size:
            raise ShapeError(f"'ranges' {self.ranges} don't cover dim {self.dim} of {self.full_shape}")

    @staticmethod
    def replicated(full_shape: Sequence[int]) -> ShardSpec:
        """A tensor that every rank holds whole."""
        return ShardSpec(tuple(full_shape), None)

    @staticmethod
    def even(full_shape: Sequence[int], dim: int, num_ranks: int, units: Units = Units()) -> ShardSpec:  # noqa: B008
        """A tensor cut into parts that differ by at most one unit."""
        return ShardSpec(tuple(full_shape), dim, units.ranges(full_shape[dim], num_ranks), units)

    @property
    def overlaps(self) -> bool:
        """Whether some element is on several ranks though the tensor is cut."""
        return overlapping(self.ranges)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that a rank holds."""
        if self.dim is None:
            return self.full_shape
        start, stop = self.ranges[rank]
        return (*self.full_shape[: self.dim], stop - start, *self.full_shape[self.dim + 1 :])

    def slice_of(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's part of the full tensor, as a view.

        Raises: ShapeError if `full` has another shape.
        """
        if tuple(full.shape) != self.full_shape:
            raise ShapeError(f"the full tensor is {list(full.shape)}, expected {list(self.full_shape)}")
        if self.dim is None:
            return full
        start, stop = self.ranges[rank]
        return full.narrow(self.dim, start, stop - start)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full tensor of all ranks' parts; where parts overlap, the first one counts.

        Raises: ShapeError if a part has another shape than its rank should hold.
        """
        if self.dim is None:
            self._check(parts[0], 0)
            return parts[0].clone()
        full = parts[0].new_empty(self.full_shape)
        for rank in reversed(range(len(self.ranges))):
            self._check(parts[rank], rank)
            self.slice_of(full, rank).copy_(parts[rank])
        return full

    def _check(self, part: Tensor, rank: int) -> None:
        if tuple(part.shape) != self.local_shape(rank):
            raise ShapeError(f"the part of rank {rank} is {list(part.shape)}, expected {list(self.local_shape(rank))}")
