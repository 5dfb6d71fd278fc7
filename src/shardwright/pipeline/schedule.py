"""Who runs next on a rank: pure functions of what is in flight, and their simulation.

No clock decides anything: a rank's order follows from its own past alone. So a pipeline is a Kahn network, and one
simulation on paper tells whether a schedule can deadlock with given programs, however long things take.

A microbatch that must wait for a value is set aside, and `choose` names the next one. Two orders:

"lowest": always the lowest microbatch. Then the lowest unfinished one of the whole pipeline finds all its ranks
    working for it, so this order can't deadlock, whatever the programs do. Used until the program is known, and for
    programs that differ between microbatches.
"fifo": as long as the rank holds fewer than `limit` microbatches' activations, one that has not computed yet, else
    of those that have the one that waits longest. On a plain chain of stages this is 1F1B (Narayanan et al. 2021, arXiv:2104.04473); where microbatches come back to a
    stage it keeps both directions busy. Used when its simulation on the recorded program ends.

"interleaved" releases activations early; "simple" runs all forwards, then all backwards (GPipe, Huang et al. 2019,
arXiv:1811.06965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["interleaved", "simple"]
Order = Literal["lowest", "fifo"]


@dataclass(frozen=True)
class Policy:
    """How one rank orders its microbatches.

    limit: most microbatches whose activations it holds.
    prefetch: a new microbatch on this rank begins by waiting, so one more than `limit` may be started.
    """

    num_microbatches: int
    limit: int
    order: Order = "lowest"
    prefetch: bool = False


@dataclass(frozen=True)
class Waiting:
    """A microbatch that was set aside.

    fresh: it has computed nothing here yet.   gated: done with forward, waits for all others ("simple").
    """

    index: int
    fresh: bool = False
    gated: bool = False


def choose(policy: Policy, waiting: Sequence[Waiting], next_new: int) -> int:
    """The microbatch to run next: one of `waiting` (in the order in which they were set aside), or `next_new`.

    There must be something left to do.
    """
    held = sum(not w.fresh for w in waiting)
    room = policy.limit + (1 if policy.prefetch else 0)
    if next_new < policy.num_microbatches and held <= policy.limit and len(waiting) < room:
        return next_new
    runnable = [w for w in waiting if not w.gated] or list(waiting)
    if policy.order == "lowest":
        return min(w.index for w in runnable)
    wanted = [w for w in runnable if w.fresh == (held < policy.limit)] or runnable
    return wanted[0].index


# ---------------------------------------------------------------------- programs and their simulation


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a microbatch's program that involves ranks.

    kind "call": `rank` computes for `seconds`.   "move": `rank` sends to `to`.   "tell": `rank` sends to all others.
    "gate": forward ends and backward begins, on every rank.
    """

    kind: Literal["call", "move", "tell", "gate"]
    rank: int = 0
    to: int = 0
    seconds: float = 0.0


