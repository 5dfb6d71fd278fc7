"""Decisions that all ranks share: one rank's failure is raised by every rank, one rank's choice is
everybody's.

Every function here is called by all ranks of the world, or of the axis that is given, in the same order, and issues one
collective.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from shardwright.checkpoint import storage
from shardwright.checkpoint.layout import Layout, Precision
from shardwright.checkpoint.storage.attempts import StorageError
from shardwright.errors import (
    CheckpointError,
    CommunicationTimeout,
    LostRankError,
    RemoteRankError,
    ShardwrightError,
)
from shardwright.log import get_logger
from shardwright.topology.context import world
from shardwright.topology.ranks import Axis
from shardwright.transport.objects import allgather_object

_log = get_logger(__name__)
_T = TypeVar("_T")
_COMMUNICATION = (CommunicationTimeout, LostRankError, RemoteRankError)

_REMEDIES = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints (num_kept_partial_checkpoints)",
    errno.EDQUOT: "free some of the quota, or keep fewer checkpoints (num_kept_partial_checkpoints)",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.EACCES: "choose a folder that this user can read and write",
    errno.EPERM: "choose a folder that this user can read and write",
    errno.ENOENT: "check the path on that rank's machine, and that this user may make folders there",
    errno.ENOTDIR: "a part of the path is a file; choose a folder",
}


@dataclass(frozen=True)
class _Call:
    """What a rank tells the others at the start: the call it makes, and its arguments as text."""

    name: str
    arguments: dict[str, str]


def present_layout() -> Layout:
    """Return the layout of the running job."""
    here = world()
    config, degrees = here.config, here.table.degrees
    precision: Precision = "fp16" if config.fp16 else "bf16" if config.bf16 else "fp32"
    return Layout(
        pp=degrees.pp,
        tp=degrees.tp,
        rdp=degrees.rdp,
        placement=config.placement_strategy,
        shard_optimizer_state=config.shard_optimizer_state,
        sharded_data_parallel_degree=config.sharded_data_parallel_degree,
        precision=precision,
    )


def absolute(path: object) -> str:
    """Return the absolute path or URL as text, or a description of what isn't one."""
    if isinstance(path, storage.RemotePath):
        return str(path)
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str):
            return storage.absolute(text)
    return f"<{type(path).__name__}>"


def agree(call: str, values: Mapping[str, object]) -> None:
    """Make sure that all ranks made this call with the same arguments.

    Raises: CheckpointError on every rank that shows each differing value and the ranks that have it.
    """
    told = _exchange(call, _Call(call, {name: repr(value) for name, value in values.items()}))
    calls = _by_value([other.name if isinstance(other, _Call) else "another call" for other in told])
    if len(calls) > 1:
        raise CheckpointError(
            f"ranks made different calls: {_shown(calls)}",
            remedy="saving and resuming are collective: every rank makes the same call at the same point",
        )
    differing = []
    for name in values:
        seen = _by_value([other.arguments[name] for other in told])
        if len(seen) > 1:
            differing.append(f"{name}: {_shown(seen)}")
    if differing:
        raise CheckpointError(
            f"{call} was called with different arguments; {'; '.join(differing)}",
            remedy="compute names from values that are equal on all ranks (no clock, no rank)",
        )


def collect(call: str, work: Callable[[], _T], axis: Axis = "world") -> list[_T]:
    """Run the work on every rank; return the results of all ranks of the axis, in rank order. They must be picklable.

    Raises: on every rank, the error of the lowest rank on which the work failed.
    """
    value: _T | None = None
    error: Exception | None = None
    try:
        value = work()
    except _COMMUNICATION:
        raise
    except Exception as caught:
        error = caught
    told = _exchange(call, (value, _for_all_ranks(call, error)), axis)
    failures = [failure for _, failure in told if failure is not None]
    if failures:
        # One of ours would only say the same again.
        raise failures[0] from (None if isinstance(error, ShardwrightError) else error)
    return [result for result, _ in told]


def run_everywhere(call: str, work: Callable[[], _T], axis: Axis = "world") -> _T:
    """Run the work on every rank; return this rank's own result once all have succeeded.

    Raises: on every rank, the error of the lowest rank on which the work failed.
    """
    results: list[_T] = []
    collect(call, lambda: results.append(work()), axis)
    return results[0]


def run_on_rank_zero(call: str, work: Callable[[], _T]) -> _T:
    """Run the work on world rank 0 alone; every rank gets its result, or raises its error."""

    def on_rank_zero() -> _T | None:
        return work() if world().rank == 0 else None

    return cast(_T, collect(call, on_rank_zero)[0])


def _exchange(call: str, value: Any, axis: Axis = "world") -> list[Any]:
    """Return the values of all ranks; a rank that doesn't come is an error that names the call."""
    try:
        return allgather_object(value, axis)
    except _COMMUNICATION as error:
        who = "every rank of the world" if axis == "world" else f"every rank of the {axis.upper()}_GROUP"
        what = f"{call} ({who} must call it): {error.what}"
        raise type(error)(what, where=error.where, remedy=error.remedy) from error


def _for_all_ranks(call: str, error: Exception | None) -> ShardwrightError | None:
    """Turn an exception into one of ours that can travel, says where it happened, and keeps its kind."""
    if error is None:
        return None
    here = f"world rank {world().rank}"
    if isinstance(error, ShardwrightError):
        where = f"{here}, {error.where}" if error.where else here
        return type(error)(f"{call}: {error.what}", where=where, remedy=error.remedy)
    if isinstance(error, OSError):
        remedy = error.remedy if isinstance(error, StorageError) else _REMEDIES.get(error.errno or 0)
        return CheckpointError(f"{call}: {type(error).__name__}: {error}", where=here, remedy=remedy)
    _log.error("%s failed here:\n%s", call, "".join(traceback.format_exception(error)))
    return CheckpointError(f"{call}: {type(error).__name__}: {error}", where=here)


def _by_value(values: list[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _shown(ranks_of: Mapping[str, list[int]], limit: int = 8) -> str:
    shown = [
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:limit]))}"
        f"{', ...' if len(ranks) > limit else ''}"
        for value, ranks in list(ranks_of.items())[:limit]
    ]
    return " | ".join(shown) + (" | ..." if len(ranks_of) > limit else "")
