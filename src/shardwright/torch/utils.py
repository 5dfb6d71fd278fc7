"""`smp.utils`: small helpers that scripts import."""

from __future__ import annotations

from shardwright.engine.queries import get_distribution_axis

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(message: str) -> str:
    """Return the message with this rank's place in front; before `smp.init` it comes back unchanged."""
    from shardwright.topology import context

    if not context.is_initialized():
        return message
    here = context.world().coordinates
    return f"[rank {here.rank} (pp {here.pp}, tp {here.tp}, rdp {here.rdp})] {message}"
