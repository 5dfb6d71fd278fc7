"""`smp.optimizers`: the fused optimizers that the original shipped."""

from __future__ import annotations

import torch

from shardwright.torch import _not_built

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]


class FusedLamb(torch.optim.Optimizer):
    """LAMB: Adam with a trust ratio for each parameter."""

    __init__ = _not_built.constructor("optimizers.FusedLamb")


class FusedNovoGrad(torch.optim.Optimizer):
    """NovoGrad: momentum with a second moment for each parameter tensor."""

    __init__ = _not_built.constructor("optimizers.FusedNovoGrad")


FusedLAMB = FusedLamb
