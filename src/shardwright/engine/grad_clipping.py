"""Clipping by the norm of all gradients of the wrapped model, wherever its parameters are."""

from __future__ import annotations

import torch

from shardwright.data_parallel import grad_norm
from shardwright.engine.model import DistributedModel
from shardwright.engine.state import state
from shardwright.errors import UsageError


def clip_grad_norm(max_norm: float, norm_type: float = 2.0, *, model: DistributedModel | None = None) -> torch.Tensor:
    """Clip all gradients of the wrapped model by their global norm; returns the norm before clipping.

    Called by: every rank, between the step call and optimizer.step(). Collectives: one all-reduce over
    MP_GROUP.
    max_norm: the factor is max_norm / (norm + 1e-6) where that is below 1, the same on every rank.
    Every parameter counts once: over stages, slices and copies of them, copies of tied weights, and replicas.
    """
    wrapped = state.model if model is None else model
    if wrapped is None:
        raise UsageError("clip_grad_norm() needs a wrapped model", remedy="call smp.DistributedModel first")
    return grad_norm.clip_grad_norm_(
        wrapped.local_named_parameters(),
        max_norm,
        norm_type=norm_type,
        mp_axis="mp",
        counted_elsewhere=lambda name, parameter: wrapped.is_copy(parameter),
        counted_here=wrapped._part.distribution.counted_here,
    )
