"""One rank's failure is everyone's failure.

A rank that raises reports it to the rendezvous store; a watcher thread on every rank (`topology.watch`) reads
it, cuts this process's connections so that no wait outlives the job, and the reason is raised here as a
`RemoteRankError` that names the rank, the module and the microbatch. A rank that goes without a word is
noticed by its closing connections (`LostRankError`); one that stops answering by a bounded wait that runs out
(`CommunicationTimeout`), which says what the missing rank did last.

In order: `start` (by `context.init`); then any number of `raise_if_failed`, `waiting`, `answered` and
`wrap_comm_error` by transport, and `report` by whoever lets an exception out of the library; then `stop` (by
`context.shutdown`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

from shardwright.errors import CommunicationTimeout, LostRankError, RemoteRankError, ShardwrightError
from shardwright.log import get_logger
from shardwright.topology import diagnosis
from shardwright.topology.bulletin import Bulletin, Event, Sign, StoreGoneError
from shardwright.topology.sockets import ConnectionRecord
from shardwright.topology.watch import Watcher

_log = get_logger(__name__)

_NEWS_WAIT_S = 3.0
"""How long an error of a connection waits for the reason that explains it."""

_LINGER_S = 3.0
"""How long a rank that failed stays, so that a launcher doesn't stop its peers before they can say why."""


