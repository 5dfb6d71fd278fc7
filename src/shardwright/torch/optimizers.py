"""`smp.optimizers`: the fused optimizers that the original shipped."""

from __future__ import annotations

from shardwright.optim.lamb import FusedLamb
from shardwright.optim.novograd import FusedNovoGrad

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]

FusedLAMB = FusedLamb
