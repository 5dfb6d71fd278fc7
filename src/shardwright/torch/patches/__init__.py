"""`smp.patches`: functions that stand in for functions of PyTorch."""

from __future__ import annotations

from shardwright.torch.patches import checkpoint

__all__ = ["checkpoint"]
