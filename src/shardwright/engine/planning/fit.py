"""Which configurations of a job fit into the memory of its devices, the cheapest first.

Tried are all degrees whose product is the number of ranks (tensor parallel ones up to 8), sizes of the microbatch, both
values of `optimize` for pipelines, and the switches that save memory. What the library refuses (`config.rules`) is not
tried. Larger microbatches are taken to need as many times what the example needs; proposals are worked out exactly for
their own partition.

Note [Order]: proposals are ranked by the time of a step over the same samples, in FLOPs of the busiest stage:

    work        forward and backward of a stage's microbatches, and what it waits for the stages before it
    recompute   one more forward of checkpointed blocks
    traffic     bytes that a rank sends, at FLOPS_PER_BYTE_SENT each. Between stages what crosses, there and its gradient back;
                over tensor parallel ranks four collectives of the hidden states per block (six if it is recomputed); over
                replicas the gradients, twice, half of which backward hides; with sharded data parallelism parameters twice
                and gradients once per microbatch; offloaded activations at a quarter, for they travel meanwhile

So what needs least communication and least recomputation comes first, and half precision is worth what it spares in
traffic: that it also computes faster is not counted. Where costs are equal, fewer switches come first. One proposal is
shown for each set of degrees and precision: its cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwright.config.parse import resolve
from shardwright.config.rules import check_world
from shardwright.config.schema import Config
from shardwright.engine.planning.layout import Layout, work_out
from shardwright.engine.planning.memory import Device, Habits
from shardwright.engine.planning.model import Subject, View, look, scaled_up
from shardwright.errors import ConfigError, NotBuiltError, ShardwrightError
from shardwright.partition.build import plan_of_tree
from shardwright.partition.plan import PartitionPlan

Precision = Literal["fp32", "fp16", "bf16"]
SIZES = (1, 2, 4)
"""Samples of a microbatch that are tried, as multiples of those of the example."""
MOST_TP = 8
"""Tensor parallel ranks talk in every block: more than share a host are not tried."""
FLOPS_PER_BYTE_SENT: Mapping[Device, float] = {"cpu": 200.0, "cuda": 1000.0}


@dataclass(frozen=True)
class Wish:
    """What to fit.

    limit_bytes: of each rank.   samples: of a step, over the whole job.   sample_unit: samples of the subject's inputs.
    given: configuration keys that are fixed.   base_bytes: taken from the limit for interpreter and libraries.
    """

    limit_bytes: int
    num_ranks: int
    samples: int
    sample_unit: int
    precisions: Sequence[Precision]
    habits: Habits
    given: Mapping[str, Any] = field(default_factory=dict)
    base_bytes: int = 0


@dataclass(frozen=True)
class Cost:
    """Of a step, in FLOPs of the busiest stage, see Note [Order]."""

    work: float
    recompute: float
    traffic: float

    @property
    def total(self) -> float:
        return self.work + self.recompute + self.traffic


@dataclass(frozen=True)
class Candidate:
    """A configuration to try, as a user would write it."""

    keys: Mapping[str, Any]
    config: Config
    checkpointing: bool
    size: int
    plan: PartitionPlan
    cost: Cost

    @property
    def family(self) -> tuple[Any, ...]:
        """Of these one is shown."""
        c = self.config
        return (c.pipeline_parallel_degree, c.tensor_parallel_degree, c.sharded_data_parallel_degree, c.fp16, c.bf16)

    @property
    def num_switches(self) -> int:
        c = self.config
        return sum((self.checkpointing, c.shard_optimizer_state, c.offload_activations, c.fp16 or c.bf16))


@dataclass(frozen=True)
class Proposal:
    """A candidate and its memory. headroom_bytes: what is left; negative if it doesn't fit.   samples: of a microbatch."""

    candidate: Candidate
    layout: Layout
    headroom_bytes: int
    samples: int


@dataclass(frozen=True)
class Outcome:
    """proposals: that fit, the cheapest first.   closest: what needs least, if nothing fits.   refused: why degrees were
    left out."""

    proposals: tuple[Proposal, ...]
    closest: Proposal | None
    refused: tuple[str, ...]
    num_candidates: int


