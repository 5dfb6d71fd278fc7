"""`smp.utils`: small helpers that scripts import."""

from __future__ import annotations

from shardwright.torch import _not_built

__all__ = ["get_distribution_axis", "rmsg"]

get_distribution_axis = _not_built.function("utils.get_distribution_axis")


def rmsg(message: str) -> str:
    """Return the message with this rank's place in front; before `smp.init` it comes back unchanged."""
    from shardwright.topology import context

    if not context.is_initialized():
        return message
    here = context.world().coordinates
    return f"[rank {here.rank} (pp {here.pp}, tp {here.tp}, rdp {here.rdp})] {message}"