class FailureBoard:
    """What this process knows about failures of the job, and the place to tell of its own.

    rank, size: this process.   describe: a rank's coordinates in words.   timeout_s: bound of a wait;
    startup_timeout_s: the same until this process has once been answered.

    running_thread: the thread that runs the program, for one that hands its work from thread to thread; the
    main thread if None. It is the one that is interrupted.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        startup_timeout_s: float,
        describe: Callable[[int], str] = "world rank {}".format,
        connections: ConnectionRecord | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.startup_timeout_s = max(startup_timeout_s, timeout_s)
        self.describe = describe
        self.connections = connections or ConnectionRecord()
        self.on_break: list[Callable[[], None]] = []
        self.failure: Event | None = None
        self.noticed = False
        self.running_thread: int | None = None
        self._bulletin: Bulletin | None = None
        self._watcher: Watcher | None = None
        self._in_a_hurry = False
        self._answered = False
        self._bound_s: float | None = None
        self.num_steps = 0
        self._during = ""
        self._waiting: tuple[str, Sequence[int], float] | None = None
        self._last: tuple[str, float] = ("smp.init", time.monotonic())

    # -- life --------------------------------------------------------------------------------------------

    def start(self, bulletin: Bulletin, *, store_rank: int | None = None) -> None:
        """Begin to watch. store_rank: the rank whose process serves the bulletin's store, if one does."""
        if self.size == 1:
            return
        self._bulletin = bulletin
        self._watcher = Watcher(self, bulletin, store_rank)
        self._watcher.start()

    def stop(self, *, linger: bool = True) -> None:
        """Say farewell and end the watcher. A rank that failed first lets its peers read why."""
        if self._watcher is None:
            return
        watcher, self._watcher = self._watcher, None
        watcher.stop(
            farewell=self.failure is None, linger_s=_LINGER_S if linger and not self._in_a_hurry else 0.0
        )

    # -- waits of transport ------------------------------------------------------------------------------

    @property
    def patience(self) -> timedelta:
        """The bound of the next wait."""
        if self._bound_s is not None:
            return timedelta(seconds=self._bound_s)
        return timedelta(seconds=self.timeout_s if self._answered else self.startup_timeout_s)

    @contextmanager
    def bounded(self, timeout_s: float | None) -> Iterator[None]:
        """Inside, waits are bounded by `timeout_s` instead; None changes nothing."""
        before = self._bound_s
        self._bound_s = before if timeout_s is None else timeout_s
        try:
            yield
        finally:
            self._bound_s = before

    def waiting(self, doing: str, ranks: Sequence[int]) -> None:
        """Note that this process now waits for `ranks`; `answered` or `wrap_comm_error` ends that."""
        self._waiting = (doing, ranks, time.monotonic())

    def answered(self) -> None:
        """Note that the wait is over."""
        waiting = self._waiting
        if waiting is not None:
            self._last = (waiting[0], time.monotonic())
            self._waiting = None
        self._answered = True

    def did(self, doing: str) -> None:
        """Note something that this process has just done without waiting; shown if it goes missing."""
        self._last = (doing, time.monotonic())

    def sign(self, count: int, seen: int) -> Sign:
        """Return this process's sign of life; the watcher writes it."""
        waiting, last = self._waiting, self._last
        doing, ranks, since = waiting if waiting is not None else (last[0], (), last[1])
        return Sign(count, self._placed(doing), tuple(ranks), round(time.monotonic() - since, 1), seen)

    def step_begins(self, name: str) -> None:
        """Note that a step call begins: what is said of this rank from now on says which one."""
        self.num_steps += 1
        self._during = f"in step call {self.num_steps}, {name}()"

    def step_ends(self) -> None:
        """Note that the step call is over."""
        self._during = self._during.replace("in ", "after ", 1)

    def _placed(self, doing: str) -> str:
        return f"{doing} ({self._during})" if self._during else doing

    # -- errors ------------------------------------------------------------------------------------------

    def report(
        self, error: BaseException, *, module: str | None = None, microbatch: int | None = None
    ) -> None:
        """Tell all ranks that `error` ends this rank's part in the job; once, and never raises itself.

        An error that came from another rank, or that is reported already, isn't reported again.
        """
        self.noticed = True
        if self._bulletin is None or self.failure is not None or isinstance(error, RemoteRankError):
            return
        self._in_a_hurry = isinstance(error, KeyboardInterrupt)
        self._post(
            Event(
                kind="error",
                rank=self.rank,
                reporter=self.rank,
                reason=f"{type(error).__name__}: {error}",
                details="".join(traceback.format_exception(type(error), error, error.__traceback__)),
                module=module,
                microbatch=microbatch,
            )
        )

    def raise_if_failed(self) -> None:
        """Raise the failure of another rank, if there is one."""
        if self.failure is not None:
            raise self.error_of(self.failure)

    @property
    def failure_is_timeout(self) -> bool:
        """Is the failure, here or elsewhere, a wait that ran out of time?"""
        return self.failure is not None and self.failure.reason.startswith(CommunicationTimeout.__name__)

    def publish(self, topic: str, text: str) -> None:
        """Let other ranks read what may explain a failure."""
        if self._bulletin is not None:
            try:
                self._bulletin.publish(topic, self.rank, text)
            except StoreGoneError:
                pass  # nobody is left who could read it

    def published(self, topic: str, rank: int) -> str | None:
        """Return what a rank has published under a topic; None if it hasn't, or can't be asked."""
        try:
            return None if self._bulletin is None else self._bulletin.published(topic, rank)
        except StoreGoneError:
            return None

    def wrap_comm_error(
        self,
        error: BaseException,
        *,
        ranks: Sequence[int] = (),
        doing: str | None = None,
        where: str | None = None,
    ) -> BaseException:
        """Return what to raise instead of an error of the transport.

        error: what torch raised.   ranks: whom this process talked to.   doing: the call, in words; both are
        those of the last `waiting` if not given.   where: microbatch, module, whatever is known.
        Returns: RemoteRankError or LostRankError if the board knows what happened, within 3 s;
        CommunicationTimeout for a wait that ran out; `error` itself if it isn't one of communication.
        """
        waiting = self._waiting
        if waiting is not None:
            doing = doing or waiting[0]
            ranks = ranks or waiting[1]
        waited_s = time.monotonic() - waiting[2] if waiting is not None else self.timeout_s
        if isinstance(error, ShardwrightError) or not isinstance(error, RuntimeError):
            return error
        if self.failure is not None:
            return self.error_of(self.failure)
        others = tuple(rank for rank in ranks if rank != self.rank)
        timed_out = diagnosis.is_timeout(error)
        if not timed_out and not diagnosis.is_broken_connection(error):
            return error
        known = self._news(0.0 if timed_out else _NEWS_WAIT_S, others)
        if known is not None:
            return self.error_of(known)
        doing = doing or "a message"
        if timed_out:
            signs = self._signs(others)
            what = diagnosis.describe_timeout(self.rank, self._placed(doing), others, waited_s, signs)
            remedy = (
                "make sure that every rank makes the same calls in the same order; if the work really takes "
                f"longer, raise `timeout_s` (now {self.timeout_s:g})"
            )
            result: ShardwrightError = CommunicationTimeout(what, where=self._where(where), remedy=remedy)
            event = Event("error", self.rank, self.rank, f"CommunicationTimeout: {what}")
        else:
            what = diagnosis.describe_break(self.rank, self._placed(doing), others, self._left(), error)
            result = LostRankError(what, where=self._where(where), remedy=diagnosis.LOST_REMEDY)
            event = Event("error", self.rank, self.rank, f"LostRankError: {what}")
        self._post(event)
        self.noticed = True
        return result

    def raise_comm_error(
        self, error: RuntimeError, *, ranks: Sequence[int] = (), doing: str | None = None
    ) -> NoReturn:
        """Raise what `wrap_comm_error` makes of an error of the transport."""
        wrapped = self.wrap_comm_error(error, ranks=ranks, doing=doing)
        if wrapped is error:
            raise error
        raise wrapped from error

    def error_of(self, event: Event) -> ShardwrightError:
        """Return the exception that tells of another rank's failure."""
        self.noticed = True
        where = ", ".join(
            part
            for part in (
                None if event.rank is None else self.describe(event.rank),
                None if event.microbatch is None else f"microbatch {event.microbatch}",
                None if event.module is None else f"module '{event.module}'",
            )
            if part
        )
        if event.kind == "lost":
            return LostRankError(event.reason, where=where, remedy=diagnosis.LOST_REMEDY)
        what = f"rank {event.rank} failed: {event.reason}"
        if event.details and event.rank != self.rank:
            what += "\n" + "\n".join(f"  | {line}" for line in event.details.rstrip().splitlines())
        return RemoteRankError(what, where=where)

    def excepthook(self, error: BaseException, trace: TracebackType | None) -> None:
        """Handle an exception that ends the script: report it, or say which failure is behind it."""
        own = isinstance(error, ShardwrightError)
        if self.failure is not None and self.failure.rank != self.rank and not own:
            print(
                f"[rank {self.rank}] the reason is: {self.error_of(self.failure)}",
                file=sys.stderr,
                flush=True,
            )
        self.report(error)

    # -- for the watcher ---------------------------------------------------------------------------------

    def fail(self, event: Event) -> bool:
        """Take note of another rank's failure; True if it is the first one."""
        if self.failure is not None:
            return False
        self.failure = event
        return True

    # ----------------------------------------------------------------------------------------------------

    def _where(self, where: str | None) -> str:
        return self.describe(self.rank) + (f", {where}" if where else "")

    def _post(self, event: Event) -> None:
        """Tell the others, then cut the connections: who waits for this rank looks for the reason at once."""
        if self._bulletin is None:
            return
        self.failure = event
        try:
            number = self._bulletin.post(event)
        except Exception as error:
            _log.debug("could not tell the other ranks of the failure: %s", error)
        else:
            if self._watcher is not None:
                self._watcher.own_event = number
        self.connections.cut()

    def _news(self, wait_s: float, ranks: Sequence[int]) -> Event | None:
        """Return the failure that explains a broken connection, asking for news for a while."""
        if self.failure is None and self._watcher is not None:
            self._watcher.look_now(wait_s, ranks)
        return self.failure

    def _left(self) -> frozenset[int]:
        return frozenset() if self._watcher is None else frozenset(self._watcher.left)

    def _signs(self, ranks: Sequence[int]) -> dict[int, diagnosis.Heard]:
        return {} if self._bulletin is None else diagnosis.listen(self._bulletin, ranks)


_NOBODY = FailureBoard(0, 1, timeout_s=600.0, startup_timeout_s=1800.0)
_board = _NOBODY
_hook_lock = threading.Lock()
_previous_hook: Callable[..., object] | None = None


def board() -> FailureBoard:
    """Return the board of this process; before `init` and after `shutdown` one that knows nothing."""
    return _board


def install(new: FailureBoard | None) -> None:
    """Make a board the one of this process and let it hear of exceptions that end the script."""
    global _board, _previous_hook
    _board = new or _NOBODY
    with _hook_lock:
        if new is not None and _previous_hook is None:
            _previous_hook = sys.excepthook
            sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        _board.excepthook(error, trace)
    finally:
        (_previous_hook or sys.__excepthook__)(kind, error, trace)
