"""Pieces of parameters: every element has one owner, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loopback import install
from shardwright.data_parallel import optimizer_state
from shardwright.data_parallel.buckets import TensorInfo, plan_buckets
from shardwright.data_parallel.optimizer_state import FlatBucket, ShardedParameters
from shardwright.errors import UsageError

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


def parameters(of: list[tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"p{i}", nn.Parameter(torch.rand(shape, generator=generator))) for i, shape in enumerate(of)]


@given(shapes, st.integers(1, 5), st.integers(1, 40))
def test_every_element_has_one_owner(of: list[tuple[int, ...]], num_owners: int, cap: int) -> None:
    owned = {f"p{i}": torch.zeros(shape) for i, shape in enumerate(of)}
    for owner in range(num_owners):
        named = parameters(of)
        before = {n: p.detach().clone() for n, p in named}
        plan = plan_buckets([TensorInfo.of(n, p) for n, p in named], cap_bytes=4 * cap, reverse=True)
        buckets = [FlatBucket(b, [named[s.position][1] for s in b.slots], num_owners, owner) for b in plan]
        assert all(torch.equal(p, before[n]) for n, p in named)
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        assert {id(piece.parameter) for piece in pieces} == {id(p) for _, p in named}
        for bucket in buckets:
            assert bucket.moved() is None
            assert len(bucket.flat) == num_owners * bucket.share < bucket.plan.num_elements + num_owners
            assert sum(piece.stop - piece.start for piece in bucket.pieces) <= bucket.share
        for piece in pieces:
            assert torch.equal(piece.cut(before[piece.name]), piece.tensor)
            with torch.no_grad():
                piece.tensor.add_(1)
            owned[piece.name] += piece.parameter.detach() - before[piece.name]
    for total in owned.values():
        assert torch.allclose(total, torch.ones_like(total))


def test_order_of_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 2, [optimizer_state])
    image = nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
    values, strides = image.detach().clone(), image.stride()
    sharded = ShardedParameters("dp")
    assert len(sharded.cover([("image", image)], 1 << 20)) == 1
    assert sharded.cover([("image", image)], 1 << 20) == []
    assert torch.equal(image, values)
    assert image.stride() == strides
    piece = sharded.piece(image)
    assert piece is not None
    assert sharded.piece_behind(piece.tensor) is piece
    assert torch.equal(piece.cut(values.contiguous()), piece.tensor)
    image.data = image.data.clone()
    with pytest.raises(UsageError, match="parameter 'image' was moved, cast or given other data"):
        sharded.check_in_place()


def test_memory_of_two_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 2, [optimizer_state])
    base = torch.rand(10)
    apart = [("a", nn.Parameter(base[:4])), ("b", nn.Parameter(base[4:]))]
    assert ShardedParameters("dp").cover(apart, 1 << 20)
    base = torch.rand(10)
    with pytest.raises(UsageError, match="parameters 'a' and 'b' are different objects with the same memory"):
        ShardedParameters("dp").cover([("a", nn.Parameter(base[:5])), ("b", nn.Parameter(base[4:]))], 1 << 20)
