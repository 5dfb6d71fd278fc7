"""The rank functions of the public API: ranks, sizes, groups, and the names of groups and rank types.

Rank functions answer for pipeline rank 0 while the user's step runs (`context.script_view`); sizes, lists and
process groups are always this rank's own. All raise NotInitializedError before `smp.init()`.
"""

from __future__ import annotations

from enum import Enum

import torch.distributed as dist

from shardwright.topology import context
from shardwright.topology.ranks import Axis


class CommGroup(Enum):
    """The groups that the communication functions take."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"

    @property
    def axis(self) -> Axis:
        """The axis that the group lies on."""
        return self.value


class RankType(Enum):
    """Which group a rank given to `send` or `recv_from` counts in."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"

    @property
    def axis(self) -> Axis:
        """The axis that the rank counts on."""
        return self.value


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def rank() -> int:
    """Return the global rank."""
    return context.apparent_coordinates().rank


def size() -> int:
    """Return the number of processes."""
    return context.world().size


def local_rank() -> int:
    """Return the rank among the processes of one host."""
    here = context.world()
    return here.script_local_rank if context.in_script_view() else here.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return context.world().local_size


def mp_rank() -> int:
    """Return the rank among those that hold one model replica together."""
    return context.apparent_coordinates().mp


def dp_rank() -> int:
    """Return the rank among those that hold the same stage."""
    return context.apparent_coordinates().dp


def pp_rank() -> int:
    """Return the stage."""
    return context.apparent_coordinates().pp


def tp_rank() -> int:
    """Return the rank among those that hold slices of the same modules."""
    return context.apparent_coordinates().tp


def rdp_rank() -> int:
    """Return the rank among those that hold exactly the same parameters."""
    return context.apparent_coordinates().rdp


def mp_size() -> int:
    """Return the number of ranks of one model replica."""
    return context.world().table.size("mp")


def dp_size() -> int:
    """Return the number of ranks that hold the same stage."""
    return context.world().table.size("dp")


def pp_size() -> int:
    """Return the number of stages."""
    return context.world().table.size("pp")


def tp_size() -> int:
    """Return the tensor parallel degree."""
    return context.world().table.size("tp")


def rdp_size() -> int:
    """Return the number of ranks that hold exactly the same parameters."""
    return context.world().table.size("rdp")


def get_mp_group() -> list[int]:
    """Return the global ranks of this rank's model replica, ascending."""
    return list(context.world().groups.ranks("mp"))


def get_dp_group() -> list[int]:
    """Return the global ranks that hold the same stage as this one, ascending."""
    return list(context.world().groups.ranks("dp"))


def get_pp_group() -> list[int]:
    """Return the global ranks of this rank's pipeline, ascending."""
    return list(context.world().groups.ranks("pp"))


def get_tp_group() -> list[int]:
    """Return the global ranks of this rank's tensor parallel group, ascending."""
    return list(context.world().groups.ranks("tp"))


def get_rdp_group() -> list[int]:
    """Return the global ranks that hold exactly the same parameters, ascending."""
    return list(context.world().groups.ranks("rdp"))


def get_world_process_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    return context.world().groups.process_group("world")


def get_mp_process_group() -> dist.ProcessGroup:
    """Return the process group of this rank's model replica."""
    return context.world().groups.process_group("mp")


def get_dp_process_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that hold the same stage."""
    return context.world().groups.process_group("dp")


def get_pp_process_group() -> dist.ProcessGroup:
    """Return the process group of this rank's pipeline."""
    return context.world().groups.process_group("pp")


def get_tp_process_group() -> dist.ProcessGroup:
    """Return the process group of this rank's tensor parallel group."""
    return context.world().groups.process_group("tp")


def get_rdp_process_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that hold exactly the same parameters."""
    return context.world().groups.process_group("rdp")
