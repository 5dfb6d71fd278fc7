"""Clipping by the norm of all gradients of the wrapped model, wherever its parameters are."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch

from shardwright.data_parallel import grad_norm
from shardwright.data_parallel.grad_norm import HeldGradient
from shardwright.data_parallel.shards import is_shard
from shardwright.engine.model import DistributedModel
from shardwright.engine.state import state
from shardwright.errors import UsageError
from shardwright.topology import context


def clip_grad_norm(max_norm: float, norm_type: float = 2.0, *, model: DistributedModel | None = None) -> torch.Tensor:
    """Clip all gradients of the wrapped model by their global norm; returns the norm before clipping.

    Called by: every rank, between the step call and optimizer.step(). Collectives: one all-reduce over
    MP_GROUP, with sharded state over the world.
    max_norm: the factor is max_norm / (norm + 1e-6) where that is below 1, the same on every rank.
    Every parameter counts once: over stages, slices and copies of them, copies of tied weights, pieces and replicas.
    In half precision, with a wrapped optimizer, see `HalfPrecisionOptimizer.clip_master_grads`.
    """
    wrapped = state.model if model is None else model
    if wrapped is None:
        raise UsageError("clip_grad_norm() needs a wrapped model", remedy="call smp.DistributedModel first")
    if wrapped is state.model and hasattr(state.optimizer, "_sw_masters"):
        return torch.tensor(state.optimizer.clip_master_grads(max_norm, norm_type))
    return clip(wrapped, held_gradients(wrapped), max_norm, norm_type)


def whole_norm(model: DistributedModel, gradients: Iterable[HeldGradient]) -> torch.Tensor:
    """The norm of the gradients of the whole model, of which these are here; see `clip`."""
    return grad_norm.global_grad_norm(
        gradients,
        axis="world" if model._gradients.sharded else "mp",
        counted_here=functools.partial(counted_here, model),
    )


def held_gradients(model: DistributedModel) -> Iterator[HeldGradient]:
    """The gradients that this rank holds after a step: of parameters, and of pieces of them."""
    for parameter in model.local_parameters():
        piece = model._sharding.piece(parameter)
        if piece is not None and piece.tensor.grad is not None:
            yield HeldGradient(parameter, piece.tensor.grad, piece)
        if parameter.grad is not None and not is_shard(parameter):
            yield HeldGradient(parameter, parameter.grad)


def clip(model: DistributedModel, gradients: Iterable[HeldGradient], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip these gradients by the norm of those of the whole model; see `clip_grad_norm`.

    gradients: of all parameters of this rank, in whatever tensors they are by now.
    """
    return grad_norm.clip_grad_norm_(
        gradients,
        max_norm,
        norm_type=norm_type,
        axis="world" if model._gradients.sharded else "mp",
        counted_here=functools.partial(counted_here, model),
    )


def counted_here(model: DistributedModel, held: HeldGradient) -> torch.Tensor | None:
    """The part of a gradient that no other rank counts."""
    if model.is_copy(held.parameter):
        return None
    distribution = model._part.distribution
    if context.world().table.degrees.sdp > 1:
        where = context.world().coordinates
        mine = where.replica == 0 and (held.piece is not None or where.shard == 0)
        return distribution.counted_here(held.parameter, held.gradient, held.piece) if mine else None
    if held.piece is not None and not distribution.is_scaled(held.parameter):
        return held.gradient  # pieces over dp, so of tp ranks too
    return distribution.counted_here(held.parameter, held.gradient, held.piece)
