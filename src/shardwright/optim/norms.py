"""Norms of whole parameters, for optimizers whose update depends on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Norms(Protocol):
    """How an optimizer gets norms when its process may hold only a part of a parameter, or of the model.

    An optimizer keeps one in its attribute `norms`; the engine puts another in its place where tensors are cut.
    Every process makes the same calls in the same order, also one that holds nothing.
    """

    def of_each(self, parameters: Sequence[Tensor], values: Sequence[Tensor], order: float) -> Tensor:
        """The norm of each whole tensor of which `values` holds the part that belongs to `parameters`.

        order: 2.0 or inf.   Returns: [len(parameters)] in fp64.
        """

    def of_all(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The 2-norm over all of the model's tensors together, as a number in fp64."""


class OwnNorms:
    """Norms in a process that holds everything. Sums run in fp64, so that they don't depend on how tensors are cut."""

    def of_each(self, parameters: Sequence[Tensor], values: Sequence[Tensor], order: float) -> Tensor:
        if not values:
            return torch.zeros(0, dtype=torch.float64)
        if math.isinf(order):
            return torch.stack([v.abs().amax() if v.numel() else v.new_zeros(()) for v in values]).double()
        return torch.stack(torch._foreach_norm(list(values), order, torch.float64))

    def of_all(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(self.of_each(parameters, values, 2.0))


def in_full(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same in at least fp32: half precision tensors are copied."""
    return [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]


def write_back(targets: Sequence[Tensor], computed: Sequence[Tensor]) -> None:
    """Round what was computed on the copies of `in_full` into the tensors they came from."""
    for target, value in zip(targets, computed, strict=True):
        if target is not value:
            target.copy_(value)
