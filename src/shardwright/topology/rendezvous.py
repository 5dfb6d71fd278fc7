"""How the ranks meet: the store, the default process group, and who runs on which host."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.config.schema import Config
from shardwright.errors import CommunicationTimeout
from shardwright.topology.bulletin import Bulletin
from shardwright.topology.devices import DeviceChoice, choose_device
from shardwright.topology.environment import ProcessEnvironment, detect
from shardwright.topology.groups import destroy_group
from shardwright.topology.sockets import ConnectionRecord

_served: dict[str, dist.Store] = {}
"""Stores by address, kept so that a second `init` in this process can use them again."""

_num_meetings = 0


@dataclass
class Rendezvous:
    """The ranks have met.

    local_ranks: of every rank.   world_group: all ranks.
    bulletin: for the failure board.   store_rank: the rank whose process serves its store, None if no rank's.
    """

    rank: int
    size: int
    local_ranks: tuple[int, ...]
    local_size: int
    devices: DeviceChoice
    bulletin: Bulletin
    store_rank: int | None
    world_group: dist.ProcessGroup
    connections: ConnectionRecord = field(default_factory=ConnectionRecord)

    def close(self) -> None:
        """Destroy the world's group; if it is torch's default one, all others with it."""
        destroy_group(self.world_group)


def meet(config: Config, environ: Mapping[str, str], *, check_world: Callable[[int], None]) -> Rendezvous:
    """Find the other ranks, by an existing default group or by what the launcher set.

    check_world: told the world size before anything is waited for.
    Raises: CommunicationTimeout if ranks don't come within `startup_timeout_s`.
    """
    global _num_meetings
    _num_meetings += 1
    timeout = timedelta(seconds=max(config.startup_timeout_s, config.timeout_s))
    if dist.is_initialized():
        return _adopt(config, environ, check_world, timeout)
    here = detect(environ, default_port=config.ddp_port)
    check_world(here.size)
    devices = _early_choice(here, config, environ)
    connections = ConnectionRecord()
    try:
        store = _store(here, timeout)
        with connections.recording():
            dist.init_process_group(
                devices.backend if devices is not None else _default_backend(config),
                store=dist.PrefixStore("groups", store),
                rank=here.rank,
                world_size=here.size,
                timeout=timeout,
            )
    except (RuntimeError, ValueError) as error:
        raise CommunicationTimeout(
            f"the {here.size} ranks did not meet at {here.init_method}: {error}",
            where=f"world rank {here.rank}, started by {here.source}",
            remedy=f"see that {here.size} processes are started and can reach that address; "
            f"`startup_timeout_s` is {config.startup_timeout_s:g}",
        ) from error
    group = dist.group.WORLD
    assert group is not None
    return _finish(here.rank, here.size, here, devices, config, environ, store, group, connections)


def _adopt(
    config: Config, environ: Mapping[str, str], check_world: Callable[[int], None], timeout: timedelta
) -> Rendezvous:
    """Use the default group that the script has made.

    Our own world group stands beside it, since its connections must be known.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    check_world(size)
    here = _launcher_words(environ, rank, size)
    connections = ConnectionRecord()
    with connections.recording():
        group = dist.new_group(list(range(size)), timeout=timeout, group_desc="shardwright_world")
    store = dist.PrefixStore(f"shardwright/{_num_meetings}", dist.distributed_c10d._get_default_store())
    return _finish(rank, size, here, None, config, environ, store, group, connections)


def _finish(
    rank: int,
    size: int,
    here: ProcessEnvironment,
    devices: DeviceChoice | None,
    config: Config,
    environ: Mapping[str, str],
    store: dist.Store,
    group: dist.ProcessGroup,
    connections: ConnectionRecord,
) -> Rendezvous:
    local_ranks, local_size = _exchange_local_ranks(rank, size, here, group)
    if devices is None:
        devices = choose_device(local_ranks[rank], local_size, environ, dist_backend=config.ddp_dist_backend)
    if devices.device.type == "cuda":
        torch.cuda.set_device(devices.device)
    bulletin, store_rank = open_bulletin(store, rank, environ)
    return Rendezvous(
        rank=rank,
        size=size,
        local_ranks=local_ranks,
        local_size=local_size,
        devices=devices,
        bulletin=bulletin,
        store_rank=store_rank,
        world_group=group,
        connections=connections,
    )


def _store(here: ProcessEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store of this meeting. Every `init` has a prefix of its own, equal on all ranks."""
    if here.init_method is None:
        return dist.HashStore()
    base = _served.get(here.init_method)
    if base is None:
        base, _, _ = next(dist.rendezvous(here.init_method, here.rank, here.size, timeout=timeout))
        _served[here.init_method] = base
    return dist.PrefixStore(f"shardwright/{_num_meetings}", base)


def open_bulletin(store: dist.Store, rank: int, environ: Mapping[str, str]) -> tuple[Bulletin, int | None]:
    """Return the bulletin on a store, and the rank whose process serves that store, if one does.

    It gets a connection of its own where torch can make one, so as not to wait behind others' blocking calls.
    """
    connection = ConnectionRecord()
    own = dist.PrefixStore("board", store)
    with connection.recording():
        try:
            own = own.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            pass
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        connection.close()
        return Bulletin(own), None
    by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = f":{base.port}"
    lost = [False]

    def is_gone() -> bool:
        lost[0] = lost[0] or any(peer.endswith(server) for _, peer in connection.hung_up())
        return lost[0]

    return Bulletin(own, is_gone), None if by_launcher else 0


def _early_choice(
    here: ProcessEnvironment, config: Config, environ: Mapping[str, str]
) -> DeviceChoice | None:
    if here.local_rank is None:
        return None  # known only after the ranks have met
    return choose_device(
        here.local_rank,
        here.local_size or here.local_rank + 1,
        environ,
        dist_backend=config.ddp_dist_backend,
    )


def _default_backend(config: Config) -> str:
    return choose_device(0, 1, {}, dist_backend=config.ddp_dist_backend).backend


def _launcher_words(environ: Mapping[str, str], rank: int, size: int) -> ProcessEnvironment:
    """Return what the launcher says, if it speaks of this rank and world."""
    try:
        here = detect(environ, default_port=1)
    except Exception:
        here = None
    if here is not None and (here.rank, here.size) == (rank, size):
        return here
    return ProcessEnvironment("an existing default group", rank, size, None, None, None)


def _exchange_local_ranks(
    rank: int, size: int, here: ProcessEnvironment, group: dist.ProcessGroup
) -> tuple[tuple[int, ...], int]:
    """Return every rank's local rank and this host's number of ranks.

    Where a launcher doesn't say, a rank's local rank is its position among the ranks of its host.
    """
    host = zlib.crc32(socket.gethostname().encode())
    mine = torch.tensor([host, -1 if here.local_rank is None else here.local_rank], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine, group=group)
    table = [(int(row[0]), int(row[1])) for row in rows]
    same_host = [other for other in range(size) if table[other][0] == host]
    if any(local < 0 for _, local in table):
        seen: dict[int, int] = {}
        local_ranks = []
        for other_host, _ in table:
            local_ranks.append(seen.setdefault(other_host, 0))
            seen[other_host] += 1
    else:
        local_ranks = [local for _, local in table]
    return tuple(local_ranks), here.local_size or len(same_host)
