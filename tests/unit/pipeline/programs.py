"""Programs of microbatches for tests of schedules: made up at random, and what to do with them on paper."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from shardwright.pipeline.schedule import Event, Kind, Order, Rehearsal, cautious_limit, rehearse
from shardwright.pipeline.timetable import Timetable

COSTS = st.sampled_from([0.0, 0.25, 1.0, 2.0, 7.5])


@st.composite
def programs(draw: st.DrawFn, num_ranks: int, *, max_calls: int = 8) -> list[Event]:
    """A forward whose calls may be on any rank, read any earlier values, and tell values; often a backward over it.

    So ranks are visited again and again, residuals cross ranks, and some ranks do nothing.
    """
    ranks = st.integers(0, num_ranks - 1)
    owners: list[int] = []
    copies: list[set[int]] = []
    edges: list[tuple[int, int]] = []
    program: list[Event] = [Event("order")] if draw(st.integers(0, 3)) == 0 else []
    for call in range(draw(st.integers(1, max_calls))):
        owner = draw(ranks)
        for value in draw(st.lists(st.integers(0, call - 1), max_size=2, unique=True)) if call else []:
            if owner not in copies[value]:
                copies[value].add(owner)
                program.append(Event("move", owners[value], owner))
            edges.append((call, value))
        program.append(Event("call", owner, cost=draw(COSTS)))
        owners.append(owner)
        copies.append({owner})
        if num_ranks > 1 and draw(st.integers(0, 5)) == 0:
            program.append(Event("tell", owner))
        if draw(st.integers(0, 7)) == 0:
            program.append(Event("order"))
    if draw(st.booleans()):
        program.append(Event("gate"))
        for call in reversed(range(len(owners))):
            program.append(Event("call", owners[call], cost=draw(COSTS)))
            if draw(st.integers(0, 11)) == 0:
                program.append(Event("order"))
            program += [
                Event("move", owners[call], owners[value])
                for reader, value in edges
                if reader == call and owners[value] != owners[call]
            ]
    return program


@st.composite
def strays_of(draw: st.DrawFn, expected: Sequence[Event], num_ranks: int) -> list[Event]:
    """A program that is as expected up to some event."""
    start = list(expected[: draw(st.integers(0, len(expected)))])
    rest = draw(programs(num_ranks, max_calls=4))
    passed_gate = any(event.kind == "gate" for event in start)
    return start + [event for event in rest if not (passed_gate and event.kind == "gate")]


def rehearse_table(table: Timetable, kind: Kind, run: Sequence[Sequence[Event]]) -> Rehearsal:
    gated = kind == "simple"
    orders = [Order(len(run), turns=turns, gated=gated) for turns in table.turns]
    return rehearse(orders, run, gated=gated, expected=table.program)


def rehearse_cautiously(
    kind: Kind, run: Sequence[Sequence[Event]], active: int, num_ranks: int, *, in_line: bool = False
) -> Rehearsal:
    gated = kind == "simple"
    limits = [cautious_limit(kind, len(run), active, rank, num_ranks) for rank in range(num_ranks)]
    orders = [Order(len(run), limit=limit, gated=gated, in_line=in_line) for limit in limits]
    return rehearse(orders, run, gated=gated)
