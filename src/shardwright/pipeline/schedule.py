"""Who runs next on a rank, and what comes of it: pure, so that it can be tried on paper.

No clock decides anything. A microbatch that must wait for a value is always set aside, whether or not the
message has come, and `Order` names the next one. Two orders:

planned: the rank's turns in a timetable (see `timetable`), made for a program that every microbatch is
    expected to run. A microbatch stops where it leaves that program, on every rank alike, and goes on when the
    table is at its end. A table is a run that was possible; without the ends of some microbatches it still is.
    So it can't deadlock.
cautious: always the lowest microbatch, when no program is known. The lowest unfinished one then finds every
    rank working for it, so this can't deadlock either, whatever the programs do. It keeps the ranks less
    busy.

"interleaved" releases activations early; "simple" runs all forwards, then all backwards (GPipe, Huang et al.
2019, arXiv:1811.06965).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["interleaved", "simple"]


class Event(NamedTuple):
    """One step of a microbatch's program that involves ranks.

    kind "call": `rank` computes, at `cost`.   "move": `rank` sends to `to`.   "tell": `rank` sends to all
    others. "gate": forward ends and backward begins, on every rank; once per microbatch at most.
    "order": on every rank, the microbatches before this one must first come as far (see `Order.may_pass`).
    once: a tell that the next step won't need, for it is about something new.
    """

    kind: Literal["call", "move", "tell", "gate", "order"]
    rank: int = 0
    to: int = 0
    cost: float = 0.0
    once: bool = False


def waits(event: Event, rank: int, gated: bool) -> bool:
    """Is a microbatch always set aside on `rank` when it comes to this event? gated: "simple"."""
    if event.kind == "move":
        return event.to == rank
    if event.kind == "tell":
        return event.rank != rank
    return gated and event.kind == "gate"


def strays(event: Event, position: int, expected: Sequence[Event] | None) -> bool:
    """Does a microbatch leave the expected program (None: there is none) with this event?"""
    return expected is not None and (position >= len(expected) or expected[position] != event)


class Order:
    """Who runs next on one rank.

    In order: `next` names a microbatch, which then runs until `set_aside` or `done` is called for it; before
    `set_aside`, `at_gate` where forward ends and `stray` where it leaves the expected program.

    turns: the rank's turns in a timetable; None: cautious.   limit: most microbatches in flight, when
    cautious.
    gated: "simple".   in_line: when cautious, none starts before those before it are through forward.
    """

    def __init__(
        self,
        num_microbatches: int,
        *,
        turns: Sequence[int] | None = None,
        limit: int | None = None,
        gated: bool = False,
        in_line: bool = False,
    ) -> None:
        self._in_line = in_line
        self._total = num_microbatches
        self._turns = deque(turns or ())
        self._limit = num_microbatches if limit is None else limit
        self._gated = gated
        self._next_new = 0
        self._waiting: set[int] = set()
        self._at_gate: set[int] = set()
        self._strayed: set[int] = set()
        self._done: set[int] = set()

    def next(self) -> int | None:
        """The microbatch to run now, or None when all are done."""
        while self._turns:
            index = self._turns.popleft()
            if index not in self._strayed and index not in self._done:
                return self._take(index)
        new = self._next_new
        if new < self._total and len(self._waiting) < self._limit and not (self._in_line and not self.may_pass(new)):
            return self._take(new)
        closed = self._gated and len(self._at_gate | self._done) < self._total
        runnable = self._waiting - self._at_gate if closed else self._waiting
        return self._take(min(runnable)) if runnable else None

    def may_pass(self, index: int) -> bool:
        """Are all microbatches before this one as far: through forward, or, if it is itself, at their end?"""
        return all(self.is_as_far(other, index) for other in range(index))

    def is_as_far(self, other: int, index: int) -> bool:
        """Is one microbatch as far as another: through forward, or, if that is itself, at its end?"""
        return other in self._done or (other in self._at_gate and index not in self._at_gate)

    def set_aside(self, index: int) -> None:
        self._waiting.add(index)

    def at_gate(self, index: int) -> None:
        self._at_gate.add(index)

    def stray(self, index: int) -> None:
        self._strayed.add(index)

    def done(self, index: int) -> None:
        self._done.add(index)

    def _take(self, index: int) -> int:
        if index == self._next_new:
            self._next_new += 1
        else:
            self._waiting.remove(index)
        return index


def cautious_limit(kind: Kind, num_microbatches: int, active_microbatches: int, rank: int, num_ranks: int) -> int:
    """Most microbatches in flight on a rank while no program is known: as many as 1F1B would have."""
    if kind == "simple":
        return num_microbatches
    return max(1, min(active_microbatches, num_microbatches, num_ranks - rank))


# ---------------------------------------------------------------------- on paper


class DeadlockError(Exception):
    """A step on paper in which no rank can go on."""


@dataclass(frozen=True)
class Rehearsal:
    """A step on paper: its time, and per rank its busy time, the most microbatches it held, and who ran
    when."""

    makespan: float
    busy: tuple[float, ...]
    peak_held: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]


class _Rank:
    def __init__(self, number: int, order: Order) -> None:
        self.number = number
        self.order = order
        self.clock = self.busy = 0.0
        self.running: int | None = None
        self.stopped: dict[int, tuple[int, str]] = {}  # microbatch -> number of the event it stopped at, and why
        self.strayed: set[int] = set()
        self.holds: set[int] = set()
        self.peak = 0
        self.turns: list[int] = []

    def stop(self, index: int, at: int, why: str) -> None:
        self.stopped[index] = (at, why)
        self.order.set_aside(index)
        self.running = None

    def stray(self, index: int) -> None:
        self.strayed.add(index)
        self.order.stray(index)


def rehearse(
    orders: Sequence[Order],
    programs: Sequence[Sequence[Event]],
    *,
    gated: bool = False,
    expected: Sequence[Event] | None = None,
) -> Rehearsal:
    """Run a step on paper, with messages that take no time.

    orders: one per rank, new.   programs: one per microbatch.   expected: the program that the orders' turns are for.
    Raises: DeadlockError if it does not end.
    """
    ranks = [_Rank(number, order) for number, order in enumerate(orders)]
    arrivals: dict[tuple[int, int], float] = {}
    progress = [True]
    while any(progress):
        progress = [_run_one_turn(rank, programs, arrivals, gated, expected) for rank in ranks]
    stuck = {r.number: (r.running, r.stopped) for r in ranks if r.running is not None or r.stopped}
    if stuck:
        raise DeadlockError(f"no rank can go on; (chosen microbatch, event that each waits at) by rank: {stuck}")
    return Rehearsal(
        max(r.clock for r in ranks),
        tuple(r.busy for r in ranks),
        tuple(r.peak for r in ranks),
        tuple(tuple(r.turns) for r in ranks),
    )


def _run_one_turn(
    rank: _Rank,
    programs: Sequence[Sequence[Event]],
    arrivals: dict[tuple[int, int], float],
    gated: bool,
    expected: Sequence[Event] | None,
) -> bool:
    """Let a rank run the next microbatch up to where it stops; False if that must wait now, or all are done.

    arrivals: (microbatch, number of the event) -> when the message of that event was sent.
    """
    if rank.running is None:
        rank.running = rank.order.next()
        if rank.running is None:
            return False
        rank.turns.append(rank.running)
    index = rank.running
    start, why = rank.stopped.get(index, (0, "stray"))
    if why == "message":
        if (index, start) not in arrivals:
            return False
        rank.clock = max(rank.clock, arrivals[index, start])
    if why == "order" and not rank.order.may_pass(index):
        rank.stray(index)  # one before it has left the program
        rank.stop(index, start, why)
        return True
    rank.stopped.pop(index, None)
    program = programs[index]
    for at in range(start if why == "stray" else start + 1, len(program)):
        event = program[at]
        reason = _reason_to_stop(rank, index, at, event, gated, expected)
        if reason is not None:
            rank.stop(index, at, reason)
            return True
        if event.rank == rank.number:
            if event.kind == "call":
                rank.clock += event.cost
                rank.busy += event.cost
                rank.holds.add(index)
                rank.peak = max(rank.peak, len(rank.holds))
            elif event.kind in ("move", "tell"):
                arrivals[index, at] = rank.clock
    rank.holds.discard(index)
    rank.order.done(index)
    rank.running = None
    return True


def _reason_to_stop(
    rank: _Rank, index: int, at: int, event: Event, gated: bool, expected: Sequence[Event] | None
) -> str | None:
    if index not in rank.strayed and strays(event, at, expected):
        rank.stray(index)
        return "stray"
    if event.kind == "gate":
        rank.order.at_gate(index)
        return "gate" if gated else None
    if event.kind == "order":
        return None if rank.order.may_pass(index) else "order"
    return "message" if waits(event, rank.number, gated) else None


def chain(forward: Sequence[float], backward: Sequence[float]) -> list[Event]:
    """The program of a plain pipeline of stages with these costs: forward through the stages, and back."""
    last = len(forward) - 1
    program: list[Event] = []
    for rank, cost in enumerate(forward):
        if rank:
            program.append(Event("move", rank - 1, rank))
        program.append(Event("call", rank, cost=cost))
    program.append(Event("gate"))
    for rank in range(last, -1, -1):
        if rank < last:
            program.append(Event("move", rank + 1, rank))
        program.append(Event("call", rank, cost=backward[rank]))
    return program
