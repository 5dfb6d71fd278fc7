"""Every rank's memory, and what a step costs, for one configuration of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.config.schema import Config
from shardwright.engine.planning.memory import Habits, Held, RankMemory, rank_memory
from shardwright.engine.planning.model import View
from shardwright.partition.build import plan_of_tree
from shardwright.partition.cost import execution_key
from shardwright.partition.footprint import Footprint, Peaks, peaks
from shardwright.partition.plan import PartitionPlan
from shardwright.pipeline.schedule import Event
from shardwright.pipeline.timetable import make_timetable

MOST_REHEARSED = 8
"""Up to so many stages the schedule is run on paper."""

_NOTHING = Footprint((), (), (), {})


@dataclass(frozen=True)
class Visit:
    """Modules that run one after the other on a stage. first: the module at which execution comes there."""

    stage: int
    first: str


@dataclass(frozen=True)
class Layout:
    """One configuration, worked out.

    ranks: one per stage; its replicas and tensor parallel peers hold as much.   in_flight: per stage.
    checkpointed: blocks that are recomputed.   boundaries_bytes: what one microbatch sends over stages, forward.
    """

    config: Config
    world_size: int
    plan: PartitionPlan
    ranks: tuple[RankMemory, ...]
    in_flight: tuple[int, ...]
    checkpointed: tuple[str, ...]
    boundary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.peak_bytes for rank in self.ranks)


def work_out(view: View, config: Config, world_size: int, habits: Habits, *, plan: PartitionPlan | None = None) -> Layout:
    """Cut the model over the stages, run the schedule on paper, and add up each rank.

    plan: the partition, if it is made already.
    """
    pp = config.pipeline_parallel_degree
    if plan is None:
        plan = plan_of_tree(view.tree, config, pp)
    footprint = view.footprint or _NOTHING
    visits = _visits(view, plan)
    in_flight = _in_flight(plan, visits, config)
    split = set(plan.split_modules())
    checkpointed = tuple(block for block in view.blocks if block not in split) if habits.checkpointing else ()
    ranks = tuple(
        rank_memory(
            _parameters_of(view, plan, stage),
            buffers=sum(n.buffer_bytes for n in view.tree.nodes.values() if plan.stage_of[n.name] == stage),
            inputs=view.input_bytes * config.microbatches,
            largest_block=_largest_block(view, plan, stage),
            play=partial(_play, footprint, plan.stage_of, stage, checkpointed, visits),
            in_flight=in_flight[stage],
            config=config,
            world_size=world_size,
            habits=habits,
        )
        for stage in range(pp)
    )
    crossing = sum(footprint.borders[v.first].crossing_bytes for v in visits[1:] if v.first in footprint.borders)
    return Layout(config, world_size, plan, ranks, in_flight, checkpointed, crossing)


def _play(
    footprint: Footprint,
    home: dict[str, int],
    stage: int,
    checkpointed: Sequence[str],
    visits: Sequence[Visit],
    share: float,
    transit_bytes: int,
) -> Peaks:
    own = [place for place, visit in enumerate(visits) if visit.stage == stage]
    return peaks(
        footprint,
        lambda name: home[name] == stage,
        checkpointed=[block for block in checkpointed if home[block] == stage],
        entries=[visits[place].first for place in own if place > 0],
        exits=[visits[place + 1].first for place in own if place + 1 < len(visits)],
        last_entry=visits[-1].first if len(own) > 1 and own[-1] == len(visits) - 1 else None,
        gradient_share=share,
        transit_bytes=transit_bytes,
    )


def _visits(view: View, plan: PartitionPlan) -> list[Visit]:
    """The stages in the order in which a microbatch's forward comes to them."""
    keys = execution_key(view.tree)
    ordered = sorted((name for name in keys if view.tree.nodes[name].parameters), key=keys.__getitem__)
    split = set(plan.split_modules())
    visits: list[Visit] = []
    for name in ordered:
        stage = plan.stage_of[name]
        if not visits or visits[-1].stage != stage:
            visits.append(Visit(stage, _outermost(name, keys, split)))
    return visits or [Visit(0, "")]


def _outermost(name: str, keys: dict[str, tuple[int, int]], split: set[str]) -> str:
    """The largest module that begins with `name` and lies on one stage."""
    above = name.rpartition(".")[0]
    while above and above not in split:
        if above in keys:
            name = above
        above = above.rpartition(".")[0]
    return name


def _in_flight(plan: PartitionPlan, visits: Sequence[Visit], config: Config) -> tuple[int, ...]:
    """The most microbatches that each stage holds: in a run on paper, with very many stages as in 1F1B."""
    num_stages, m = plan.num_stages, config.microbatches
    if num_stages == 1:
        return (1,)
    if config.pipeline == "simple":
        return (m,) * num_stages
    if num_stages > MOST_REHEARSED:
        return tuple(min(m, config.active_microbatches, num_stages - stage) for stage in range(num_stages))
    times = [sum(1 for visit in visits if visit.stage == stage) or 1 for stage in range(num_stages)]
    costs = [plan.stages[stage].work / 3 / times[stage] for stage in range(num_stages)]
    program: list[Event] = []
    for place, visit in enumerate(visits):
        if place:
            program.append(Event("move", visits[place - 1].stage, visit.stage))
        program.append(Event("call", visit.stage, cost=costs[visit.stage]))
    program.append(Event("gate"))
    for place in range(len(visits) - 1, -1, -1):
        program.append(Event("call", visits[place].stage, cost=2 * costs[visits[place].stage]))
        if place:
            program.append(Event("move", visits[place].stage, visits[place - 1].stage))
    tried = min(m, 2 * (num_stages + config.active_microbatches))  # more of them change nothing: the pattern repeats
    table = make_timetable(
        config.pipeline, program, tried, config.active_microbatches, num_stages, optimize=config.optimize
    )
    return tuple(max(1, held) for held in table.peak_held)


def _parameters_of(view: View, plan: PartitionPlan, stage: int) -> list[Held]:
    """Those that lie on the stage, copies of tied ones included."""
    copies = {tied.name: (tied.owner, *tied.copies) for tied in plan.replicas}
    return [
        view.held[p.name]
        for p in view.tree.parameters
        if stage in copies.get(p.name, (plan.stage_of[p.holders[0]],))
    ]


def _largest_block(view: View, plan: PartitionPlan, stage: int) -> int:
    names = {p.name: view.held[p.name].nbytes for p in view.tree.parameters}
    sizes = [
        sum(nbytes for name, nbytes in names.items() if name.startswith(f"{block}."))
        for block in view.blocks
        if plan.stage_of[block] == stage
    ]
    inside = tuple(f"{block}." for block in view.blocks)
    rest = max((nbytes for name, nbytes in names.items() if not name.startswith(inside)), default=0)
    return max([*sizes, rest])
