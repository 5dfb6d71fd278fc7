"""`smp.patches.checkpoint`: recompute activations in backward, in the call form."""

from __future__ import annotations

from shardwright.engine.recomputation import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
