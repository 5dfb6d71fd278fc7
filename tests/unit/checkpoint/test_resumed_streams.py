from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from shardwright.checkpoint.layout import Layout
from shardwright.checkpoint.resumed_streams import joined, source
from shardwright.topology import rng
from shardwright.topology.ranks import Degrees, RankTable


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def table(layout: Layout) -> RankTable:
    return RankTable(Degrees(layout.pp, layout.tp, layout.rdp), layout.placement)


@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_a_place_that_was_there_keeps_its_state(placement: str) -> None:
    saved, present = Layout(2, 2, 3, placement), table(Layout(3, 1, 4))
    there = table(saved)
    for rank in range(present.world_size):
        at = present.coordinates(rank)
        found = source(saved, at)
        inside = at.pp < 2 and at.rdp < 3
        where = {"pp": at.pp if at.pp < 2 else 0, "tp": 0, "rdp": at.rdp if at.rdp < 3 else 0}
        assert found.rank == there.rank_at(**where)
        assert inside == (not found.neighbours)
        for neighbour, position in found.neighbours:
            assert there.coordinates(neighbour) != there.coordinates(found.rank)
            assert position in (at.pp, at.rdp)


def test_beyond_an_axis_of_one_there_is_nobody_to_compare_with() -> None:
    at = table(Layout(1, 1, 4)).coordinates(3)
    assert source(Layout(1, 1, 1), at).neighbours == ()
    assert len(source(Layout(1, 1, 2), at).neighbours) == 1


def state(torch_seed: int, numpy_seed: int = 0, python_seed: int = 0) -> rng.RngState:
    torch.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)
    return rng.capture()


def draws(state: rng.RngState) -> tuple[float, float, float]:
    rng.restore(state)
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def test_generators_that_were_alike_stay_alike() -> None:
    one = state(5)
    assert draws(joined(one, [(state(5), 2)])) == draws(one)


@pytest.mark.parametrize("different", [0, 1, 2])
def test_a_generator_that_differed_gets_a_stream_of_its_own(different: int) -> None:
    seeds = [7, 7, 7]
    one = state(*seeds)
    seeds[different] = 8
    neighbour = state(*seeds)
    made = [draws(joined(one, [(neighbour, position)])) for position in (2, 3, 2)]
    assert made[0] == made[2]
    for index, values in enumerate(zip(draws(one), draws(neighbour), made[0], made[1], strict=True)):
        if index == different:
            assert len(set(values)) == 4
        else:
            assert len(set(values)) == 1


def test_a_position_on_two_axes_counts() -> None:
    one, other = state(1), state(2)
    made = {draws(joined(one, [(other, a), (other, b)]))[0] for a, b in product((2, 3), (2, 3))}
    assert len(made) == 4
