"""The result of partitioning: which stage owns which module, what that costs, and how it reads on screen and
disk.

Made by `build.make_plan` on one rank and sent to the others; saved with checkpoints as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardwright.errors import PartitionError
from shardwright.partition.cost import Prices
from shardwright.partition.records import TraceKind
from shardwright.partition.table import format_bytes, format_count, render_table
from shardwright.partition.tree import ModuleTree, build_tree

if TYPE_CHECKING:
    from torch import nn

VERSION = 1
Origin = Literal["auto", "manual"]


@dataclass(frozen=True)
class StageSummary:
    """One stage in numbers.

    modules: the largest modules that lie wholly on this stage, in tree order, and modules split over stages
    whose own
        parameters are here (those end in "*").
    num_parameters, parameter_bytes: held here; a parameter kept on several stages counts on each.
    memory_bytes: with gradients, Adam's state and activations. flops: forward, one microbatch.
    work: forward and backward of one microbatch in FLOP equivalents (see `cost`).
    """

    modules: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    memory_bytes: int
    flops: int
    work: float


@dataclass(frozen=True)
class ReplicatedParameter:
    """A tied parameter that several stages keep: the owner has the original, the others a copy kept equal."""

    name: str
    holders: tuple[str, ...]
    owner: int
    copies: tuple[int, ...]


@dataclass(frozen=True)
class PartitionPlan:
    """Where every module of a model lives.

    stage_of: stage of every name that `model.named_modules()` gives ("" is the root).
    origin: found by the library or set by the script. how, note: what tracing was used, and what kept it from
    better.
    """

    num_stages: int
    stage_of: dict[str, int]
    stages: tuple[StageSummary, ...]
    origin: Origin
    how: TraceKind
    note: str = ""
    replicas: tuple[ReplicatedParameter, ...] = ()

    @property
    def imbalance(self) -> float:
        """Work of the slowest stage, of the mean stage: 1.0 is perfect, and the factor by which a step is
        longer."""
        works = [stage.work for stage in self.stages]
        mean = sum(works) / len(works)
        return max(works) / mean if mean else 1.0

    def bubble(self, microbatches: int) -> float:
        """Part of a step in which an equal stage would idle: (p - 1) / (m + p - 1)."""
        return (self.num_stages - 1) / (microbatches + self.num_stages - 1)

    def efficiency(self, microbatches: int) -> float:
        """Expected speed, of p times one process: a stage is done when those before it have begun, and it has worked."""
        work = [stage.work for stage in self.stages]
        last = max(sum(work[:stage]) + microbatches * own for stage, own in enumerate(work))
        return microbatches * sum(work) / (self.num_stages * last) if last else 1.0

    def split_modules(self) -> tuple[str, ...]:
        """Modules whose descendants lie on more than one stage: their own forward runs as glue."""
        found: dict[str, None] = {}
        for name, stage in self.stage_of.items():
            above = name
            while above:
                above = above.rpartition(".")[0]
                if self.stage_of[above] != stage:
                    found[above] = None
        return tuple(name for name in self.stage_of if name in found)

    def explain(self, microbatches: int | None = None) -> str:
        """A table for people: per stage its modules and its share of parameters, memory and time.

        microbatches: adds what bubble and efficiency to expect.
        """
        parameters = sum(stage.num_parameters for stage in self.stages) or 1
        flops = sum(stage.flops for stage in self.stages)
        work = sum(stage.work for stage in self.stages) or 1
        rows = [
            (
                str(index),
                ", ".join(compress_names(stage.modules)) or "(nothing)",
                f"{format_count(stage.num_parameters)} ({stage.num_parameters / parameters:.0%})",
                format_bytes(stage.parameter_bytes),
                format_bytes(stage.memory_bytes),
                f"{stage.flops / flops:.1%}" if flops else "-",
                f"{stage.work / work:.1%}",
            )
            for index, stage in enumerate(self.stages)
        ]
        head = ("stage", "modules", "parameters", "bytes", "memory", "FLOPs", "time")
        lines = [render_table(head, rows, wrap_column=1)]
        source = {
            "fake": "a forward on fake tensors",
            "real": "a forward on real tensors",
            "none": "module order and parameter sizes",
        }[self.how]
        by = "chosen" if self.origin == "auto" else "set by the script, measured"
        lines.append(f"{by} by {source}" + (f" ({self.note})" if self.note and self.how != "fake" else ""))
        if any(name.endswith("*") for stage in self.stages for name in stage.modules):
            lines.append("* split over stages; its own parameters are here")
        for tied in self.replicas:
            copies = ", ".join(map(str, tied.copies))
            lines.append(f"tied: {tied.name} owned by stage {tied.owner}, copies on stage {copies}")
        lines.append(f"slowest stage: {self.imbalance:.2f} x the mean")
        if microbatches is not None:
            lines.append(
                f"with {microbatches} microbatches: bubble {self.bubble(microbatches):.1%}, "
                f"expected efficiency {self.efficiency(microbatches):.1%}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads, in this and later versions."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> PartitionPlan:
        """Read what `to_json` wrote. Raises: PartitionError if it isn't that, or is of a later version."""
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("version")
            data.pop("memory", None)  # what `shardwright plan` adds
            if version > VERSION:
                raise PartitionError(
                    f"the partition is of format version {version}, this library reads up to {VERSION}",
                    remedy="upgrade shardwright",
                )
            stages = tuple(
                StageSummary(**{**stage, "modules": tuple(stage["modules"])}) for stage in data.pop("stages")
            )
            replicas = tuple(
                ReplicatedParameter(
                    **{**tied, "holders": tuple(tied["holders"]), "copies": tuple(tied["copies"])}
                )
                for tied in data.pop("replicas")
            )
            return cls(stages=stages, replicas=replicas, **data)
        except PartitionError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PartitionError(
                f"this is not a partition in JSON: {type(error).__name__}: {error}"
            ) from error

    def check(self, model: nn.Module) -> None:
        """See that the plan is for this model.

        Raises: PartitionError naming modules that the plan lacks or the model lacks, a stage out of range, or
        a shared parameter on several stages that the plan doesn't list as replicated, or an indivisible module on
        several stages.
        """
        tree = build_tree(model)
        lacking = [name for name in tree.nodes if name not in self.stage_of]
        foreign = [name for name in self.stage_of if name not in tree.nodes]
        if lacking or foreign:
            raise PartitionError(
                f"the partition is for another model: {len(lacking)} modules lack a stage ({_some(lacking)}) "
                f"and {len(foreign)} stages are for modules that don't exist ({_some(foreign)})",
                remedy="use a partition made for this model, or let a new one be made",
            )
        for name, stage in self.stage_of.items():
            if not 0 <= stage < self.num_stages:
                raise PartitionError(
                    f"module '{name}' is on stage {stage}, expected 0 to {self.num_stages - 1}"
                )
        for whole, *inside in tree.welds():
            for name in inside:
                if self.stage_of[name] != self.stage_of[whole]:
                    raise PartitionError(
                        f"module '{name}' is on stage {self.stage_of[name]}, but '{whole}', which can't be divided, is"
                        f" on stage {self.stage_of[whole]}"
                    )
        check_ties(tree, self.stage_of, allowed={tied.name for tied in self.replicas})


