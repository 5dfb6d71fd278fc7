"""`smp.amp`: mixed precision with a decision to skip that all partitions share."""

from __future__ import annotations

import torch

from shardwright.torch import _not_built

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose found-inf flag is combined over the model parallel group."""

    __init__ = _not_built.constructor("amp.GradScaler")
