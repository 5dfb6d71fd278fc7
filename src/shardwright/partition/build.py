"""From a model and the inputs of one microbatch to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.log import get_logger
from shardwright.partition.assign import assign, stage_shares
from shardwright.partition.cost import price
from shardwright.partition.manual import assign_by_hand
from shardwright.partition.plan import PartitionPlan, check_ties, replicated, summarize
from shardwright.partition.records import TraceKind
from shardwright.partition.trace import trace
from shardwright.partition.tree import ModuleTree, build_tree

if TYPE_CHECKING:
    from torch import nn

    from shardwright.config.schema import Config

_log = get_logger(__name__)


def make_plan(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, config: Config, pp: int
) -> PartitionPlan:
    """Decide which stage owns which module.

    args, kwargs: the inputs of one microbatch. config: auto_partition, default_partition, memory_weight,
    optimize, pipeline, microbatches, skip_tracing, tied_weights,
    active_microbatches are read.
    Called by: one rank; the engine sends the result to the others. Collectives: none. The model is left as it
    was.
    Raises: PartitionError for an assignment by hand that can't be used.
    """
    tree = build_tree(module)
    join_ties = config.tied_weights == "colocate"
    by_hand = None
    if not config.auto_partition:  # what is wrong with it should show before the trace
        by_hand = assign_by_hand(module, pp, config.default_partition)
        if join_ties:
            check_ties(tree, by_hand)
    how: TraceKind = "none" if config.skip_tracing or pp == 1 else "fake"
    communicates = config.tensor_parallel_degree > 1 and any(node.indivisible for node in tree.nodes.values())
    tree = tree.with_trace(trace(module, args, kwargs, how=how, may_run=not communicates))
    if tree.trace.how == "none" and how != "none":
        _log.warning(
            "the model's forward could not be traced, so the partition is made from module order and "
            "parameter sizes: %s",
            tree.trace.reason,
        )
    return plan_of_tree(tree, config, pp, by_hand=by_hand)


def plan_of_tree(
    tree: ModuleTree, config: Config, pp: int, *, by_hand: dict[str, int] | None = None
) -> PartitionPlan:
    """The rest of `make_plan`, for a model that was traced. by_hand: stages that the script has set."""
    join_ties = config.tied_weights == "colocate"
    in_flight = max(1, min(config.active_microbatches, pp))
    if by_hand is not None:
        stage_of = by_hand
    else:
        waves = config.optimize == "speed" and config.pipeline == "interleaved"
        stage_of = assign(
            tree,
            pp,
            config.memory_weight,
            shares=stage_shares(pp, config.microbatches) if waves else None,
            in_flight=in_flight,
            join_ties=join_ties,
        )
    prices = price(tree, config.memory_weight, in_flight=in_flight, count_copies=not join_ties)
    return PartitionPlan(
        num_stages=pp,
        stage_of=stage_of,
        stages=summarize(tree, stage_of, prices, pp),
        origin="auto" if by_hand is None else "manual",
        how=tree.trace.how,
        note=tree.trace.reason,
        replicas=() if join_ties else replicated(tree, stage_of),
    )