def fit(subject: Subject, wish: Wish, *, most: int = 8) -> Outcome:
    """Try configurations until the `most` cheapest kinds that fit are known.

    Called by: any process without a world, alone. Collectives: none.
    """
    search = _Search(subject, wish)
    candidates = sorted(search.candidates(), key=lambda c: (c.cost.total, c.num_switches))
    proposals: dict[tuple[Any, ...], Proposal] = {}
    closest: Proposal | None = None
    hopeless: set[tuple[Any, ...]] = set()
    for family in dict.fromkeys(c.family for c in candidates):
        frugal = [c for c in candidates if c.family == family and c.size == 1 and _saves_most(c)]
        tried = [search.proposal(c) for c in frugal]
        best = max(tried, key=lambda p: p.headroom_bytes, default=None)
        if best is not None and best.headroom_bytes < 0:
            hopeless.add(family)
        if best is not None and (closest is None or best.headroom_bytes > closest.headroom_bytes):
            closest = best
    for candidate in candidates:
        if len(proposals) == most:
            break
        if candidate.family in hopeless or candidate.family in proposals:
            continue
        proposal = search.proposal(candidate)
        if proposal.headroom_bytes >= 0:
            proposal = search.proposal(candidate, exact=True)
        if proposal.headroom_bytes >= 0:
            proposals[candidate.family] = proposal
    return Outcome(
        tuple(proposals.values()), None if proposals else closest, tuple(dict.fromkeys(search.refused)), len(candidates)
    )


def _saves_most(candidate: Candidate) -> bool:
    """Is every switch on that saves memory?"""
    c = candidate.config
    replicated = c.ddp and c.sharded_data_parallel_degree == 1
    return candidate.checkpointing and (c.shard_optimizer_state or not replicated)


