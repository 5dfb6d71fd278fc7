"""What microbatches share is used in their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from one_frame import Alone, glue, make_frame, placed_leaf
from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline import shared
from shardwright.pipeline.frame import Frame
from shardwright.pipeline.schedule import Order
from shardwright.pipeline.shared import SharedUses


def test_forward_waits_for_the_forward_of_earlier_microbatches() -> None:
    order = Order(3, limit=3, gated=False)
    assert order.may_pass(0)
    assert not order.may_pass(1)
    order.at_gate(0)
    assert order.may_pass(1)
    assert not order.may_pass(2)
    order.done(1)
    assert order.may_pass(2)


def test_after_its_backward_a_microbatch_waits_for_the_end_of_earlier_ones() -> None:
    order = Order(3, limit=3, gated=False)
    order.at_gate(0)
    order.at_gate(1)
    assert not order.may_pass(1)
    order.done(0)
    assert order.may_pass(1)


def test_use_after_a_later_microbatch_is_refused() -> None:
    uses = SharedUses()
    thing = object()
    first: Any = SimpleNamespace(index=0, where=str, in_backward=False)
    later: Any = SimpleNamespace(index=1, where=str, in_backward=False)
    uses.note(first, thing)
    uses.note(later, thing)
    uses.note(later, thing)
    with pytest.raises(UnsupportedOperationError, match=r"microbatch 0 uses .* microbatch 1 has used"):
        uses.note(first, thing)


def test_reads_come_in_any_order_but_not_after_a_later_change() -> None:
    uses = SharedUses()
    thing = object()
    first: Any = SimpleNamespace(index=0, where=str, in_backward=False)
    later: Any = SimpleNamespace(index=1, where=str, in_backward=False)
    uses.note_read(later, thing)
    uses.note_read(first, thing)
    with pytest.raises(UnsupportedOperationError):
        uses.note(first, thing)
    uses.note(later, thing)
    with pytest.raises(UnsupportedOperationError):
        uses.note_read(first, thing)


def test_a_use_after_backward_is_another_one() -> None:
    uses = SharedUses()
    thing = object()
    frame: Any = SimpleNamespace(index=0, where=str, in_backward=False)
    assert not uses.is_last(frame, thing)
    uses.note(frame, thing)
    assert uses.is_last(frame, thing)
    frame.in_backward = True
    assert not uses.is_last(frame, thing)


def test_a_tensor_of_a_later_microbatch_is_refused() -> None:
    turns = Alone()
    first, later = make_frame(turns=turns), make_frame(index=1, turns=turns)
    box = placed_leaf(later, torch.ones(2))
    with glue(first), pytest.raises(UnsupportedOperationError, match="microbatch 0 found a tensor of microbatch 1"):
        box * 2


def test_a_constant_of_an_earlier_microbatch_is_used_and_one_with_gradient_refused() -> None:
    turns = Alone()
    first, later = make_frame(turns=turns, size=1), make_frame(index=1, turns=turns, size=1)
    kept, with_grad = placed_leaf(first, torch.ones(2)), placed_leaf(first, torch.ones(2, requires_grad=True))
    with glue(later):
        assert (kept * 2).tolist() == [2, 2]
        with pytest.raises(UnsupportedOperationError, match="detach"):
            with_grad * 2


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class Impatient(Alone):
    def in_order(self, frame: Frame) -> None:
        raise TimeoutError("it would wait")


def test_a_buffer_that_glue_only_reads_is_read_without_waiting_from_the_second_step_on() -> None:
    module = Counter()
    frame = make_frame(index=1, size=1, turns=Impatient())
    frame.runtime.register("count", module.count, 0, (module, "count"))
    with glue(frame), pytest.raises(TimeoutError):
        module.count + 1
    [buffer] = frame.runtime.registered.values()
    assert shared.step_ends(frame.runtime) == []
    assert buffer.steady == {True}
    with glue(frame):
        assert (module.count + 1).item() == 1


def test_a_reassigned_buffer_is_found_at_the_end_and_no_longer_steady() -> None:
    module = Counter()
    frame = make_frame(size=1)
    frame.runtime.register("count", module.count, 0, (module, "count"))
    [buffer] = frame.runtime.registered.values()
    with glue(frame):
        module.count + 1
    shared.step_ends(frame.runtime)
    assert buffer.steady == {True}
    with glue(frame):
        module.count = module.count + 1
    assert shared.step_ends(frame.runtime) == [buffer]
    assert buffer.steady == set()
