"""Norms of whole parameters and of the whole model, for optimizers whose update depends on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.engine.distribution import Distribution
from shardwright.optim.norms import OwnNorms
from shardwright.topology import context
from shardwright.transport import collectives


class ModelNorms:
    """`optim.norms.Norms` for a model that is cut over tp ranks and stages.

    Called by: the optimizer's step, on every rank of an MP_GROUP.
    real: the model's parameter that a tensor of the optimizer's groups stands for.
    Of tensors that several tp ranks hold one of them counts (`Distribution.counted_here`), so that every rank of a tp
    group gets the same numbers, also for parameters that are not cut.
    """

    def __init__(self, distribution: Distribution, real: Callable[[Tensor], Tensor]) -> None:
        self._distribution = distribution
        self._real = real
        self._own = OwnNorms()

    def of_each(self, parameters: Sequence[Tensor], values: Sequence[Tensor], order: float) -> Tensor:
        """Collectives: one all-reduce over TP_GROUP."""
        norms = self._counted(parameters, values, order)
        if math.isinf(order):
            collectives.all_reduce(norms, "tp", op="max")
            return norms
        squares = norms.square()
        collectives.all_reduce(squares, "tp", op="sum")
        return squares.sqrt()

    def of_all(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Collectives: one all-reduce over MP_GROUP."""
        total = self._counted(parameters, values, 2.0).square().sum()
        collectives.all_reduce(total, "mp", op="sum")
        return total.sqrt()

    def _counted(self, parameters: Sequence[Tensor], values: Sequence[Tensor], order: float) -> Tensor:
        """What this rank counts of each tensor; zero where another rank does."""
        shares = [self._distribution.counted_here(self._real(p), v) for p, v in zip(parameters, values, strict=True)]
        norms = torch.zeros(len(shares), dtype=torch.float64, device=context.world().device)
        held = [i for i, share in enumerate(shares) if share is not None]
        if held:
            norms[held] = self._own.of_each((), [s for s in shares if s is not None], order).to(norms.device)
        return norms
