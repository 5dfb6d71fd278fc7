"""Equal parameters and buffers on the ranks that hold the same ones.

What is not cut over tp ranks is equal on the whole DP_GROUP; slices, and buffers of distributed modules, which may belong
to slices, are equal on the RDP_GROUP. Shards are no copies of anything, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwright.data_parallel import sync
from shardwright.data_parallel.shards import is_shard
from shardwright.engine.part import Part
from shardwright.topology import context


class Replicas:
    """Bringing the copies of one rank's part of the model together."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def broadcast(self, source: int = 0) -> None:
        """Give all replicas the parameters and buffers of one.

        Called by: every rank of the DP_GROUP. Collectives: see `sync.broadcast_parameters`; over each of the two
        groups.   source: rank within the group; not 0 only without tensor parallelism.
        """
        parameters = [(n, p) for n, p in self._part.parameters() if not is_shard(p)]
        whole, own = self._buffers()
        self._broadcast(parameters, whole, own, source)

    def broadcast_parameters(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """The same for some parameters only."""
        self._broadcast(named, [], [], 0)

    def _broadcast(
        self, parameters: Sequence[sync.Named], whole: Sequence[sync.Named], own: Sequence[sync.Named], source: int
    ) -> None:
        """whole, own: buffers, see `_buffers`."""
        cut = self._part.distribution
        sync.broadcast_parameters([*((n, p) for n, p in parameters if n not in cut.specs), *whole], "dp", source=source)
        if context.world().table.degrees.tp > 1:
            sync.broadcast_parameters([*((n, p) for n, p in parameters if n in cut.specs), *own], "rdp", source=source)

    def sync_buffers(self, source: int) -> None:
        """Give all replicas the buffers of one; without checks."""
        whole, own = self._buffers()
        sync.sync_buffers(whole, "dp", source=source)
        if own:
            sync.sync_buffers(own, "rdp", source=source)

    def _buffers(self) -> tuple[list[sync.Named], list[sync.Named]]:
        """Buffers that are equal on the DP_GROUP, and those that are equal on the RDP_GROUP only."""
        if context.world().table.degrees.tp == 1:
            return list(self._part.buffers()), []
        whole: list[sync.Named] = []
        own: list[sync.Named] = []
        for name, buffer, home in self._part.buffers_with_homes():
            (own if self._part.distribution.is_inside(home) else whole).append((name, buffer))
        return whole, own