class DeadlockError(Exception):
    """A simulated schedule in which no rank can go on."""


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`: the time of the step, each rank's busy time, and the most microbatches it held."""

    makespan_s: float
    busy_s: tuple[float, ...]
    peak_held: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do nothing."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0


class _Rank:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.clock = self.busy = 0.0
        self.next_new = 0
        self.waiting: dict[int, int] = {}  # microbatch -> event it waits at, in the order set aside
        self.computed: set[int] = set()
        self.gated: set[int] = set()
        self.passed_gate: set[int] = set()
        self.chosen: tuple[int, int] | None = None  # (microbatch, event it resumes at)
        self.num_done = 0
        self.peak = 0


def simulate(policies: Sequence[Policy], program: Sequence[Event], *, gate: bool = False) -> Simulation:
    """Run a step on paper: every microbatch executes `program`, messages take no time.

    policies: one per rank.   gate: "simple", no backward before all forwards of a rank are done.
    Raises DeadlockError if the step does not end.
    """
    ranks = [_Rank(p) for p in policies]
    sent: dict[tuple[int, int], float] = {}
    total = policies[0].num_microbatches
    while any(r.num_done < total for r in ranks):
        if not any([_advance(n, rank, program, sent, gate) for n, rank in enumerate(ranks)]):
            state = {n: (r.chosen, r.waiting) for n, r in enumerate(ranks)}
            raise DeadlockError(f"no rank can go on; (chosen, waiting) per rank: {state}")
    return Simulation(
        max(r.clock for r in ranks), tuple(r.busy for r in ranks), tuple(r.peak for r in ranks)
    )


def _advance(me: int, rank: _Rank, program: Sequence[Event], sent: dict[tuple[int, int], float], gate: bool) -> bool:
    """Run one stretch of one microbatch on a rank; False if it is blocked or done."""
    total = rank.policy.num_microbatches
    if rank.num_done == total:
        return False
    if rank.chosen is None:
        waiting = [Waiting(m, m not in rank.computed, m in rank.gated) for m in rank.waiting]
        index = choose(rank.policy, waiting, rank.next_new)
        if index == rank.next_new and index not in rank.waiting:
            rank.next_new += 1
            rank.chosen = (index, 0)
        else:
            rank.chosen = (index, rank.waiting.pop(index))
    index, at = rank.chosen
    if at > 0 or (program and _is_wait(program[0], me)):
        event = program[at] if at < len(program) else None
        if event is not None and _is_wait(event, me):
            if (index, at) not in sent:
                if at == 0 and index not in rank.waiting:
                    rank.waiting[index] = 0
                    rank.chosen = None
                    return True
                return False
            rank.clock = max(rank.clock, sent[(index, at)])
            at += 1
    rank.chosen = None
    while at < len(program):
        event = program[at]
        if event.kind == "gate":
            if index not in rank.passed_gate:
                rank.passed_gate.add(index)
                if gate:
                    rank.waiting[index] = at
                    rank.gated = set(rank.passed_gate) if len(rank.passed_gate) < total else set()
                    return True
        elif event.kind == "call" and event.rank == me:
            rank.computed.add(index)
            rank.clock += event.seconds
            rank.busy += event.seconds
            in_flight = [*rank.waiting, index]
            rank.peak = max(rank.peak, sum(m in rank.computed for m in in_flight))
        elif event.kind != "call" and event.rank == me:
            sent[(index, at)] = rank.clock
        elif _is_wait(event, me):
            rank.waiting[index] = at
            return True
        at += 1
    rank.num_done += 1
    return True


def _is_wait(event: Event, me: int) -> bool:
    return (event.kind == "move" and event.to == me) or (event.kind == "tell" and event.rank != me)


# ---------------------------------------------------------------------- choosing the policies


def safe_policies(kind: Kind, num_microbatches: int, active_microbatches: int, num_ranks: int) -> list[Policy]:
    """Policies for a program that is not known yet: they can't deadlock."""
    if kind == "simple":
        return [Policy(num_microbatches, num_microbatches)] * num_ranks
    active = max(1, min(active_microbatches, num_microbatches))
    return [Policy(num_microbatches, min(active, num_ranks - r)) for r in range(num_ranks)]


def plan_policies(
    kind: Kind, num_microbatches: int, active_microbatches: int, num_ranks: int, program: Sequence[Event]
) -> list[Policy]:
    """The best policies for a known program, found by simulation; the same on every rank.

    Limits start from 1F1B's (the number of ranks that come after, in the order in which the program first reaches
    them) and are raised alike up to `active_microbatches` while that shortens the step by more than 2 %.
    """
    safe = safe_policies(kind, num_microbatches, active_microbatches, num_ranks)
    if kind == "simple":
        candidates = [[Policy(num_microbatches, num_microbatches, "fifo")] * num_ranks]
    else:
        candidates = _candidates(num_microbatches, active_microbatches, num_ranks, program)
    best: list[Policy] | None = None
    best_s = float("inf")
    for policies in candidates:
        try:
            seconds = simulate(policies, program, gate=kind == "simple").makespan_s
        except DeadlockError:
            continue
        if best is None or seconds < best_s * 0.98:
            best, best_s = policies, seconds
    return best if best is not None else safe


def _candidates(num: int, active: int, num_ranks: int, program: Sequence[Event]) -> list[list[Policy]]:
    order: list[int] = []
    begins_waiting: dict[int, bool] = {}
    for event in program:
        for rank in range(num_ranks):
            if rank not in begins_waiting and _is_wait(event, rank):
                begins_waiting[rank] = True
        if event.kind == "call":
            begins_waiting.setdefault(event.rank, False)
            if event.rank not in order:
                order.append(event.rank)
    depth = {rank: len(order) - i for i, rank in enumerate(order)}
    found: list[list[Policy]] = []
    for extra in range(max(1, min(active, num))):
        policies = [
            Policy(num, max(1, min(depth.get(r, 1) + extra, active, num)), "fifo", begins_waiting.get(r, True))
            for r in range(num_ranks)
        ]
        if policies not in found:
            found.append(policies)
    return found


def chain(num_ranks: int, forward_s: Sequence[float], backward_s: Sequence[float]) -> list[Event]:
    """The program of a plain pipeline: forward through the stages, and back."""
    program: list[Event] = []
    for r in range(num_ranks):
        if r:
            program.append(Event("move", r - 1, r))
        program.append(Event("call", r, seconds=forward_s[r]))
    program.append(Event("gate"))
    for r in reversed(range(num_ranks)):
        if r < num_ranks - 1:
            program.append(Event("move", r + 1, r))
        program.append(Event("call", r, seconds=backward_s[r]))
    return program
