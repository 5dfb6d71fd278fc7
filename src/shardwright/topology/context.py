"""Where this process is: `init`, `shutdown`, and the record of this process's place in the world."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from shardwright import log
from shardwright.config.emulation import VARIABLE as EMULATION_VARIABLE
from shardwright.config.merge import merge_second_init
from shardwright.config.notes import log_notes
from shardwright.config.parse import Resolved, check_world, resolve
from shardwright.config.schema import Config
from shardwright.emulation import install as emulation
from shardwright.errors import NotInitializedError
from shardwright.topology import failure
from shardwright.topology.devices import DeviceChoice
from shardwright.topology.failure import FailureBoard
from shardwright.topology.groups import Groups, build_groups
from shardwright.topology.host_memory import share_one_arena
from shardwright.topology.quiet import wait_for_gloo
from shardwright.topology.ranks import Coordinates, Degrees, RankTable
from shardwright.topology.rendezvous import Rendezvous, meet

_log = log.get_logger(__name__)


@dataclass(frozen=True)
class World:
    """This process's place in the world, fixed from `init` to `shutdown`.

    devices: how device tensors travel.   board: what is known of failures.   job_id: equal on all ranks, new at each
    `init`.
    script_coordinates, script_local_rank: those of pipeline rank 0 of this rank's pp group, which the user's
    script takes itself for (see `script_view`).
    """

    config: Config
    table: RankTable
    rank: int
    size: int
    local_rank: int
    local_size: int
    devices: DeviceChoice
    coordinates: Coordinates
    groups: Groups
    board: FailureBoard
    script_coordinates: Coordinates
    script_local_rank: int
    job_id: str

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.devices.device

    def describe(self, rank: int | None = None) -> str:
        """Say where a rank stands, in the form that errors use."""
        return str(self.coordinates if rank is None else self.table.coordinates(rank))


@dataclass
class _State:
    """What one `init` has made."""

    world: World
    resolved: Resolved
    rendezvous: Rendezvous | None
    process_id: int


_state: _State | None = None
_atexit_registered = False


def init(config: Mapping[str, Any] | None = None) -> None:
    """Find this process's place in the world and build its groups.

    Called by: every rank, before anything else that needs ranks. A second call changes what can still be
    changed (`config.merge`) and never rebuilds groups that are in use.
    Collectives: the rendezvous, the meeting of each group, one all-gather.
    Raises: ConfigError for settings that can't work, on all ranks alike; CommunicationTimeout if ranks are
    missing.
    """
    if _state is not None:
        _init_again(config or {})
    else:
        _start(resolve(config, os.environ))


def is_initialized() -> bool:
    """Return whether `init` was called; true or false at any time."""
    return _state is not None


def world() -> World:
    """Return this process's place in the world.

    Raises: NotInitializedError before `init`.
    """
    if _state is None:
        raise NotInitializedError("smp.init() must be called before this", remedy="call smp.init({...}) once, at the top of the script")
    return _state.world


def shutdown(*, linger: bool = True) -> None:
    """Leave the world: say farewell, destroy the groups. Does nothing if there is none; `init` may follow.

    Called by: every rank, at the end (it is also called when the interpreter exits). Doesn't wait for the
    others, except a moment so that they read this rank's last words.
    """
    global _state
    if _state is None or _state.process_id != os.getpid():
        return
    state, _state = _state, None
    state.world.board.stop(linger=linger)
    failure.install(None)
    connections = state.world.board.connections
    if state.world.board.failure is not None:
        connections.cut()  # nothing of what is still under way may keep the groups from ending
    connections.close()
    state.world.groups.destroy()
    if state.rendezvous is not None:
        state.rendezvous.close()
        wait_for_gloo()


@contextmanager
def standing_in(world: World) -> Iterator[None]:
    """Inside, `world` is where this process is, though no other was met. Called by: `pretend`."""
    global _state
    before = _state
    _state = _State(world, Resolved(world.config, frozenset(), frozenset(), {}, ()), None, os.getpid())
    try:
        yield
    finally:
        _state = before


def _init_again(config: Mapping[str, Any]) -> None:
    global _state
    state = _state
    assert state is not None
    merged = merge_second_init(state.resolved, config, groups_used=state.world.groups.used)
    if merged.outcome == "reinitialise":
        shutdown()
        _start(merged.resolved)
    elif merged.outcome == "apply":
        new = merged.resolved.config
        state.resolved = merged.resolved
        state.world = replace(state.world, config=new)
        state.world.board.timeout_s = new.timeout_s
        log.configure(new.log_level, state.world.rank)
    log_notes(merged.resolved.notes)


def _start(resolved: Resolved) -> None:
    global _state, _atexit_registered
    config = resolved.config
    if config.pipeline_parallel_degree > 1:
        share_one_arena()
    found = meet(config, os.environ, check_world=lambda size: check_world(config, size))
    try:
        world = _build_world(config, found)
    except BaseException:
        found.close()
        raise
    log.configure(config.log_level, world.rank)
    failure.install(world.board)
    world.board.start(found.bulletin, store_rank=found.store_rank)
    _state = _State(world, resolved, found, os.getpid())
    if not _atexit_registered:
        _atexit_registered = True
        atexit.register(shutdown)
        os.register_at_fork(after_in_child=_leave_in_child)
    log_notes(resolved.notes)
    if emulation.active:
        log.once(_log, logging.INFO, "CUDA is emulated on the CPU: device arguments are read as cpu (%s)", EMULATION_VARIABLE)
    if emulation.unneeded:
        log.once(_log, logging.WARNING, "%s is ignored, for there are real CUDA devices", EMULATION_VARIABLE)
    log.once(
        _log,
        logging.INFO,
        "%d rank(s): pp %d, tp %d, rdp %d, placement %s, on %s by %s",
        world.size,
        world.table.degrees.pp,
        world.table.degrees.tp,
        world.table.degrees.rdp,
        world.table.letters,
        world.device.type,
        world.devices.backend,
    )


def _build_world(config: Config, found: Rendezvous) -> World:
    degrees = Degrees.of_world(
        found.size,
        pp=config.pipeline_parallel_degree,
        tp=config.tensor_parallel_degree,
        sdp=config.sharded_data_parallel_degree,
    )
    table = RankTable(degrees, config.placement_strategy)
    coordinates = table.coordinates(found.rank)
    timeout = timedelta(seconds=max(config.startup_timeout_s, config.timeout_s))
    with found.connections.recording():
        groups = build_groups(
            table,
            found.rank,
            found.world_group,
            timeout=timeout,
            backend=found.devices.backend,
            device_type=found.devices.device.type,
            num_channels=config.microbatches if found.devices.has_nccl and degrees.pp > 1 else 0,
        )
    script_rank = table.rank_at(pp=0, tp=coordinates.tp, rdp=coordinates.rdp)
    board = FailureBoard(
        found.rank,
        found.size,
        timeout_s=config.timeout_s,
        startup_timeout_s=config.startup_timeout_s,
        describe=lambda rank: str(table.coordinates(rank)),
        connections=found.connections,
    )
    if found.devices.has_nccl:
        board.on_break.append(lambda: _abort_device_groups(groups))
    return World(
        config=config,
        table=table,
        rank=found.rank,
        size=found.size,
        local_rank=found.local_ranks[found.rank],
        local_size=found.local_size,
        devices=found.devices,
        coordinates=coordinates,
        groups=groups,
        board=board,
        script_coordinates=table.coordinates(script_rank),
        script_local_rank=found.local_ranks[script_rank],
        job_id=found.job_id,
    )


def _abort_device_groups(groups: Groups) -> None:
    """End what is under way on NCCL; its waits then raise."""
    for group in groups.all():
        backend = group._get_backend(torch.device("cuda"))
        if hasattr(backend, "abort"):
            backend.abort()


def _leave_in_child() -> None:
    """In a forked child (a data loader's worker): ranks stay readable, the parent's connections don't."""
    failure.install(None)
    if _state is not None:
        _state.world.board.connections.abandon_in_child()


# -- the script's view (design rule 7) -------------------------------------------------------------------


class _View(threading.local):
    is_script = False


_view = _View()


class _Switch:
    """Context manager that sets the view of this thread and puts the former one back. May be nested."""

    __slots__ = ("_before", "_is_script")

    def __init__(self, is_script: bool) -> None:
        self._is_script = is_script
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(_view.is_script)
        _view.is_script = self._is_script

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _view.is_script = self._before.pop()


def script_view() -> _Switch:
    """While entered, this thread's rank functions answer for pipeline rank 0 of its pp group.

    Every rank of a pp group runs the same script code; `if smp.rank() == 0:` must not send them apart.
    """
    return _Switch(True)


def own_view() -> _Switch:
    """While entered, this thread's rank functions answer for this rank itself, as they do outside a step."""
    return _Switch(False)


def in_script_view() -> bool:
    """Return whether this thread sees itself as pipeline rank 0."""
    return _view.is_script


def apparent_coordinates() -> Coordinates:
    """Return the coordinates that the rank functions answer with in this thread."""
    here = world()
    return here.script_coordinates if _view.is_script else here.coordinates
