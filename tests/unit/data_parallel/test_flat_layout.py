"""Rows and flat blocks of tensors cut over a shard group."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data_parallel.flat_layout import ShardLayout, sent

layouts = st.builds(
    ShardLayout,
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
    st.integers(1, 5),
)


@given(layouts)
def test_rows_are_those_of_torch_chunk(layout: ShardLayout) -> None:
    if not layout.shape:
        return
    whole = torch.zeros(layout.shape)
    chunks = whole.chunk(layout.degree)
    for rank in range(layout.degree):
        start, stop = layout.rows(rank)
        if rank < len(chunks):
            assert stop - start == chunks[rank].shape[0]
        else:
            assert start == stop


@given(layouts)
def test_flat_blocks_follow_each_other_and_hold_everything(layout: ShardLayout) -> None:
    ranges = [layout.flat(rank) for rank in range(layout.degree)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.num_elements
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(stop - start <= layout.block for start, stop in ranges)
    assert 0 <= layout.block * layout.degree - layout.num_elements < layout.degree


@given(st.lists(layouts, min_size=1, max_size=3), st.integers(1, 5))
def test_what_is_sent_fills_every_block(given_layouts: list[ShardLayout], degree: int) -> None:
    cut = [ShardLayout(layout.shape, degree) for layout in given_layouts if layout.shape]
    for index, layout in enumerate(cut):
        for rank in range(degree):
            start, stop = layout.flat(rank)
            found = set(range(*layout.held(rank))) & set(range(start, stop))
            for other in range(degree):
                pieces = set(range(*sent(cut, other, rank)[index]))
                assert not pieces & found
                found |= pieces
            assert found == set(range(start, stop))


def test_the_usual_shapes() -> None:
    assert ShardLayout((6,), 4).is_flat  # 2 2 2 0
    assert ShardLayout((1,), 4).is_flat
    assert ShardLayout((8, 3), 4).is_flat
    uneven = ShardLayout((3, 7), 4)
    assert not uneven.is_flat
    assert uneven.block == 6
    assert [uneven.held(rank) for rank in range(4)] == [(0, 7), (7, 14), (14, 21), (21, 21)]
    assert [uneven.flat(rank) for rank in range(4)] == [(0, 6), (6, 12), (12, 18), (18, 21)]
    assert sent([uneven], 2, 3) == [(18, 21)]
