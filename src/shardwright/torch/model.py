"""`smp.model`: the wrapper of the user's model, where frameworks look for its class."""

from __future__ import annotations

from shardwright.engine.model import DistributedModel

__all__ = ["DistributedModel"]
