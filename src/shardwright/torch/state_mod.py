"""Where scripts of the original find the library's state: `from ...torch.state_mod import state`."""

from __future__ import annotations

from shardwright.engine.state import state

__all__ = ["state"]
