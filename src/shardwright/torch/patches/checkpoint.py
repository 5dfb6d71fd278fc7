"""`smp.patches.checkpoint`: recompute activations in backward, in the call form."""

from __future__ import annotations

from shardwright.torch import _not_built

__all__ = ["checkpoint", "checkpoint_sequential"]

checkpoint = _not_built.function("patches.checkpoint.checkpoint")
checkpoint_sequential = _not_built.function("patches.checkpoint.checkpoint_sequential")
