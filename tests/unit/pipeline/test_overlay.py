"""Attributes of modules as each microbatch sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.overlay import Overlay


def set_as_torch_does(module: nn.Module, key: str, value: Any) -> None:
    nn.Module.__setattr__(module, key, value)


class Steps:
    """A module and the overlay of one step."""

    def __init__(self, **attributes: Any) -> None:
        self.module = nn.Module()
        self.module.__dict__.update(attributes)
        self.overlay = Overlay()

    def assign(self, microbatch: int, value: Any, key: str = "x") -> None:
        self.overlay.show(microbatch)
        self.overlay.assign(microbatch, self.module, key, value, set_as_torch_does)

    def seen(self, microbatch: int, key: str = "x") -> Any:
        self.overlay.show(microbatch)
        return self.module.__dict__.get(key, "absent")


def test_own_assignments_come_first() -> None:
    step = Steps(x=0)
    step.assign(0, "a")
    step.assign(1, "b")
    assert [step.seen(i) for i in (0, 1, 0, 2)] == ["a", "b", "a", "b"]


def test_later_microbatches_see_earlier_ones() -> None:
    step = Steps(x=0)
    assert step.seen(1) == 0
    step.assign(0, "a")
    assert step.seen(1) == "a"
    step.assign(2, "c")
    assert [step.seen(i) for i in range(4)] == ["a", "a", "c", "c"]


def test_the_last_microbatch_stays() -> None:
    step = Steps(x=0)
    for microbatch in (0, 2, 1):
        step.assign(microbatch, microbatch)
    step.overlay.settle()
    assert step.module.x == 2
    step.overlay.show(0)
    assert step.module.x == 2


def test_a_failed_step_leaves_nothing() -> None:
    step = Steps(x=0)
    step.assign(0, 1)
    step.assign(0, 1, key="new")
    step.overlay.undo()
    assert step.module.x == 0
    assert "new" not in step.module.__dict__


def test_new_attributes_are_absent_before() -> None:
    step = Steps()
    step.assign(1, "b")
    assert [step.seen(i) for i in (0, 1)] == ["absent", "b"]


def test_functions_are_not_handed_on() -> None:
    """A patch that one microbatch has put in, and has yet to take out, is no business of the next."""
    step = Steps(x=0)
    step.assign(0, len)
    assert [step.seen(i) for i in (0, 1)] == [len, 0]


def test_containers_are_copied_for_later_microbatches() -> None:
    step = Steps(x=0)
    first: list[str] = []
    step.assign(0, first)
    step.seen(1).append("b")
    step.seen(0).append("a")
    assert step.seen(0) is first
    assert (step.seen(0), step.seen(1)) == (["a"], ["b"])


def test_tracked_containers_are_apart_without_assignment() -> None:
    step = Steps(x=["old"])
    step.overlay.track(step.module, "x")
    step.seen(0).append("a")
    step.seen(1).append("b")  # as in one process, it finds what the microbatch before has left so far
    assert step.seen(0) == ["old", "a"]
    step.overlay.settle()
    assert step.module.x == ["old", "a", "b"]


def test_parameters_and_modules_are_left_to_torch() -> None:
    step = Steps()
    step.assign(0, nn.Parameter(torch.zeros(1)))
    step.assign(0, nn.Linear(1, 1), key="child")
    assert set(step.module._parameters) == {"x"}
    assert set(step.module._modules) == {"child"}
    step.overlay.undo()
    assert set(step.module._parameters) == {"x"}


def test_the_newest_value_behind_an_old_one() -> None:
    step = Steps(x="old")
    step.assign(0, "a")
    assert step.overlay.newest(1, "old") == "a"
    assert step.overlay.newest(1, "a") == "a"
    assert step.overlay.newest(1, "unknown") == "unknown"


def test_what_a_later_microbatch_has_used_is_not_assigned() -> None:
    step = Steps(x=0)
    step.assign(0, "a")
    step.overlay.take(1, step.module, "x")
    step.assign(1, "b")
    step.assign(2, "c")
    with pytest.raises(UnsupportedOperationError, match="microbatch 0 assigns 'x' .* which microbatch 1 has used"):
        step.assign(0, "d")


def test_who_begins_anew_sees_what_was_added_meanwhile() -> None:
    step = Steps(x=[1])
    step.overlay.track(step.module, "x")
    step.seen(0)
    assert step.seen(1) == [1]
    step.seen(0).append(2)
    assert step.seen(1) == [1]
    step.overlay.begin(1)
    assert step.module.x == [1, 2]
