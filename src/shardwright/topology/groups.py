"""One process group per axis, and the DeviceMesh over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.topology.ranks import AXES, Axis, RankTable

MESH_AXES: tuple[Axis, ...] = ("rdp", "pp", "tp")


class Groups:
    """This rank's group on every axis. Axes with the same members share one process group.

    used: whether a group was handed out, so that the ranks can't be laid out anew any more.
    """

    def __init__(
        self,
        table: RankTable,
        rank: int,
        process_groups: Mapping[Axis, dist.ProcessGroup],
        channels: Sequence[dist.ProcessGroup],
        device_type: str,
    ) -> None:
        self._table = table
        self._ranks: dict[Axis, tuple[int, ...]] = {axis: tuple(table.group(axis, rank)) for axis in AXES}
        self._process_groups = dict(process_groups)
        self._channels = tuple(channels)
        self._device_type = device_type
        self._num_calls: dict[Axis, int] = dict.fromkeys(AXES, 0)
        self.used = False

    def ranks(self, axis: Axis) -> tuple[int, ...]:
        """Return the ascending global ranks of this rank's group."""
        return self._ranks[axis]

    def process_group(self, axis: Axis) -> dist.ProcessGroup:
        """Return this rank's process group on an axis."""
        self.used = True
        return self._process_groups[axis]

    def count_call(self, axis: Axis) -> int:
        """Count a collective on an axis; equal on all members as long as they make the same calls."""
        self._num_calls[axis] += 1
        return self._num_calls[axis]

    def channel_group(self, channel: int) -> dist.ProcessGroup:
        """Return the communicator of this rank's pipeline that NCCL uses for a channel.

        There is one for each of the configured `microbatches`; further channels take turns.
        """
        self.used = True
        return self._channels[channel % len(self._channels)]

    def all(self) -> list[dist.ProcessGroup]:
        """Return each distinct process group once."""
        groups = [*self._channels, *self._process_groups.values()]
        return list({id(group): group for group in groups}.values())

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The (rdp, pp, tp) mesh over the same process groups; making it needs no communication."""
        self.used = True
        degrees = self._table.degrees
        layout = [
            [
                [self._table.rank_at(pp=pp, tp=tp, rdp=rdp) for tp in range(degrees.tp)]
                for pp in range(degrees.pp)
            ]
            for rdp in range(degrees.rdp)
        ]
        return DeviceMesh.from_group(
            [self._process_groups[axis] for axis in MESH_AXES],
            self._device_type,
            mesh=torch.tensor(layout, dtype=torch.int),
            mesh_dim_names=MESH_AXES,
        )

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of the ranks that share one copy of the parameters; no communication.

        There is one only with sharded data parallelism.
        """
        return DeviceMesh.from_group(self.process_group("shard"), self._device_type, mesh_dim_names=("shard",))

    def destroy(self) -> None:
        """Destroy what `build_groups` made, not the group of the world."""
        world = self._process_groups["world"]
        for group in self.all():
            if group is not world:
                destroy_group(group)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless the script has destroyed all of them already."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def build_groups(
    table: RankTable,
    rank: int,
    world: dist.ProcessGroup,
    *,
    timeout: timedelta,
    backend: str,
    device_type: str,
    num_channels: int = 0,
) -> Groups:
    """Create the group of every axis, and `num_channels` more over the pipeline for messages by NCCL.

    Called by: every rank, which creates its own group of each axis, axis by axis in one order; the members of
    a group meet in the store, no one else waits.
    Collectives: none beside the meeting.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(table.world_size)): world}
    process_groups: dict[Axis, dist.ProcessGroup] = {}
    for axis in AXES:
        if axis == "shard" and table.degrees.sdp == 1:
            continue
        ranks = tuple(table.group(axis, rank))
        if ranks not in made:
            made[ranks] = dist.new_group(
                list(ranks),
                timeout=timeout,
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"shardwright_{axis}",
            )
        process_groups[axis] = made[ranks]
    # NCCL connects two ranks when they first exchange something; until then such a group is only a name.
    channels = [
        dist.new_group(
            table.group("pp", rank),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"shardwright_channel_{channel}",
        )
        for channel in range(num_channels)
    ]
    return Groups(table, rank, process_groups, channels, device_type)
