"""Who runs next: single decisions, and whole steps on paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import programs, rehearse_cautiously

from shardwright.pipeline.schedule import (
    DeadlockError,
    Event,
    Kind,
    Order,
    cautious_limit,
    chain,
    rehearse,
    strays,
    waits,
)

KINDS = st.sampled_from(["interleaved", "simple"])


def test_who_waits_at_an_event() -> None:
    assert [waits(Event("move", 0, 2), rank, False) for rank in range(3)] == [False, False, True]
    assert [waits(Event("tell", 1), rank, False) for rank in range(3)] == [True, False, True]
    assert not waits(Event("call", 1), 1, True)
    assert waits(Event("gate"), 1, True)
    assert not waits(Event("gate"), 1, False)


def test_where_a_program_leaves_the_expected_one() -> None:
    expected = chain([1.0, 1.0], [1.0, 1.0])
    assert not any(strays(event, i, expected) for i, event in enumerate(expected))
    assert strays(Event("call", 0, cost=2.0), 0, expected)
    assert strays(expected[0], len(expected), expected)
    assert not strays(Event("tell", 1), 3, None)


def test_cautious_order_takes_new_ones_up_to_its_limit_then_the_lowest() -> None:
    order = Order(4, limit=2)
    assert order.next() == 0
    order.set_aside(0)
    assert order.next() == 1
    order.set_aside(1)
    assert order.next() == 0
    order.done(0)
    assert order.next() == 2
    order.done(2)
    assert order.next() == 3
    order.set_aside(3)
    assert order.next() == 1
    order.done(1)
    assert order.next() == 3
    order.done(3)
    assert order.next() is None


def test_nobody_passes_the_gate_before_all_are_there_or_done() -> None:
    order = Order(3, gated=True)
    for index in range(2):
        assert order.next() == index
        order.at_gate(index)
        order.set_aside(index)
    assert order.next() == 2
    order.set_aside(2)
    assert order.next() == 2
    order.done(2)  # it has no backward
    assert order.next() == 0


def test_planned_order_follows_its_turns() -> None:
    order = Order(2, turns=[0, 1, 1, 0])
    taken = []
    for _ in range(2):
        index = order.next()
        assert index is not None
        taken.append(index)
        order.set_aside(index)
    for _ in range(2):
        index = order.next()
        assert index is not None
        taken.append(index)
        order.done(index)
    assert taken == [0, 1, 1, 0]
    assert order.next() is None


def test_a_strayed_microbatch_goes_on_when_the_turns_are_over() -> None:
    order = Order(3, turns=[0, 1, 2, 0, 0, 1, 2])
    for _ in range(3):
        index = order.next()
        assert index is not None
        order.stray(0) if index == 0 else None
        order.set_aside(index)
    for expected in (1, 2):
        assert order.next() == expected
        order.done(expected)
    assert order.next() == 0
    order.set_aside(0)
    assert order.next() == 0


def test_a_limit_of_a_rank_is_that_of_1f1b_and_never_above_active() -> None:
    assert [cautious_limit("interleaved", 8, 6, rank, 4) for rank in range(4)] == [4, 3, 2, 1]
    assert [cautious_limit("interleaved", 8, 2, rank, 4) for rank in range(4)] == [2, 2, 2, 1]
    assert [cautious_limit("interleaved", 1, 6, rank, 4) for rank in range(4)] == [1, 1, 1, 1]
    assert [cautious_limit("simple", 8, 2, rank, 4) for rank in range(4)] == [8, 8, 8, 8]


def test_a_deadlock_on_paper_is_seen() -> None:
    program = [Event("call", 0), Event("move", 0, 1), Event("call", 1)]
    wrong = [Order(2, turns=[0, 1]), Order(2, turns=[0, 1, 1, 0])]
    assert rehearse(wrong, [program] * 2, expected=program).turns == ((0, 1), (0, 1, 1, 0))
    there_and_back = [Event("move", 1, 0), Event("call", 0), Event("move", 0, 1), Event("call", 1)]
    wrong = [Order(2, turns=[0, 1, 0, 1]), Order(2, turns=[0, 0, 1, 1])]
    rehearse(wrong, [there_and_back] * 2, expected=there_and_back)
    wrong = [Order(2, turns=[0, 1, 1, 0]), Order(2, turns=[0, 0, 1, 1])]
    with pytest.raises(DeadlockError, match="no rank can go on"):
        rehearse(wrong, [there_and_back] * 2, expected=there_and_back)


@settings(max_examples=150, deadline=None)
@given(st.data(), KINDS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_the_cautious_order_ends_whatever_each_microbatch_does(
    data: st.DataObject, kind: Kind, num_ranks: int, num_microbatches: int, active: int, in_line: bool
) -> None:
    run = [data.draw(programs(num_ranks)) for _ in range(num_microbatches)]
    result = rehearse_cautiously(kind, run, active, num_ranks, in_line=in_line)
    if kind == "interleaved":
        assert max(result.peak_held) <= active
    for rank in range(num_ranks):
        assert result.busy[rank] == pytest.approx(
            sum(e.cost for program in run for e in program if e.kind == "call" and e.rank == rank)
        )


def test_in_line_no_microbatch_begins_before_the_forward_of_those_before_it() -> None:
    order = Order(3, limit=3, in_line=True)
    assert order.next() == 0
    order.set_aside(0)
    assert order.next() == 0
    order.at_gate(0)
    order.set_aside(0)
    assert order.next() == 1
    order.set_aside(1)
    assert order.next() == 0
    order.done(0)
    assert order.next() == 1
    order.done(1)
    assert order.next() == 2
