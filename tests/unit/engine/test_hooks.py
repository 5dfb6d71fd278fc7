"""Hooks of scripts: order, once, at once, and what they are called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright.torch as smp


@smp.step
def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def wrapped() -> tuple[smp.DistributedModel, Any]:
    """A wrapped model, and an optimizer of it that is not wrapped yet."""
    model = smp.DistributedModel(nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


pytestmark = pytest.mark.usefixtures("world_of_one")


def test_partition_hook_waits_for_the_optimizer() -> None:
    model, optimizer = wrapped()
    seen: list[Any] = []
    model.register_post_partition_hook(lambda *given: seen.append(given))
    model.register_post_partition_hook(lambda: seen.append("without arguments"))
    assert seen == []
    optimizer = smp.DistributedOptimizer(optimizer)
    assert seen == [(model, optimizer), "without arguments"]
    train_step(model, torch.ones(4, 3))
    assert len(seen) == 2


def test_partition_hook_waits_no_longer_than_for_the_first_step() -> None:
    model, _ = wrapped()
    seen: list[Any] = []

    @smp.step
    def look(model: nn.Module, x: torch.Tensor) -> None:
        seen.append("body")

    model.register_post_partition_hook(lambda m, o: seen.append((m is model, o)))
    look(model, torch.ones(4, 3))
    assert seen == [(True, None), "body", "body"]
    model.register_post_partition_hook(lambda m, o: seen.append("at once"))
    assert seen[-1] == "at once"


def test_partition_hook_after_partitioning_runs_at_once() -> None:
    model, optimizer = wrapped()
    smp.DistributedOptimizer(optimizer)
    seen: list[Any] = []

    def outer(model: Any, optimizer: Any) -> None:
        seen.append("outer begins")
        model.register_post_partition_hook(lambda: seen.append("inner"))
        seen.append("outer ends")

    model.register_post_partition_hook(outer)
    assert seen == ["outer begins", "inner", "outer ends"]


def test_step_hooks_run_once_and_in_order() -> None:
    model, optimizer = wrapped()
    optimizer = smp.DistributedOptimizer(optimizer)
    seen: list[Any] = []
    model.register_post_step_hook(lambda m, o: seen.append(("first", m is model, o is optimizer)))
    model.register_post_step_hook(lambda: seen.append("second"))
    evaluate(model, torch.ones(4, 3))  # any step counts
    assert seen == [("first", True, True), "second"]
    train_step(model, torch.ones(4, 3))
    assert len(seen) == 2
    model.register_post_step_hook(lambda: seen.append("late"))
    assert len(seen) == 2
    train_step(model, torch.ones(4, 3))
    assert seen[2:] == ["late"]


def test_step_hook_sees_gradients_and_may_register_more() -> None:
    model, optimizer = wrapped()
    smp.DistributedOptimizer(optimizer)
    seen: list[Any] = []

    def hook(model: Any, optimizer: Any) -> None:
        seen.append(all(p.grad is not None for p in model.local_parameters()))
        model.register_post_partition_hook(lambda: seen.append("partition hook, at once"))
        model.register_post_step_hook(lambda: seen.append("step hook, next time"))

    model.register_post_step_hook(hook)
    train_step(model, torch.ones(4, 3))
    assert seen == [True, "partition hook, at once"]
    train_step(model, torch.ones(4, 3))
    assert seen[2:] == ["step hook, next time"]


def test_a_hook_can_be_taken_back_and_registered_twice() -> None:
    model, _ = wrapped()
    seen: list[int] = []

    def hook() -> None:
        seen.append(len(seen))

    handles = [model.register_post_step_hook(hook) for _ in range(3)]
    handles[1].remove()
    evaluate(model, torch.ones(4, 3))
    assert seen == [0, 1]
    handles[0].remove()  # has run: nothing to take back


def test_a_hook_must_be_callable() -> None:
    model, _ = wrapped()
    with pytest.raises(TypeError, match="not str"):
        model.register_post_step_hook("hook")  # type: ignore[arg-type]
