"""Two ways to cut one tensor over the ranks of a shard group: by rows, and flat. Pure arithmetic.

By rows is what `fully_shard` does: rank r holds ceil(rows / degree) rows, later ranks fewer or none. Flat is the layout that
scripts and checkpoints of the original know: the elements in memory order, padded at the end to a multiple of the degree; rank
r has the r-th block. Both are the same where the rows divide evenly, and for tensors of one dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True)
class ShardLayout:
    """One tensor cut over `degree` ranks; ranges count elements in memory order.

    shape: the whole tensor's. A tensor without dims is held by every rank, and is in the flat block of the first.
    """

    shape: tuple[int, ...]
    degree: int

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def block(self) -> int:
        """Elements of each rank's flat block, padding included."""
        return -(-self.num_elements // self.degree)

    @property
    def num_rows(self) -> int:
        """The most rows that a rank holds."""
        return -(-self.shape[0] // self.degree) if self.shape else 1

    def rows(self, rank: int) -> Range:
        """The rows that a rank holds."""
        size = self.shape[0] if self.shape else 1
        if not self.shape:
            return 0, 1
        return min(rank * self.num_rows, size), min((rank + 1) * self.num_rows, size)

    def held(self, rank: int) -> Range:
        """The elements that a rank holds."""
        row = math.prod(self.shape[1:])
        start, stop = self.rows(rank)
        return start * row, stop * row

    def flat(self, rank: int) -> Range:
        """The elements of a rank's flat block, without padding."""
        return min(rank * self.block, self.num_elements), min((rank + 1) * self.block, self.num_elements)

    @property
    def is_flat(self) -> bool:
        """Does every rank hold its flat block?"""
        return all(common(self.held(rank), self.flat(rank)) == self.flat(rank) for rank in range(self.degree))


def common(a: Range, b: Range) -> Range:
    """What two ranges share; empty at the start of `b` if nothing."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else (b[0], b[0])


def sent(layouts: Sequence[ShardLayout], source: int, target: int) -> list[Range]:
    """For each tensor the elements that one rank holds and another has in its flat block."""
    return [(0, 0) if source == target else common(x.held(source), x.flat(target)) for x in layouts]
