"""Small questions and requests of scripts about the wrapped model."""

from __future__ import annotations

from torch import nn

from shardwright.engine.state import state
from shardwright.errors import UsageError
from shardwright.pipeline.unit import mark_dynamic
from shardwright.topology import context
from shardwright.transport import collectives


def num_microbatches() -> int:
    """The configured number of microbatches per step."""
    return context.world().config.microbatches


def get_partition(module: nn.Module) -> int:
    """The stage that owns a module of the wrapped model.

    Raises: UsageError before partitioning, or for a module of another model.
    """
    model = state.model
    if model is None or not model.partitioned:
        raise UsageError("get_partition() before the model is partitioned", remedy="call it after the first step")
    if model._plan is None:
        return 0
    for name, found in model.get_module().named_modules():
        if found is module:
            return int(model._plan.stage_of[name])
    raise UsageError(f"get_partition(): this {type(module).__name__} is not part of the wrapped model")


def dynamic_shapes(module: nn.Module) -> nn.Module:
    """Say that a module's results have shapes, or Python values, that its arguments' shapes don't determine.

    Its owner then announces them at every call (one small message per call to each other pipeline rank) instead of once.
    Called by: every rank alike, at any time. Returns the module.
    """
    mark_dynamic(module)
    return module


def hvd_average_grads() -> None:
    """Average the gradients over DP_GROUP now; does nothing with ddp, where steps have done it.

    Called by: every rank, after a step. Collectives: one all-reduce per gradient.
    """
    world = context.world()
    replicas = world.size // world.table.degrees.pp
    if world.config.ddp or replicas == 1 or state.model is None:
        return
    for _, parameter in state.model.local_named_parameters():
        if parameter.grad is not None:
            collectives.all_reduce(parameter.grad, "dp")
            parameter.grad /= replicas
