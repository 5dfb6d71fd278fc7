"""Cutting and merging: ranges, specs, uneven and overlapping parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ShapeError
from shardwright.sharding.slices import covering_ranges, even_ranges, overlapping, scaled_ranges
from shardwright.sharding.spec import ShardSpec


def test_uneven_sizes_are_not_padded() -> None:
    assert even_ranges(101, 2) == ((0, 51), (51, 101))
    assert even_ranges(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))


def test_key_value_heads_of_query_heads() -> None:
    # 8 query heads on 4 ranks, 2 key-value heads: ranks 0 and 1 need the first one
    assert covering_ranges(even_ranges(8, 4), 4) == ((0, 1), (0, 1), (1, 2), (1, 2))
    # 6 query heads on 2 ranks, 3 key-value heads: the middle one is needed on both
    ranges = covering_ranges(even_ranges(6, 2), 2)
    assert ranges == ((0, 2), (1, 3))
    assert overlapping(ranges)
    assert scaled_ranges(ranges, 8) == ((0, 16), (8, 24))


@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 2))
def test_split_then_merge_is_identity(size: int, num_ranks: int, dim: int) -> None:
    shape = [3, 2, 4]
    shape[dim] = size
    spec = ShardSpec.even(shape, dim, num_ranks)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [spec.slice_of(full, rank) for rank in range(num_ranks)]
    assert [tuple(part.shape) for part in parts] == [spec.local_shape(rank) for rank in range(num_ranks)]
    assert max(part.shape[dim] for part in parts) - min(part.shape[dim] for part in parts) <= 1
    assert torch.equal(spec.merge(parts), full)


def test_overlapping_parts_merge() -> None:
    spec = ShardSpec((6, 2), 0, ((0, 4), (2, 6)))
    full = torch.arange(12).view(6, 2)
    assert spec.overlaps
    assert torch.equal(spec.merge([spec.slice_of(full, 0), spec.slice_of(full, 1)]), full)


def test_replicated() -> None:
    spec = ShardSpec.replicated((3,))
    full = torch.arange(3)
    assert spec.local_shape(1) == (3,)
    assert torch.equal(spec.merge([full, full]), full)


@pytest.mark.parametrize(
    ("dim", "ranges"), [(0, ((0, 2), (3, 4))), (0, ((0, 2),)), (0, ((0, 5),)), (2, ((0, 4),)), (None, ((0, 4),))]
)
def test_impossible_specs_are_refused(dim: int | None, ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ShapeError):
        ShardSpec((4, 2), dim, ranges)


def test_wrong_shapes_are_refused() -> None:
    spec = ShardSpec.even((5, 2), 0, 2)
    with pytest.raises(ShapeError, match=r"\[4, 2\], expected \[5, 2\]"):
        spec.slice_of(torch.zeros(4, 2), 0)
    with pytest.raises(ShapeError, match="part of rank 1"):
        spec.merge([torch.zeros(3, 2), torch.zeros(3, 2)])
