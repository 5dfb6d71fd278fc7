"""Cuts over tp ranks, read off a manifest and made for another degree; what doesn't follow is refused."""

from __future__ import annotations

import pytest

from shardwright.checkpoint.relayout.recut import Cut, recut
from shardwright.errors import CheckpointError
from shardwright.sharding.slices import Units, covering_ranges, even_ranges, scaled_ranges


def heads(count: int, size: int, tp: int, dim: int = 0) -> Cut:
    """Query heads."""
    shape = (5, count * size) if dim else (count * size, 5)
    return Cut(shape, dim, scaled_ranges(even_ranges(count, tp), size))


def key_heads(count: int, group: int, size: int, tp: int) -> Cut:
    """Key-value heads, each for `group` query heads."""
    ranges = scaled_ranges(covering_ranges(even_ranges(count * group, tp), group), size)
    return Cut((count * size, 5), 0, ranges)


@pytest.mark.parametrize(("saved", "wanted"), [(2, 3), (3, 2), (4, 7), (8, 1), (3, 3)])
def test_uneven_ranges_tell_their_unit(saved: int, wanted: int) -> None:
    cuts = {"weight": heads(13, 4, saved, dim=1), "vocabulary": heads(101, 1, saved)}
    expected = {"weight": heads(13, 4, wanted, dim=1), "vocabulary": heads(101, 1, wanted)} if wanted > 1 else {}
    assert recut(cuts, saved, wanted) == expected


@pytest.mark.parametrize(("saved", "wanted"), [(4, 2), (8, 4), (8, 2), (6, 3)])
def test_equal_ranges_are_joined(saved: int, wanted: int) -> None:
    """Whatever a head is; key-value heads that several ranks need, and those that they share, too."""
    for size in (1, 3):
        for count, group in ((2, 24), (24, 1), (8, 3), (3, 16)):
            cuts = {"q": heads(count * group, size, saved), "k": key_heads(count, group, size, saved)}
            cuts["vocabulary"] = heads(101, 1, saved)
            expected = {"q": heads(count * group, size, wanted), "k": key_heads(count, group, size, wanted)}
            assert recut(cuts, saved, wanted) == {**expected, "vocabulary": heads(101, 1, wanted)}


def test_what_does_not_follow_is_refused() -> None:
    for cuts, saved, wanted in (
        ({"q": heads(6, 4, 2)}, 2, 4),  # four ranks of six heads: 2, 2, 1, 1
        ({"q": heads(12, 4, 4)}, 4, 3),
        ({"q": heads(6, 4, 4), "k": key_heads(2, 3, 4, 4)}, 4, 2),  # what the third query head needs isn't known
    ):
        with pytest.raises(CheckpointError, match="doesn't follow from its ranges"):
            recut(cuts, saved, wanted)
    with pytest.raises(CheckpointError, match="nothing of the model is cut"):
        recut({}, 1, 2)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 7, 16])
def test_units_give_the_ranges_of_any_degree(tp: int) -> None:
    for size in (1, 3):
        for count, group in ((2, 8), (5, 1), (4, 3)):
            queries, keys = heads(count * group, size, tp), key_heads(count, group, size, tp)
            assert Units(size).ranges(queries.shape[0], tp) == queries.ranges
            assert Units(size, group).ranges(keys.shape[0], tp) == keys.ranges
