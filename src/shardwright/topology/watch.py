"""The thread that keeps an eye on the other ranks, and breaks this process's waits when one of them fails."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shardwright.errors import ShardwrightError
from shardwright.log import get_logger
from shardwright.topology.bulletin import Bulletin, Event, StoreGoneError
from shardwright.topology.sockets import Route

if TYPE_CHECKING:
    from shardwright.topology.failure import FailureBoard

_log = get_logger(__name__)

POLL_S: Final = 0.5
_REST_S: Final = 0.02
"""Least time between two looks, however often somebody asks for one."""
_DEATH_GRACE_S: Final = 1.0
"""How long after its connections closed a rank's own report or farewell may still arrive."""
_INTERRUPT_AFTER_S: Final = 1.0
"""How long the program may take to notice by itself, by an error of the connection it waits on."""
_GIVE_UP_AFTER_S: Final = 10.0
"""How long after that the process is ended, if the program can't be interrupted."""
_EXIT_STATUS: Final = 70
_PREFETCH_RANKS: Final = 128
"""Up to this world size every rank's connections are read early, while the store surely lives."""


class Watcher:
    """Polls for failures and closed connections; writes this rank's signs of life.

    store_rank: the rank whose process serves the store, None if no rank's does. When it has left in good
    order there is no more news, and the watcher looks away: an end must not be taken for a failure.
    """

    def __init__(self, board: FailureBoard, bulletin: Bulletin, store_rank: int | None) -> None:
        self.left: set[int] = set()
        self.own_event: int | None = None
        self._board = board
        self._bulletin = bulletin
        self._store_rank = store_rank
        self._blind = False
        self._count = 0
        self._gone: dict[Route, float] = {}
        self._routes: dict[int, list[Route]] = {}
        self._store_lost_at: float | None = None
        self._broken_at: float | None = None
        self._interrupted = False
        self._stopping = False
        self._wake = threading.Event()
        self._polled = threading.Condition()
        self._num_polls = 0
        self._thread = threading.Thread(target=self._run, name="shardwright-watcher", daemon=True)

    def start(self) -> None:
        """Begin; called once, on every rank."""
        self._bulletin.post_routes(self._board.rank, self._board.connections.routes())
        self._poll()  # the first sign of life
        self._thread.start()

    def look_now(self, wait_s: float, ranks: Sequence[int]) -> None:
        """Return when a failure is known, one of `ranks` has left, or after two fresh looks and `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._polled:
            target = self._num_polls + 2
            while self._board.failure is None and self.left.isdisjoint(ranks) and self._thread.is_alive():
                if self._num_polls >= target and time.monotonic() >= deadline:
                    return
                self._wake.set()
                self._polled.wait(0.1)

    def stop(self, *, farewell: bool, linger_s: float) -> None:
        """End the thread. Leaves once the others have read this rank's last event, or `linger_s` is over.

        They must read it before the store goes, which this process may serve, and before a launcher that
        sees this process fail stops them.
        """
        if farewell and not self._blind:
            try:
                self.own_event = self._bulletin.post(Event("left", self._board.rank, self._board.rank))
            except StoreGoneError:
                self.own_event = None
        deadline = time.monotonic() + linger_s
        while self.own_event is not None and time.monotonic() < deadline and not self._all_have_seen():
            self._wake.set()
            time.sleep(0.05)
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=2.0)

    # ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(POLL_S)
            self._wake.clear()
            time.sleep(_REST_S)
            if not self._stopping:
                try:
                    self._poll()
                    self._escalate()
                except Exception:
                    _log.exception("the watcher of other ranks met an error of its own")
                with self._polled:
                    self._num_polls += 1
                    self._polled.notify_all()

    def _poll(self) -> None:
        if self._blind:
            return
        now = time.monotonic()
        hung_up = self._board.connections.hung_up()
        self._gone.update(dict.fromkeys(hung_up, now))
        if hung_up:
            time.sleep(_REST_S)  # if that process also served the store, its other connections close now
        try:
            self._exchange()
            self._blind = self._store_rank in self.left
        except StoreGoneError:
            if self._store_lost_at is None:
                self._store_lost_at = now
        if self._board.failure is None:
            self._look_for_the_dead(now)

    def _exchange(self) -> None:
        for event in self._bulletin.new_events():
            if event.kind == "left":
                self.left.add(event.reporter)
            elif event.reporter != self._board.rank and self._board.fail(event):
                self._break()
        self._count += 1
        self._bulletin.sign(self._board.rank, self._board.sign(self._count, self._bulletin.num_read))
        if self._board.size <= _PREFETCH_RANKS and self._count <= 2 * self._board.size:
            self._peer_routes(self._count % self._board.size)

    def _look_for_the_dead(self, now: float) -> None:
        late = [route for route, since in self._gone.items() if now - since >= _DEATH_GRACE_S]
        for route in late:
            del self._gone[route]
            rank = self._rank_behind(route)
            if rank is not None and rank not in self.left:
                self._declare_lost(rank, f"rank {rank} went away without a word: its connections closed")
                return
        if self._store_lost_at is not None and now - self._store_lost_at >= _DEATH_GRACE_S:
            who = "the launcher" if self._store_rank is None else f"rank {self._store_rank}"
            what = f"{who} went away without a word: the rendezvous store that it serves is gone"
            self._declare_lost(self._store_rank, what)

    def _declare_lost(self, rank: int | None, reason: str) -> None:
        event = Event("lost", rank, self._board.rank, reason)
        try:
            self._bulletin.post(event)
        except StoreGoneError:
            pass  # the others see the same
        if self._board.fail(event):
            self._break()

    def _rank_behind(self, route: Route) -> int | None:
        reverse = (route[1], route[0])
        for rank in range(self._board.size):
            if rank != self._board.rank and reverse in self._peer_routes(rank):
                return rank
        return None

    def _peer_routes(self, rank: int) -> list[Route]:
        routes = self._routes.get(rank)
        if not routes:
            try:
                routes = self._routes[rank] = self._bulletin.routes(rank)
            except StoreGoneError:
                pass
        return routes or []

    def _all_have_seen(self) -> bool:
        try:
            waits_for = set(range(self._board.size)) - {self._board.rank} - self.left
            signs = self._bulletin.signs(waits_for)
        except StoreGoneError:
            return True
        return all(signs[rank].seen >= (self.own_event or 0) for rank in waits_for if rank in signs)

    def _break(self) -> None:
        """End every wait of this process on a connection."""
        self._broken_at = time.monotonic()
        self._board.connections.cut()
        for action in self._board.on_break:
            try:
                action()
            except Exception:
                _log.debug("while breaking communication", exc_info=True)

    def _escalate(self) -> None:
        """If the program hasn't noticed the failure by itself: interrupt it, and at last end the process."""
        if self._broken_at is None or self._board.noticed or self._board.failure is None:
            return
        since_s = time.monotonic() - self._broken_at
        if since_s >= _INTERRUPT_AFTER_S and not self._interrupted:
            self._interrupted = True
            _raise_in_thread(self._board.running_thread, _prepared(self._board, self._board.failure))
        if since_s >= _INTERRUPT_AFTER_S + _GIVE_UP_AFTER_S:
            error = self._board.error_of(self._board.failure)
            print(
                f"[rank {self._board.rank}] ends here, for it can't be interrupted: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(_EXIT_STATUS)


def _prepared(board: FailureBoard, event: Event) -> type[ShardwrightError]:
    """Return a class whose instances are the error: CPython can raise only a class in another thread."""
    noticed = board.noticed
    kind = type(board.error_of(event))
    board.noticed = noticed  # the program will have noticed when the instance is made

    def build(self: ShardwrightError) -> None:
        error = board.error_of(event)
        kind.__init__(self, error.what, where=error.where, remedy=error.remedy)

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def _raise_in_thread(thread: int | None, kind: type[BaseException]) -> None:
    identity = thread or threading.main_thread().ident or 0
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(identity), ctypes.py_object(kind))
