"""The timetable of a step: for every rank, whose turn it is, planned ahead for a known program.

A pure function of the program and of estimated costs, so every rank draws up the same table. It is found by
running the step on paper, with ranks that see which messages have come: a microbatch in backward goes first,
then the lowest; a new one starts only while the rank holds fewer than its limit. On a plain chain of stages that
is 1F1B (Narayanan et al. 2021, arXiv:2104.04473); stages that are revisited and uneven cuts need nothing more.
Virtual stages gain from other preferences, which are tried, too.

It always ends: microbatches start on a rank in their order and never overtake each other, so nothing ever keeps the
lowest unfinished one waiting. That order is also the one in which gradients add up in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from shardwright.pipeline.schedule import Event, Kind, waits

Preference = Literal["backward", "alternate", "waves"]
"""What a rank takes when several microbatches can go on.

"backward": one in backward, then the lowest.   "alternate": forward after backward and backward after forward, then
the lowest.   "waves": as "alternate", but each group of as many microbatches as there are ranks visits one chunk of
the rank after the other together, as in Megatron's interleaved schedule.
"""

_PREFERENCES: tuple[Preference, ...] = ("backward", "alternate", "waves")

WORTHWHILE: Mapping[str, float] = {"memory": 0.9, "speed": 0.98}
"""By `optimize`: to which part of what it was a table must shorten the step to be allowed more memory."""


@dataclass(frozen=True)
class Timetable:
    """Turns for every rank, made for `program`.

    makespan, busy, peak_held: as estimated, the time of the step, and per rank its busy time and the most
    microbatches whose activations it holds.
    """

    program: tuple[Event, ...]
    turns: tuple[tuple[int, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    peak_held: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do nothing."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


def make_timetable(
    kind: Kind,
    program: Sequence[Event],
    num_microbatches: int,
    active_microbatches: int,
    num_ranks: int,
    *,
    optimize: Literal["memory", "speed"] = "speed",
    latency: float = 0.0,
) -> Timetable:
    """The best table found for microbatches that all run `program`.

    Limits start from 1F1B's (the number of ranks that come after, in the order in which the program first
    computes on them) and are raised alike up to `active_microbatches` while that shortens the step by enough, see
    WORTHWHILE.
    latency: time that a message takes.
    """
    best: Timetable | None = None
    for limits in _limits(kind, program, num_microbatches, active_microbatches, num_ranks):
        for preference in _PREFERENCES:
            table = _Drawing(program, num_microbatches, limits, preference, kind == "simple", latency).draw()
            if best is None or table.makespan < best.makespan * WORTHWHILE[optimize]:
                best = table
    assert best is not None
    return best


def _limits(
    kind: Kind, program: Sequence[Event], num_microbatches: int, active_microbatches: int, num_ranks: int
) -> Iterator[list[int]]:
    """Limits of all ranks to try, the smallest first."""
    if kind == "simple":
        yield [num_microbatches] * num_ranks
        return
    most = max(1, min(active_microbatches, num_microbatches))
    order = list(dict.fromkeys(event.rank for event in program if event.kind == "call"))
    depth = {rank: len(order) - place for place, rank in enumerate(order)}
    before: list[int] = []
    for extra in range(most):
        limits = [min(depth.get(rank, 1) + extra, most) for rank in range(num_ranks)]
        if limits != before:
            yield limits
        before = limits


@dataclass(frozen=True)
class _Stretch:
    """What a rank does of a program between two events at which it may have to wait.

    kind, event: what it waits for first, and the number of that event; None at the start.
    sends: (number of the event, cost before it).   backward: does it begin behind the gate?
    """

    kind: Literal["message", "gate", "order"] | None
    event: int
    cost: float
    computes: bool
    sends: tuple[tuple[int, float], ...]
    backward: bool


def _stretches(program: Sequence[Event], rank: int, gated: bool) -> list[_Stretch]:
    found: list[_Stretch] = []
    kind: Literal["message", "gate", "order"] | None = None
    start, cost, computes, backward, behind_gate = -1, 0.0, False, False, False
    sends: list[tuple[int, float]] = []
    for number, event in enumerate(program):
        behind_gate = behind_gate or event.kind == "gate"
        if event.kind == "order" or waits(event, rank, gated):
            found.append(_Stretch(kind, start, cost, computes, tuple(sends), backward))
            kind = event.kind if event.kind in ("gate", "order") else "message"
            start, cost, computes, sends, backward = number, 0.0, False, [], behind_gate
        elif event.rank == rank and event.kind == "call":
            cost += event.cost
            computes = True
        elif event.rank == rank and event.kind != "gate":
            sends.append((number, cost))
    found.append(_Stretch(kind, start, cost, computes, tuple(sends), backward))
    return found


class _Station:
    """One rank while a table is drawn.

    lead: 1 if a microbatch begins by waiting for a message. Such a one is started a turn early, so that its glue is out
    of the way; it is held from its next stretch on.
    place: per microbatch, the number of its next stretch.   forward: how many stretches make up its forward.
    """

    def __init__(
        self, stretches: list[_Stretch], num_microbatches: int, limit: int, preference: Preference, num_ranks: int
    ) -> None:
        self.stretches = stretches
        self.total = num_microbatches
        self.limit = limit
        self.preference = preference
        self.num_ranks = num_ranks
        idle = not stretches[0].computes and not stretches[0].sends
        self.lead = int(len(stretches) > 1 and idle and stretches[1].kind != "order")
        self.forward = sum(not s.backward for s in stretches)
        self.place = [self.lead] * num_microbatches
        self.num_begun = 0
        self.held: set[int] = set()
        self.peak = 0
        self.free_at = self.busy = 0.0
        self.arrived: set[tuple[int, int]] = set()
        self.turns: list[int] = []
        self.was_backward = False

    def choose(self) -> int | None:
        """The microbatch whose next stretch runs now, or None if none can."""
        best, best_key = None, None
        may_begin = self.num_begun < self.total and len(self.held) < self.limit
        for index in [*self.held, self.num_begun] if may_begin else self.held:
            if self._can_run(index):
                key = self._key(index)
                if best_key is None or key < best_key:
                    best, best_key = index, key
        return best

    def _can_run(self, index: int) -> bool:
        stretch = self.stretches[self.place[index]]
        if stretch.kind == "message":
            return (index, stretch.event) in self.arrived
        if stretch.kind == "gate":
            return min(self.place) >= self.forward
        if stretch.kind == "order":
            end = len(self.stretches) if stretch.backward else self.forward
            return min(self.place[:index], default=end) >= end
        return True

    def _key(self, index: int) -> tuple[int, ...]:
        """What comes first of several that can run."""
        place = self.place[index]
        backward = self.stretches[place].backward
        if self.preference == "backward":
            return (not backward, index)
        if self.preference == "alternate":
            return (backward == self.was_backward, index)
        return (backward == self.was_backward, index // self.num_ranks, -place if backward else place, index)

    def run(self, index: int) -> tuple[float, list[tuple[int, float]]]:
        """Enter the microbatch's next turn: one stretch, and those after it for which it need not wait.

        Returns: the cost, and the sends with the cost before each.
        """
        if self.place[index] == self.lead:
            if self.lead:
                self.turns += [0] if index == 0 else []
                self.turns += [index + 1] if index + 1 < self.total else []
            self.num_begun += 1
            self.held.add(index)
            self.peak = max(self.peak, len(self.held))
        self.turns.append(index)
        cost, sends = 0.0, []
        while True:
            stretch = self.stretches[self.place[index]]
            sends += [(number, cost + before) for number, before in stretch.sends]
            cost += stretch.cost
            self.was_backward = stretch.backward
            self.place[index] += 1
            if self.place[index] == len(self.stretches):
                self.held.discard(index)
                break
            if self.stretches[self.place[index]].kind != "order" or not self._can_run(index):
                break
        self.busy += cost
        return cost, sends


class _Drawing:
    """A step on paper whose ranks take the best microbatch that can go on."""

    def __init__(
        self,
        program: Sequence[Event],
        num_microbatches: int,
        limits: Sequence[int],
        preference: Preference,
        gated: bool,
        latency: float,
    ) -> None:
        self._program = tuple(program)
        self._latency = latency
        self._stations = [
            _Station(_stretches(program, rank, gated), num_microbatches, limit, preference, len(limits))
            for rank, limit in enumerate(limits)
        ]
        # (time, rank, microbatch, event): a message comes; with microbatch -1: the rank is free.
        self._agenda: list[tuple[float, int, int, int]] = [(0.0, rank, -1, -1) for rank in range(len(limits))]

    def draw(self) -> Timetable:
        agenda, stations = self._agenda, self._stations
        while agenda:
            now = agenda[0][0]
            awake: set[int] = set()
            while agenda and agenda[0][0] == now:
                _, rank, index, event = heappop(agenda)
                if index >= 0:
                    stations[rank].arrived.add((index, event))
                awake.add(rank)
            for rank in sorted(awake):
                self._act(rank, now)
        assert all(s.place == [len(s.stretches)] * s.total for s in stations), "a timetable came to no end"
        return Timetable(
            self._program,
            tuple(tuple(s.turns) for s in stations),
            max(s.free_at for s in stations),
            tuple(s.busy for s in stations),
            tuple(s.peak for s in stations),
        )

    def _act(self, rank: int, now: float) -> None:
        """Let a rank begin its next turn, if it is free and can."""
        station = self._stations[rank]
        index = station.choose() if station.free_at <= now else None
        if index is None:
            return
        cost, sends = station.run(index)
        station.free_at = now + cost
        heappush(self._agenda, (station.free_at, rank, -1, -1))
        for number, before in sends:
            event = self._program[number]
            everyone_else = [r for r in range(len(self._stations)) if r != rank]
            for other in [event.to] if event.kind == "move" else everyone_else:
                heappush(self._agenda, (now + before + self._latency, other, index, number))
