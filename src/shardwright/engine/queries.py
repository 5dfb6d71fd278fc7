"""Small questions and requests of scripts about the wrapped model."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.engine.state import state
from shardwright.errors import PartitionError, UsageError
from shardwright.partition import manual
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
    plan = model._part.plan
    for name, found in model.get_module().named_modules():
        if found is module:
            return 0 if plan is None else plan.stage_of[name]
    raise UsageError(f"get_partition(): this {type(module).__name__} is not part of the wrapped model")


def set_partition(module: nn.Module, stage: int) -> None:
    """See `shardwright.partition.manual.set_partition`.

    Raises: PartitionError besides, if the module's stage is settled: by the first step, or by the checkpoint
    that training goes on from.
    """
    model = state.model
    plan = None if model is None else model._part.plan
    if model is not None and plan is not None and any(m is module for m in model.modules()):
        how = "the model is partitioned" if model.partitioned else "the partition comes from a checkpoint"
        raise PartitionError(
            f"smp.set_partition({type(module).__name__}, {stage}): {how} already",
            remedy="call it before the first step, and don't resume into another partition",
        )
    manual.set_partition(module, stage)


def get_distribution_axis(parameter: torch.Tensor) -> int | None:
    """The dim along which a parameter of the wrapped model is cut over tp ranks; None if it is whole, or unknown."""
    spec = None if state.model is None else state.model._part.distribution.spec(parameter)
    return None if spec is None else spec.dim


def dynamic_shapes(module: nn.Module) -> nn.Module:
    """Say that a module's results have shapes, or Python values, that its arguments' shapes don't determine.

    Its owner then announces them at every call (one small message per call to each other pipeline rank)
    instead of once.
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
