"""How the ranks meet: the store, the default process group, and who runs on which host."""

from __future__ import annotations

import secrets
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardwright.config.schema import Config
from shardwright.errors import CommunicationTimeout, ConfigError
from shardwright.topology.bulletin import Bulletin
from shardwright.topology.devices import DeviceChoice, choose_backend, choose_device
from shardwright.topology.environment import ProcessEnvironment, detect
from shardwright.topology.groups import destroy_group
from shardwright.topology.sockets import ConnectionRecord
from shardwright.topology.stores import OpenStore, default_store, open_bulletin, open_store


@dataclass(frozen=True)
class Rendezvous:
    """The ranks have met.

    local_ranks: of every rank.   world_group: all ranks; connections: those of the groups.
    bulletin: for the failure board.   store_rank: the rank whose process serves its store, None if no rank's.
    job_id: a random text, equal on all ranks, another one at each meeting.
    """

    rank: int
    size: int
    local_ranks: tuple[int, ...]
    local_size: int
    devices: DeviceChoice
    world_group: dist.ProcessGroup
    connections: ConnectionRecord
    bulletin: Bulletin
    bulletin_connection: ConnectionRecord
    store_rank: int | None
    job_id: str

    def close(self) -> None:
        """Destroy the world's group; if it is torch's default one, all others with it."""
        self.bulletin_connection.close()
        destroy_group(self.world_group)


def meet(config: Config, environ: Mapping[str, str], *, check_world: Callable[[int], None]) -> Rendezvous:
    """Find the other ranks, by an existing default group or by what the launcher set.

    check_world: told the world size before anything is waited for.
    Raises: CommunicationTimeout if ranks don't come within `startup_timeout_s`.
    """
    timeout = timedelta(seconds=max(config.startup_timeout_s, config.timeout_s))
    adopted = dist.is_initialized()
    if adopted:
        here = _launcher_words(environ, dist.get_rank(), dist.get_world_size())
    else:
        here = detect(environ, default_port=config.ddp_port)
    check_world(here.size)
    devices = None
    if here.local_rank is not None and here.local_size is not None:
        # as early as can be, so that every rank of a host with too few devices says so and none waits
        devices = choose_device(
            here.local_rank, here.local_size, environ, dist_backend=config.ddp_dist_backend
        )
    backend = devices.backend if devices else choose_backend(environ, dist_backend=config.ddp_dist_backend)
    try:
        if adopted:
            opened, group, connections = _beside_default_group(here, backend, timeout, environ)
        else:
            opened, group, connections = _make_default_group(here, backend, timeout, environ)
    except (RuntimeError, ValueError) as error:
        raise CommunicationTimeout(
            f"the {here.size} ranks did not meet at {here.init_method}: {error}",
            where=f"world rank {here.rank}, started by {here.source}",
            remedy=f"see that {here.size} processes are started and can reach that address; "
            f"`startup_timeout_s` is {config.startup_timeout_s:g}",
        ) from error
    local_ranks, local_size, job_id = _exchange_places(here, group)
    if devices is None:
        devices = choose_device(
            local_ranks[here.rank], local_size, environ, dist_backend=config.ddp_dist_backend
        )
    if devices.device.type == "cuda":
        torch.cuda.set_device(devices.device)
    bulletin, bulletin_connection = open_bulletin(opened)
    return Rendezvous(
        rank=here.rank,
        size=here.size,
        local_ranks=local_ranks,
        local_size=local_size,
        devices=devices,
        world_group=group,
        connections=connections,
        bulletin=bulletin,
        bulletin_connection=bulletin_connection,
        store_rank=opened.served_by,
        job_id=job_id,
    )


_Met = tuple[OpenStore, dist.ProcessGroup, ConnectionRecord]


def _make_default_group(
    here: ProcessEnvironment, backend: str, timeout: timedelta, environ: Mapping[str, str]
) -> _Met:
    opened = open_store(here.init_method, here.rank, here.size, timeout, environ)
    connections = ConnectionRecord(ignored_port=opened.port)
    with connections.recording():
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", opened.store),
            rank=here.rank,
            world_size=here.size,
            timeout=timeout,
        )
    group = dist.group.WORLD
    assert group is not None
    return opened, group, connections


def _beside_default_group(
    here: ProcessEnvironment, backend: str, timeout: timedelta, environ: Mapping[str, str]
) -> _Met:
    """Make a world group of our own beside the default group of the script: its connections must be known."""
    opened = default_store(environ)
    connections = ConnectionRecord(ignored_port=opened.port)
    with connections.recording():
        group = dist.new_group(
            list(range(here.size)), timeout=timeout, backend=backend, group_desc="shardwright_world"
        )
    return opened, group, connections


def _launcher_words(environ: Mapping[str, str], rank: int, size: int) -> ProcessEnvironment:
    """Return what the launcher says, if it speaks of this rank and world."""
    try:
        here = detect(environ, default_port=1)
        if (here.rank, here.size) == (rank, size):
            return replace(here, init_method="the existing default group")
    except ConfigError:
        pass  # variables of no use here; the ranks are known
    return ProcessEnvironment("the script itself", rank, size, None, None, "the existing default group")


def _exchange_places(here: ProcessEnvironment, group: dist.ProcessGroup) -> tuple[tuple[int, ...], int, str]:
    """Return every rank's local rank, this host's number of ranks, and the name that rank 0 drew for the meeting.

    Where a launcher doesn't say, a rank's local rank is its position among the ranks of its host.
    """
    host = zlib.crc32(socket.gethostname().encode())
    local = -1 if here.local_rank is None else here.local_rank
    mine = torch.tensor([host, local, secrets.randbits(63)], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(here.size)]
    dist.all_gather(rows, mine, group=group)
    table = [(int(row[0]), int(row[1])) for row in rows]
    same_host = [other for other in range(here.size) if table[other][0] == host]
    if any(local < 0 for _, local in table):
        seen: dict[int, int] = {}
        local_ranks = []
        for other_host, _ in table:
            local_ranks.append(seen.setdefault(other_host, 0))
            seen[other_host] += 1
    else:
        local_ranks = [local for _, local in table]
    return tuple(local_ranks), here.local_size or len(same_host), f"{int(rows[0][2]):016x}"
