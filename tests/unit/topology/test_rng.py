"""Random streams: named seeds, and blocks that run on a stream of their own and leave no trace."""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.topology import rng


def draw() -> list[Any]:
    """Draw from every generator, normal numbers too: their second halves are kept between calls."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(()).item(),
        torch.randn(20).tolist(),
    ]


def seed(value: int, num_draws: int) -> None:
    rng.seed_all(value)
    for _ in range(num_draws):
        draw()


@pytest.fixture(autouse=True)
def _leave_no_trace():
    before = rng.capture()
    yield
    rng.restore(before)


@pytest.mark.parametrize("num_draws", [0, 1, 2, 3])
def test_forked_leaves_no_trace(num_draws: int) -> None:
    seed(1, num_draws)
    expected = [draw() for _ in range(3)]
    seed(1, num_draws)
    got = []
    for _ in range(3):
        with rng.forked(17):
            draw()
            np.random.shuffle(np.arange(100))
        got.append(draw())
    assert got == expected


def test_forked_runs_on_the_stream_of_its_seed() -> None:
    def inside(value: int) -> list[Any]:
        with rng.forked(value):
            return draw() + draw()

    seed(1, 1)
    first = inside(2**62 + 5)
    draw()
    assert inside(2**62 + 5) == first
    assert inside(2**62 + 6) != first


def test_forked_may_nest_and_ends_with_an_error() -> None:
    seed(1, 0)
    expected = draw()
    seed(1, 0)
    with contextlib.suppress(ValueError), rng.forked(1):
        first = draw()
        with rng.forked(2):
            draw()
        second = draw()
        raise ValueError
    assert draw() == expected
    with rng.forked(1):
        assert [draw(), draw()] == [first, second]


def test_forked_with_a_bit_generator_of_the_user() -> None:
    former = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        np.random.randn()
        state = np.random.get_state(legacy=False)
        with rng.forked(5):
            np.random.randn(3)
        after = np.random.get_state(legacy=False)
        assert after == state
    finally:
        np.random.set_bit_generator(former)


def test_capture_and_restore() -> None:
    seed(3, 3)
    state = pickle.loads(pickle.dumps(rng.capture()))
    expected = [draw(), draw()]
    seed(4, 1)
    rng.restore(state)
    assert [draw(), draw()] == expected


def test_seeds_depend_on_every_part_and_are_stable() -> None:
    assert rng.derive_seed(0, "unit", 1, 2, 3) == rng.derive_seed(0, "unit", 1, 2, 3)
    names = [(0, "a"), (0, "b"), (1, "a"), (0, "a", 0), ("0", "a"), (0, "a", ""), ()]
    seeds = {rng.derive_seed(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= value < 2**63 for value in seeds)
    assert rng.derive_seed(0, "a", 1) == 7965780462979794708  # written down: checkpoints rely on it
