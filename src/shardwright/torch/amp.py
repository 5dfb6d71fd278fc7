"""`smp.amp`: mixed precision with a decision to skip that all partitions share."""

from __future__ import annotations

from shardwright.engine.grad_scaler import GradScaler

__all__ = ["GradScaler"]
