"""Uneven inputs on threads: ranks that end early shadow the others' steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopback import Loopback, install
from shardwright.data_parallel import join as join_module
from shardwright.data_parallel import reducer as reducer_module
from shardwright.data_parallel.join import Join, UnevenInputsError
from shardwright.data_parallel.reducer import GradientReducer
from shardwright.errors import UsageError


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Loopback:
    return install(monkeypatch, 3, [join_module, reducer_module])


class Replica:
    """A one-parameter model and the calls that an engine makes around its steps."""

    def __init__(self, rank: int, world: Loopback, **options: Any) -> None:
        self.rank = rank
        self.weight = nn.Parameter(torch.zeros(3))
        self.reducer = GradientReducer([("w", self.weight)], axis="dp", average_over=world.size)
        self.sources: list[int] = []
        self.final: list[int] = []
        self.join = Join(
            reducers=[self.reducer],
            shadow_buffers=self.sources.append,
            final_sync=self.final.append,
            **options,
        )

    def step(self, value: float, train: bool = True) -> list[float]:
        self.join.on_step_start()
        self.sources.append(self.join.source)
        self.weight.grad = None
        if train:
            (self.weight * value).sum().backward()
            self.reducer.ready(self.weight)
        self.join.reduce(train)
        return [] if self.weight.grad is None else self.weight.grad.tolist()


@pytest.mark.parametrize("full", [True, False])
def test_ended_ranks_count_as_zero(three: Loopback, full: bool) -> None:
    steps_of = [2, 4, 1]

    def body(rank: int) -> tuple[list[float], list[int], list[int]]:
        replica = Replica(rank, three, divide_by_initial_world_size=full)
        with replica.join:
            grads = [replica.step(10.0 * (rank + 1))[0] for _ in range(steps_of[rank])]
        return grads, replica.sources, replica.final

    results = three.run(body)
    sums = [60, 30, 20, 20]
    wanted = [s / n for s, n in zip(sums, [3] * 4 if full else [3, 2, 1, 1], strict=True)]
    for rank, (grads, sources, final) in enumerate(results):
        assert grads == pytest.approx(wanted[: steps_of[rank]])
        assert sources == [0, 0, 1, 1]
        assert final == [1]


def test_even_inputs_need_no_final_sync(three: Loopback) -> None:
    def body(rank: int) -> list[int]:
        replica = Replica(rank, three)
        with replica.join:
            replica.step(1.0)
        return replica.final

    assert three.run(body) == [[], [], []]


def test_rank_without_any_batch_and_steps_that_do_not_reduce(three: Loopback) -> None:
    def body(rank: int) -> list[int]:
        replica = Replica(rank, three)
        with replica.join:
            for number in range(rank):
                replica.step(1.0, train=number == 0)
        return replica.final

    assert three.run(body) == [[2]] * 3
    assert len({tuple(log) for log in three.log.values()}) == 1


def test_one_rank_that_reduces_makes_all_reduce(three: Loopback) -> None:
    def body(rank: int) -> list[float]:
        replica = Replica(rank, three)
        with replica.join:
            return replica.step(3.0, train=rank == 1)

    assert three.run(body) == [[1.0] * 3] * 3


def test_early_termination_is_an_error_on_all_ranks_if_wanted(three: Loopback) -> None:
    def body(rank: int) -> str:
        replica = Replica(rank, three, throw_on_early_termination=True)

        def train() -> None:
            with replica.join:
                for _ in range(1 if rank == 2 else 2):
                    replica.step(1.0)

        with pytest.raises(UnevenInputsError) as info:
            train()
        assert replica.reducer.overlap
        return str(info.value)

    for message in three.run(body):
        assert message.startswith("ranks [2] have no more batches, 2 of 3 replicas have")


def test_an_exception_inside_leaves_at_once(three: Loopback) -> None:
    def body(rank: int) -> None:
        replica = Replica(rank, three)
        with pytest.raises(KeyError), replica.join:
            raise KeyError("x")

    three.run(body)
    assert three.log == {0: [], 1: [], 2: []}


def test_switched_off_it_does_nothing(three: Loopback) -> None:
    def body(rank: int) -> None:
        with Replica(rank, three, enable=False).join as join:
            join.on_step_start()
            assert not join.reduce(False)

    three.run(body)
    assert three.log == {0: [], 1: [], 2: []}


def test_tensor_parallelism_is_refused(three: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    world = three.world()
    world.table.degrees.tp = 2
    monkeypatch.setattr(three, "world", lambda: world)
    with pytest.raises(UsageError, match=r"join\(\) with tensor_parallel_degree 2"):
        Replica(0, three)
