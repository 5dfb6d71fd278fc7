"""Norms of whole parameters and of the whole model, for optimizers whose update depends on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.data_parallel.grad_norm import HeldGradient
from shardwright.engine.grad_clipping import counted_here
from shardwright.engine.model import DistributedModel
from shardwright.optim.norms import OwnNorms
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives


class ModelNorms:
    """`optim.norms.Norms` for a model that is cut over tp ranks and stages, or whose parameters are in pieces.

    Called by: the optimizer's step, on every rank of an MP_GROUP, with sharded state on every rank.
    real: the model's parameter, or the piece of one, that a tensor of the optimizer's groups stands for.
    Of tensors that several tp ranks hold one of them counts (`Distribution.counted_here`), so that every rank of a tp
    group gets the same numbers, also for parameters that are not cut.
    """

    def __init__(self, model: DistributedModel, real: Callable[[Tensor], Tensor]) -> None:
        self._model = model
        self._real = real
        self._own = OwnNorms()

    def of_each(self, parameters: Sequence[Tensor], values: Sequence[Tensor], order: float) -> Tensor:
        """Collectives: one all-reduce over TP_GROUP, with sharded state over DP_GROUP."""
        norms = self._counted(parameters, values, order)
        axis: Axis = "dp" if self._model._gradients.sharded else "tp"
        if math.isinf(order):
            collectives.all_reduce(norms, axis, op="max")
            return norms
        squares = norms.square()
        collectives.all_reduce(squares, axis, op="sum")
        return squares.sqrt()

    def of_all(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Collectives: one all-reduce over MP_GROUP, with sharded state over the world."""
        total = self._counted(parameters, values, 2.0).square().sum()
        collectives.all_reduce(total, "world" if self._model._gradients.sharded else "mp", op="sum")
        return total.sqrt()

    def _counted(self, parameters: Sequence[Tensor], values: Sequence[Tensor], order: float) -> Tensor:
        """What this rank counts of each tensor; zero where another rank does."""
        shares = [counted_here(self._model, self._held(p, v)) for p, v in zip(parameters, values, strict=True)]
        norms = torch.zeros(len(shares), dtype=torch.float64, device=context.world().device)
        held = [i for i, share in enumerate(shares) if share is not None]
        if held:
            norms[held] = self._own.of_each((), [s for s in shares if s is not None], order).to(norms.device)
        return norms

    def _held(self, parameter: Tensor, value: Tensor) -> HeldGradient:
        real = self._real(parameter)
        piece = self._model._sharding.piece_behind(real)
        return HeldGradient(real if piece is None else piece.parameter, value, piece)
