"""State of pieces: cut and joined again it is that of the whole parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_ranks import same
from shardwright.data_parallel.buckets import TensorInfo, plan_buckets
from shardwright.data_parallel.optimizer_state import FlatBucket, Piece
from shardwright.engine import piece_state
from shardwright.errors import UsageError


def pieces_of(value: Tensor, num_owners: int) -> list[Piece]:
    (plan,) = plan_buckets([TensorInfo.of("w", value)], cap_bytes=1 << 20)
    return [FlatBucket(plan, [nn.Parameter(value.clone())], num_owners, owner).pieces[0] for owner in range(num_owners)]


@pytest.mark.parametrize("shape", [(3, 7), (5,), (1,), (), (0,)])
@pytest.mark.parametrize("num_owners", [1, 2, 4])
def test_cut_and_joined(shape: tuple[int, ...], num_owners: int) -> None:
    values: dict[str, Any] = {
        "exp_avg": torch.rand(shape),
        "nested": {"square": torch.rand(shape)},
        "step": torch.tensor(3.0),
        "other": torch.rand(2, 2, 2),
        "name": "x",
    }
    pieces = pieces_of(torch.rand(shape), num_owners)
    parts = [piece_state.part_of(piece, piece_state.cut(values, piece)) for piece in pieces]
    for piece, part in zip(pieces, parts, strict=True):
        assert part.values["exp_avg"].shape == piece.tensor.shape
        assert part.values["step"].shape == ()
    assert same(piece_state.joined(parts), values)


def test_cut_state_belongs_to_the_piece() -> None:
    whole = {"exp_avg": torch.zeros(4), "step": torch.zeros(())}
    cut = piece_state.cut(whole, pieces_of(torch.rand(4), 2)[0])
    for value in cut.values():
        value.add_(1)
    assert not any(value.any() for value in whole.values())


def test_spans_tell_what_a_piece_is() -> None:
    image = torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last)
    first, second = (piece_state.span_of(piece) for piece in pieces_of(image, 2))
    assert (first, second) == ([0, 12, 24, [12, 1, 6, 3]], [12, 24, 24, [12, 1, 6, 3]])
    assert piece_state.span_of(pieces_of(torch.rand(3), 2)[1]) == [2, 3, 3]
    piece_state.check_spans({"a": first}, {"a": first, "new": second})
    with pytest.raises(UsageError, match="elements 0 to 12 of 24 of 'a', this rank now owns 12 to 24 of 24"):
        piece_state.check_spans({"a": first}, {"a": second})
    with pytest.raises(UsageError, match="1 parameters that aren't sharded here, the first is 'a'"):
        piece_state.check_spans({"a": first}, {})
