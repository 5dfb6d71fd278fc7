"""How a dimension is cut among ranks: pure arithmetic on half-open ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Range = tuple[int, int]
"""(start, stop), half open."""


def even_ranges(size: int, num_ranks: int) -> tuple[Range, ...]:
    """Cut `size` into contiguous ranges whose lengths differ by at most one, the longer ones first.

    101 over 2 is (0, 51), (51, 101). With more ranks than elements the last ranges are empty.
    """
    length, longer = divmod(size, num_ranks)
    stops = [length * (rank + 1) + min(rank + 1, longer) for rank in range(num_ranks)]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def covering_ranges(ranges: Sequence[Range], group_size: int) -> tuple[Range, ...]:
    """Return for each range of members the range of the groups that they belong to.

    The key-value heads that a rank needs for its query heads, when `group_size` query heads share one. Ranges
    of several ranks may overlap: a group whose members are on two ranks is needed on both.
    """
    return tuple((start // group_size, -(-stop // group_size)) for start, stop in ranges)


def scaled_ranges(ranges: Sequence[Range], factor: int) -> tuple[Range, ...]:
    """Return ranges of elements for ranges of blocks of `factor` elements (heads to rows)."""
    return tuple((start * factor, stop * factor) for start, stop in ranges)


@dataclass(frozen=True)
class Units:
    """What is never cut of a dim: `size` elements (a head). shared_by: how many query heads use one key-value head, which every
    rank has that has one of them.
    """

    size: int = 1
    shared_by: int = 1

    def ranges(self, length: int, num_ranks: int) -> tuple[Range, ...]:
        """Each rank's elements of a dim of `length`, the ranks with more units first."""
        users = even_ranges(length // self.size * self.shared_by, num_ranks)
        return scaled_ranges(covering_ranges(users, self.shared_by), self.size)


def overlapping(ranges: Sequence[Range]) -> bool:
    """Return whether some element lies in the ranges of two ranks."""
    ordered = sorted(r for r in ranges if r[0] < r[1])
    return any(first[1] > second[0] for first, second in pairwise(ordered))
