"""How a dimension is cut among ranks: pure arithmetic on half-open ranges."""

from __future__ import annotations

from collections.abc import Sequence
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


def overlapping(ranges: Sequence[Range]) -> bool:
    """Return whether some element lies in the ranges of two ranks."""
    ordered = sorted(r for r in ranges if r[0] < r[1])
    return any(first[1] > second[0] for first, second in pairwise(ordered))
