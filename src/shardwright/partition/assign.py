"""The module tree to stages: a good pipeline that keeps the contract's rules.

Two ways are tried and the better result is taken:

- `linear`: the pieces of the whole model, in execution order, cut into consecutive stages so that the
  costliest is as cheap as can be. A cut costs what crosses it, and a little for each module it tears, so that
  it falls between blocks unless a cut inside one clearly pays.
- `descend`: the original's way, down the tree.

Rules of the contract: every module has one stage, the root stage 0; joined modules share a stage; modules
without parameters follow their parent; no stage is empty if there are enough modules. Pure and deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import PartitionError
from shardwright.partition.cost import price
from shardwright.partition.descend import descend
from shardwright.partition.linear import cut
from shardwright.partition.outline import DETOUR, Outline, Piece, outline, pieces
from shardwright.partition.tree import ModuleTree


def assign(
    tree: ModuleTree,
    num_stages: int,
    memory_weight: float,
    *,
    shares: Sequence[float] | None = None,
    in_flight: int = 1,
    join_ties: bool = True,
) -> dict[str, int]:
    """Give every module of the tree a stage.

    memory_weight: in [0, 1], how much memory counts against time. shares: what each stage should get, 1 on
    average (all alike by default), see `stage_shares`. in_flight: microbatches whose activations a
    stage keeps at once. join_ties: keep modules that share a parameter together (False: each stage keeps a
    copy).
    Returns: stage by module name, for every name. With fewer pieces than stages the last stages stay empty.
    Raises: PartitionError if num_stages or memory_weight is out of range.
    """
    if num_stages < 1:
        raise PartitionError(f"num_stages is {num_stages}, expected 1 or more")
    if not 0 <= memory_weight <= 1:
        raise PartitionError(f"memory_weight is {memory_weight}, expected a number from 0 to 1")
    if num_stages == 1:
        return dict.fromkeys(tree.nodes, 0)
    prices = price(tree, memory_weight, in_flight=in_flight, count_copies=not join_ties)
    out = outline(tree, prices, join_ties=join_ties)
    found = pieces(tree, out, prices, num_stages)
    candidates = [_linear(found, num_stages, shares), descend(out, num_stages)]
    filled = max(len(_used(out, candidate)) for candidate in candidates)
    usable = [candidate for candidate in candidates if len(_used(out, candidate)) == filled]
    best = min(usable, key=lambda candidate: bottleneck(out, found, candidate, shares))
    return complete(tree, out, best)


def stage_shares(num_stages: int, num_microbatches: int) -> list[float]:
    """What stages should compute for the shortest step, 1 on average: earlier ones more than later ones.

    A stage waits for those before it, forward once and backward once. So stage s is done at
    sum(t[:s]) + m * t[s] for m microbatches, if those before it hold enough of them to stay busy; that is the same
    for all stages if each gets 1 - 1/m of what the one before it gets. On many stages what they may hold
    (`active_microbatches`) allows for a part of that only: 2/p, tried with `make_timetable` for 2 to 8 stages,
    where it shortens a step by 2 to 5 %.
    """
    if num_microbatches < 2:
        return [1.0] * num_stages
    ratio = 1.0 - min(1.0, 2.0 / num_stages) / num_microbatches
    raw = [ratio**stage for stage in range(num_stages)]
    return [share * num_stages / sum(raw) for share in raw]


def bottleneck(
    out: Outline, found: list[Piece], stage_of: dict[str, int], shares: Sequence[float] | None = None
) -> float:
    """Cost of the costliest stage, relative to its share.

    Where execution changes from one stage to another, both pay the entry cost of the piece that follows.
    Every change of stage beyond the unavoidable ones is a detour.
    """
    spent: dict[int, float] = {}
    last = stage_of[found[0].modules[-1]]
    changes = 0
    for piece in found:
        for name in piece.modules:
            spent[stage_of[name]] = spent.get(stage_of[name], 0.0) + out.own[name]
        stage = stage_of[piece.modules[-1]]
        if stage != last:
            spent[stage] += piece.entry_cost
            spent[last] += piece.entry_cost
            changes += 1
        last = stage
    detours = changes - (len(spent) - 1)
    costliest = max(cost if shares is None else cost / shares[stage] for stage, cost in spent.items())
    return round(costliest + detours * DETOUR / len(spent), 12)


def complete(tree: ModuleTree, out: Outline, stage_of: dict[str, int]) -> dict[str, int]:
    """Give a stage to the modules that the outline leaves out.

    Tied modules go to their anchor. A module whose parameters below are all on one stage goes there too. What
    remains holds no parameters, or never ran, and follows its parent.
    """
    result = {name: stage_of[name] for name in out.order}
    for member, anchor in out.anchors.items():
        result[member] = stage_of[anchor]
    below: dict[str, set[int]] = {name: set() for name in tree.nodes}
    for name, node in reversed(tree.nodes.items()):
        if name in result and (name in out.holders or name in out.anchors):
            below[name].add(result[name])
        for child in node.children:
            below[name] |= below[child]
    for name, node in tree.nodes.items():
        if name not in result:
            parent = result[node.parent] if node.parent is not None else 0
            result[name] = next(iter(below[name])) if len(below[name]) == 1 else parent
    return {name: result[name] for name in tree.nodes}


def _linear(found: list[Piece], num_stages: int, shares: Sequence[float] | None) -> dict[str, int]:
    costs, entry_costs = [piece.cost for piece in found], [piece.entry_cost for piece in found]
    starts = cut(costs, entry_costs, num_stages, shares=shares)
    stage_of: dict[str, int] = {}
    stage = 0
    for index, piece in enumerate(found):
        if stage + 1 < len(starts) and index == starts[stage + 1]:
            stage += 1
        for name in piece.modules:
            stage_of[name] = stage
    return stage_of


def _used(out: Outline, stage_of: dict[str, int]) -> set[int]:
    return {stage_of[name] for name in out.holders}