def summarize(
    tree: ModuleTree, stage_of: dict[str, int], prices: Prices, num_stages: int
) -> tuple[StageSummary, ...]:
    """Add up what each stage holds and computes."""
    held: list[set[int]] = [set() for _ in range(num_stages)]
    for name, node in tree.nodes.items():
        held[stage_of[name]].update(node.parameters)
    names = _largest_whole(tree, stage_of, num_stages)
    members: list[list[str]] = [[] for _ in range(num_stages)]
    for name, stage in stage_of.items():
        members[stage].append(name)
    return tuple(
        StageSummary(
            modules=names[stage],
            num_parameters=sum(tree.parameters[index].numel for index in held[stage]),
            parameter_bytes=sum(tree.parameters[index].nbytes for index in held[stage]),
            memory_bytes=round(sum(prices.memory_bytes[name] for name in members[stage])),
            flops=sum(prices.flops[name] for name in members[stage]),
            work=sum(prices.work[name] for name in members[stage]),
        )
        for stage in range(num_stages)
    )


def check_ties(tree: ModuleTree, stage_of: dict[str, int], *, allowed: Iterable[str] = ()) -> None:
    """Raise PartitionError if a parameter is shared by modules on different stages and not in `allowed`."""
    for parameter in tree.parameters:
        stages = {holder: stage_of[holder] for holder in parameter.holders}
        if len(set(stages.values())) > 1 and parameter.name not in allowed:
            where = ", ".join(f"'{holder}' on stage {stage}" for holder, stage in stages.items())
            raise PartitionError(
                f"parameter '{parameter.name}' is shared by modules on different stages: {where}",
                remedy='put them on one stage, or set tied_weights to "replicate" to keep a copy on each',
            )


def replicated(tree: ModuleTree, stage_of: dict[str, int]) -> tuple[ReplicatedParameter, ...]:
    """The shared parameters that several stages hold; the stage of the first holder owns the original."""
    found = []
    for parameter in tree.parameters:
        stages = [stage_of[holder] for holder in parameter.holders]
        copies = tuple(sorted(set(stages) - {stages[0]}))
        if copies:
            found.append(ReplicatedParameter(parameter.name, parameter.holders, stages[0], copies))
    return tuple(found)


def compress_names(names: Iterable[str]) -> list[str]:
    """Join runs of numbered siblings: h.0, h.1, h.2 -> h.0-2."""
    runs: list[tuple[str, int, int] | str] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        if not last.isdecimal():
            runs.append(name)
            continue
        previous = runs[-1] if runs else ""
        if isinstance(previous, tuple) and previous[0] == stem and previous[2] + 1 == int(last):
            runs[-1] = (stem, previous[1], int(last))
        else:
            runs.append((stem, int(last), int(last)))
    texts = []
    for run in runs:
        if isinstance(run, str):
            texts.append(run)
        else:
            stem, first, final = run
            number = str(first) if first == final else f"{first}-{final}"
            texts.append(f"{stem}.{number}" if stem else number)
    return texts


def _largest_whole(tree: ModuleTree, stage_of: dict[str, int], num_stages: int) -> list[tuple[str, ...]]:
    bearing = tree.bearing()
    whole: dict[str, bool] = {}
    for name, node in reversed(tree.nodes.items()):
        whole[name] = all(
            whole[child] and stage_of[child] == stage_of[name] for child in node.children if child in bearing
        )
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for name, node in tree.nodes.items():
        if name not in bearing:
            continue
        inside = node.parent is not None and whole[node.parent]
        if whole[name] and not inside:
            names[stage_of[name]].append(name or "(root)")
        elif not whole[name] and node.parameters:
            names[stage_of[name]].append(f"{name or '(root)'}*")
    return [tuple(found) for found in names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"