class _Search:
    def __init__(self, subject: Subject, wish: Wish) -> None:
        self._subject = subject
        self._wish = wish
        self._views: dict[tuple[Any, ...], View] = {}
        self._plans: dict[tuple[Any, ...], PartitionPlan] = {}
        self.refused: list[str] = []

    def proposal(self, candidate: Candidate, *, exact: bool = False) -> Proposal:
        """exact: with the partition that this very configuration gets."""
        habits = replace(self._wish.habits, checkpointing=candidate.checkpointing)
        view = self._view(candidate.config, candidate.size)
        plan = None if exact else candidate.plan
        layout = work_out(view, candidate.config, self._wish.num_ranks, habits, plan=plan)
        headroom = self._wish.limit_bytes - self._wish.base_bytes - layout.peak_bytes
        return Proposal(candidate, layout, headroom, candidate.size * self._wish.sample_unit)

    def candidates(self) -> Iterator[Candidate]:
        for keys, checkpointing, size in self._keys():
            try:
                config = resolve({**keys, "log_level": "off"}, {}).config
                check_world(config, self._wish.num_ranks)
            except (ConfigError, NotBuiltError):
                continue
            try:
                view = self._view(config, size)
            except ShardwrightError as error:
                self.refused.append(f"tensor_parallel_degree {config.tensor_parallel_degree}: {error}")
                continue
            stages = config.pipeline_parallel_degree
            if stages > max(len(view.blocks), 1) + 2:
                self.refused.append(f"pipeline_parallel_degree {stages}: more stages than blocks")
                continue
            plan = self._plan(view, config)
            if any(not stage.modules for stage in plan.stages):
                self.refused.append(f"pipeline_parallel_degree {stages}: more stages than blocks")
                continue
            yield Candidate(keys, config, checkpointing, size, plan, self._cost(view, plan, config, checkpointing))

    def _keys(self) -> Iterator[tuple[dict[str, Any], bool, int]]:
        """Everything to try: keys, whether blocks are recomputed, size of a microbatch."""
        wish = self._wish
        for tp in (divisor for divisor in _divisors(wish.num_ranks) if divisor <= MOST_TP):
            for pp in _divisors(wish.num_ranks // tp):
                dp = wish.num_ranks // pp
                sources = dp // tp if wish.given.get("prescaled_batch") else dp
                for size in SIZES:
                    samples = sources * size * wish.sample_unit
                    if wish.samples % samples:
                        continue
                    shape: dict[str, Any] = {"microbatches": wish.samples // samples}
                    if pp > 1:
                        shape["pipeline_parallel_degree"] = pp
                    if tp > 1:
                        shape["tensor_parallel_degree"] = tp
                    if dp > 1:
                        shape["ddp"] = True
                    for switches, checkpointing in self._switches(pp, tp, dp // tp):
                        keys = {**shape, **switches}
                        if all(keys.get(key, value) == value for key, value in wish.given.items()):
                            yield {**keys, **wish.given}, checkpointing, size

    def _switches(self, pp: int, tp: int, rdp: int) -> Iterator[tuple[dict[str, Any], bool]]:
        optimizes = ("memory", "speed") if pp > 1 and tp == 1 else (self._wish.given.get("optimize", "memory"),)
        shards: list[dict[str, Any]] = [{}]
        if rdp * tp > 1:
            shards.append({"shard_optimizer_state": True})
        shards += [{"sharded_data_parallel_degree": d} for d in _divisors(rdp) if d > 1]
        for optimize in optimizes:
            for precision in self._wish.precisions:
                for shard in shards:
                    keys = dict(shard)
                    if optimize != "memory":
                        keys["optimize"] = optimize
                    if precision != "fp32":
                        keys[precision] = True
                    yield keys, False
                    yield keys, True
                    if self._wish.habits.device != "cpu":
                        yield {**keys, "offload_activations": True}, True

    def _view(self, config: Config, size: int) -> View:
        tp = config.tensor_parallel_degree
        form = (tp, config.fp16, config.bf16, config.optimize if tp > 1 else "", config.prescaled_batch)
        if (form, size) not in self._views:
            if size == 1:
                alone = replace(config, pipeline_parallel_degree=1, microbatches=1, active_microbatches=1)
                self._views[form, size] = look(self._subject, alone, self._wish.num_ranks, device=self._wish.habits.device)
            else:
                self._views[form, size] = scaled_up(self._view(config, 1), size)
        return self._views[form, size]

    def _plan(self, view: View, config: Config) -> PartitionPlan:
        """Near enough for a comparison: the number of microbatches hardly moves a cut."""
        key = (id(view), config.pipeline_parallel_degree, config.optimize)
        if key not in self._plans:
            self._plans[key] = plan_of_tree(view.tree, config, config.pipeline_parallel_degree)
        return self._plans[key]

    def _cost(self, view: View, plan: PartitionPlan, config: Config, checkpointing: bool) -> Cost:
        m, tp = config.microbatches, config.tensor_parallel_degree
        work = [stage.work for stage in plan.stages]
        waited = max(sum(work[:stage]) + m * own for stage, own in enumerate(work))
        per_stage = len(view.blocks) / plan.num_stages
        records = view.tree.trace.records
        every = sum(record.work + record.trailing_work for record in records.values()) or 1.0
        blocks = tuple(f"{block}." for block in view.blocks)
        inside = sum(
            record.work + record.trailing_work
            for name, record in records.items()
            if name in view.blocks or name.startswith(blocks)
        )
        recompute = waited / 3 * inside / every if checkpointing else 0.0
        borders = {} if view.footprint is None else view.footprint.borders
        hidden = max((borders[block].crossing_bytes for block in view.blocks if block in borders), default=0)
        sent = 0.0
        if plan.num_stages > 1:
            sent += 2.0 * m * hidden
        if tp > 1:
            sent += m * per_stage * (6 if checkpointing else 4) * 2 * hidden * (tp - 1) / tp
        gradients = max(stage.parameter_bytes for stage in plan.stages)
        dp = self._wish.num_ranks // plan.num_stages
        sdp = config.sharded_data_parallel_degree
        if sdp > 1:
            sent += m * 3 * gradients * (sdp - 1) / sdp / 2
        if dp // tp > 1 or (dp > 1 and tp == 1):
            replicas = dp // tp // sdp
            sent += 2 * gradients / sdp * (replicas - 1) / max(replicas, 1) / 2
        if config.offload_activations:
            sent += m * per_stage * 2 * hidden / 4
        return Cost(waited, recompute, sent * FLOPS_PER_BYTE_SENT[self._wish.habits.device])


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
