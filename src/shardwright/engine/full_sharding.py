"""Sharded data parallelism of the wrapped model: when it is sharded, and how its gradients become means."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.checkpoint.flat_groups import FlatGroups, FlatParameter
from shardwright.data_parallel.fully_sharded import FullySharded, Named
from shardwright.data_parallel.fully_sharded_reducer import FullyShardedReducer
from shardwright.engine import placement
from shardwright.engine.distribution import Distribution
from shardwright.engine.part import Part
from shardwright.engine.replicas import Replicas
from shardwright.topology import context

if TYPE_CHECKING:
    from shardwright.engine.fully_sharded_optimizer import FullyShardedOptimizer
    from shardwright.engine.model import DistributedModel


def shard(module: nn.Module) -> FullySharded | None:
    """Make a model equal on all replicas and shard its parameters, if `sharded_data_parallel_degree` is above 1.

    Called by: every rank, with the whole model (or its tp slices). Parameters are other objects afterwards; the module is the
    same one, of a subclass of its class.
    Collectives: broadcasts from replica 0, unit by unit, and one exchange, see `sharded_parameter.refresh`.
    """
    world = context.world()
    if world.table.degrees.sdp == 1:
        return None
    part = Part(module, 0, 1)
    part.settle(placement.whole_table(module))
    replicas = Replicas(part)
    for _, buffer in part.buffers():
        placement.keep(buffer, world.device)

    def prepare(named: Sequence[Named]) -> None:
        for _, parameter in named:
            placement.keep(parameter, world.device)
        replicas.broadcast_parameters(named)

    return FullySharded(module, prepare=prepare, max_live=world.config.sdp_max_live_parameters)


def make_reducer(
    sharded: FullySharded, distribution: Distribution, arrived: Callable[[nn.Parameter], None]
) -> FullyShardedReducer:
    """What reduces the gradients beyond the shard group; for the numbers of losses see Note [Two reductions]."""
    world = context.world()
    num_replicas = world.size // world.table.degrees.pp
    return FullyShardedReducer(
        sharded,
        [name for name, p in sharded.parameters.items() if distribution.is_scaled(p)],
        average_over=num_replicas,
        average_scaled_over=world.table.degrees.rdp if world.config.prescaled_batch else num_replicas,
        bucket_numel=world.config.sdp_reduce_bucket_size,
        arrived=arrived,
    )


def get_param_shapes(model: DistributedModel, optimizer: Any) -> list[OrderedDict[str, torch.Size]]:
    """Per parameter group of the wrapped optimizer: plain name -> whole shape, in the order of the flat groups.

    Called by: any rank by itself, with sharded data parallelism. With tensor parallelism shapes are those of this rank's slices.
    """
    names = {id(p): name for name, p in model._part.parameters()}
    return [OrderedDict((names[id(p)], p.ds_shape) for p in group) for group in optimizer.fp16_groups]


def flat_groups(model: DistributedModel, optimizer: FullyShardedOptimizer) -> FlatGroups:
    """How a checkpoint writes this rank's shards. Communicates only where `exchange` is called."""
    shapes = get_param_shapes(model, optimizer)
    held = iter(optimizer._sw_held())

    def described(name: str, shape: torch.Size, parameter: Any) -> FlatParameter:
        dtypes = parameter.dtype, next(held).dtype
        full = torch.float32
        return FlatParameter(name, tuple(shape), dtypes == (full, full), dtypes[1] is full and dtypes[0] is not full)

    groups = [
        [described(*named, parameter) for named, parameter in zip(group.items(), members, strict=True)]
        for group, members in zip(shapes, optimizer.fp16_groups, strict=True)
    ]
    here = context.world()
    return FlatGroups(
        here.table.degrees.sdp,
        here.coordinates.shard,
        groups,
        get_buffer_names(model),
        exchange=optimizer._sw_exchange,
        parts=optimizer._sw_flat_parts,
    )


def get_buffer_names(model: DistributedModel) -> list[str]:
    """The plain names of the buffers that are in the model's state dict."""
    saved = model.get_module().state_dict(keep_vars=True)
    return [name for name, _ in model.get_module().named_buffers() if name in saved]
