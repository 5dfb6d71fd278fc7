"""Writing a checkpoint while training goes on: values are copied aside, and a thread of each rank does the rest.

Threads don't take part in collectives, whose order belongs to the training. Ranks tell each other through the
checkpoint's own temporary folder: each puts a note there when its files are on the disk, or that they can't be; rank 0
waits for all notes and then publishes, as a save that blocks does. What fails is raised by the next save, resume or
`finish`, on all ranks.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from shardwright.checkpoint import layout, storage
from shardwright.checkpoint.collective import run_everywhere
from shardwright.checkpoint.storage import Place
from shardwright.checkpoint.storage.attempts import StorageError
from shardwright.checkpoint.torch_stream import Joined
from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.log import get_logger
from shardwright.topology.context import World

_log = get_logger(__name__)
_POLL_S = 0.02


class Staging:
    """Copies of values in host memory, whose buffers serve again in the next save: fresh memory is slow to touch."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(self, value: Any, key: tuple[Any, ...] = ()) -> Any:
        """A copy of all tensors in nested containers; the next copy under the same keys overwrites it.

        Tensors that are one object stay one.
        """
        return self._copied(value, key, {})

    def _copied(self, value: Any, key: tuple[Any, ...], seen: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen[id(value)] = self._tensor(value, key)
            return seen[id(value)]
        if isinstance(value, Joined):
            return replace(value, parts=self._copied(list(value.parts), key, seen))
        if isinstance(value, dict):
            items = [(name, self._copied(item, (*key, name), seen)) for name, item in value.items()]
            return type(value)(items) if type(value) is not dict else dict(items)
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, (*key, number), seen) for number, item in enumerate(value))
        return value

    def _tensor(self, value: torch.Tensor, key: tuple[Any, ...]) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.layout) != (value.shape, value.dtype, value.layout):
            buffer = torch.empty_like(value, requires_grad=False, device="cpu", pin_memory=value.is_cuda)
            self._buffers[key] = buffer
        with torch.no_grad():
            return buffer.copy_(value)


class _Pending:
    """One save that is being written by this rank's thread."""

    def __init__(self, call: str, work: Callable[[], object]) -> None:
        self.call = call
        self._work = work
        self._failure: Exception | None = None
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name="shardwright-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._failure = error
            _log.error("%s in the background failed: %s", self.call, error)

    def join(self) -> None:
        self._thread.join()

    def result(self) -> None:
        self.join()
        if self._failure is not None:
            raise self._failure


staging = Staging()
_pending: _Pending | None = None
_preparing: threading.Thread | None = None


def prepare(contents: Mapping[str, Any]) -> None:
    """Copy values that are of no interest, on a thread, so that the memory for copies of such values is ready.

    contents: as `staging` will be given them, by their first keys; may change meanwhile.
    """
    global _preparing
    _end_preparing()

    def work() -> None:
        try:
            for name, content in contents.items():
                staging.copy(content, (name,))
        except Exception as error:
            _log.warning("no memory could be made ready for saving in the background: %s", error)

    _preparing = threading.Thread(target=work, name="shardwright-prepare")
    _preparing.start()


def _end_preparing() -> None:
    global _preparing
    if _preparing is not None:
        _preparing.join()
        _preparing = None


def start(call: str, work: Callable[[], object]) -> None:
    """Run this rank's part of a save. Called by: every rank, when nothing is pending."""
    global _pending
    _wait_at_exit()
    _pending = _Pending(call, work)


@functools.cache
def _wait_at_exit() -> None:
    """At the interpreter's end, wait before thread pools are closed: clients of object stores need them."""
    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(lambda: None if _pending is None else _pending.join())


def finish() -> None:
    """Wait for the save that is still being written, if there is one.

    Called by: every rank. Collectives: one small one over the world if a save was pending.
    Raises: what it failed with, on every rank; only once.
    """
    global _pending
    _end_preparing()
    pending, _pending = _pending, None
    if pending is not None:
        run_everywhere(f"{pending.call} in the background", pending.result)


# ------------------------------------------------------------------ notes


def tell(folder: Place, rank: int, told: object) -> None:
    """Leave this rank's note for rank 0: what it has written, or the error that kept it from that."""
    note = _note(folder, rank)
    half = note.with_name(f"{note.name}.half")
    storage.of(folder).put(half, pickle.dumps(told))
    storage.of(folder).move(half, note)


def tell_failure(folder: Place, rank: int, error: Exception) -> None:
    """Leave the note that this rank has failed. Never raises: where there is no room for a note there may be for an empty one."""
    where = f"world rank {rank}"
    remedy = error.remedy if isinstance(error, (ShardwrightError, StorageError)) else None
    try:
        tell(folder, rank, CheckpointError(f"{type(error).__name__}: {error}", where=where, remedy=remedy))
    except Exception as second:
        _log.error("%s can't even tell rank 0 that it failed: %s", where, second)
        with suppress(Exception):
            storage.of(folder).create(_note(folder, rank)).finish()


def gather(folder: Place, here: World) -> list[Any]:
    """Rank 0: wait for the notes of all ranks, and take them away.

    Raises: the error that a rank has noted; CheckpointError if a rank is lost or doesn't come within `timeout_s`.
    """
    end = time.monotonic() + here.config.timeout_s
    told = []
    for rank in range(here.size):
        note = _note(folder, rank)
        while not note.exists():
            failure = here.board.failure
            if failure is not None or time.monotonic() > end:
                reason = "the job has failed" if failure is not None else f"waited {here.config.timeout_s:g} s"
                raise CheckpointError(f"rank {rank} has not written its part: {reason}")
            time.sleep(_POLL_S)
        content = note.read_bytes()
        if not content:
            raise CheckpointError(f"rank {rank} can't write its part, nor why", remedy="see its log; is the disk full?")
        told.append(pickle.loads(content))
        note.unlink()
        if isinstance(told[-1], ShardwrightError):
            raise told[-1]
    return told


def _note(folder: Place, rank: int) -> Place:
    return folder / f"{layout.WORK_PREFIX}written-{rank}"
