"""Microbatches as threads with one baton.

Each microbatch of a step runs on a thread of its own, so that what torch keeps per thread (grad mode,
autocast, hooks, modes, streams) can't leak from one to another. Only the thread with the baton runs. A
microbatch that must wait for a value is always set aside, whether or not the message has come, and
`schedule.Order` names the next one; the thread that waits hands the baton over itself.

When a microbatch fails, or the main thread is interrupted, the others are unwound one after the other.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any

from shardwright.pipeline.frame import Frame
from shardwright.pipeline.schedule import Order
from shardwright.pipeline.shared import SharedUses
from shardwright.pipeline.streams import Streams
from shardwright.pipeline.thread_state import ThreadState
from shardwright.topology import context

# The main thread looks up from its wait this often, so that a failure elsewhere can interrupt it.
_GLANCE_S = 0.5


class _Cancelled(BaseException):
    """Unwinds a microbatch of a step that has failed."""


class Executor:
    """Runs the microbatches of one step on this rank. Used once.

    body(frame): runs a microbatch to its end on the calling thread.
    order: who runs next on this rank.   gated: no backward before all forwards ("simple").
    frames: of the microbatches begun so far.   turns: the microbatches in the order in which they got the
    baton.
    """

    def __init__(
        self,
        body: Callable[[Frame], Any],
        make_frame: Callable[[int, Executor], Frame],
        order: Order,
        num_microbatches: int,
        *,
        gated: bool,
    ) -> None:
        self._body = body
        self._make_frame = make_frame
        self._order = order
        self._num_microbatches = num_microbatches
        self._gated = gated
        self._caller = Streams()
        self._state = ThreadState()
        # The lock guards what follows: the baton's holder changes it, and the main thread to stop the step.
        self._lock = threading.Lock()
        self._seats: dict[int, threading.Semaphore] = {}
        self._running: int | None = None  # the thread with the baton, while it runs a body
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._results: dict[int, Any] = {}
        self.frames: list[Frame] = []
        self.turns: list[int] = []
        self.uses = SharedUses()

    def run(self) -> list[Any]:
        """Run all microbatches; returns what `body` returned for each. Raises what one of them raised."""
        board = context.world().board
        self._caller.leave()
        try:
            self._pass_on()
            while not self._finished.wait(_GLANCE_S):
                board.raise_if_failed()
        except BaseException as error:  # an interrupt in the main thread, or another rank's failure
            self._stop(error)
            self._finished.wait(2 * _GLANCE_S)
            raise
        finally:
            self._caller.enter()
        if self._error is not None:
            raise self._error
        return [self._results[i] for i in range(self._num_microbatches)]

    def settle(self, timeout_s: float) -> None:
        """After a failure: wait until no microbatch runs any more, but not longer than this."""
        self._finished.wait(timeout_s)
        self._caller.enter()

    # ------------------------------------------------------------------ called by frames, on their threads

    def wait_turn(self, frame: Frame) -> None:
        """Set the microbatch aside before a wait; returns when it is its turn."""
        index = frame.index
        seat = threading.Semaphore(0)
        with self._lock:
            if self._error is not None:
                raise _Cancelled
            if frame.strayed:
                self._order.stray(index)
            self._order.set_aside(index)
            chosen = self._order.next()
            assert chosen is not None
            self.turns.append(chosen)
            if chosen == index:
                return
            self._seats[index] = seat
        frame.streams.leave()
        self._hand_to(chosen)
        seat.acquire()
        frame.streams.enter()
        with self._lock:
            if self._error is not None:
                raise _Cancelled
            self._running = threading.get_ident()

    def in_order(self, frame: Frame) -> None:
        """Set the microbatch aside until those before it are as far."""
        while not self._order.may_pass(frame.index):
            self.wait_turn(frame)
            if not self._order.may_pass(frame.index):
                frame.strayed = True  # one before it has left the program

    def stay_in_line(self, frame: Frame) -> None:
        """Set the microbatch aside until those before it that have left the program so far are as far.

        Such ones wait for the end of the table on all ranks, and none is overtaken before it leaves the program. So all
        ranks find the same here, and for all of them this one leaves the program here, too.
        """
        at = len(frame.program)
        while any(
            f.index < frame.index
            and f.strayed_at is not None
            and f.strayed_at <= at
            and not self._order.is_as_far(f.index, frame.index)
            for f in self.frames
        ):
            frame.strayed = True
            frame.strayed_at = at if frame.strayed_at is None else frame.strayed_at
            self.wait_turn(frame)

    def forward_done(self, frame: Frame) -> None:
        """With "simple": wait until every microbatch of this rank is done with forward."""
        self._order.at_gate(frame.index)
        if self._gated:
            self.wait_turn(frame)

    # ------------------------------------------------------------------ the baton

    def _pass_on(self) -> None:
        """Give the baton to the next microbatch; end the step if there is none, or wake one to unwind it."""
        with self._lock:
            if self._error is not None:
                chosen = next(iter(self._seats), None)
            else:
                chosen = self._order.next()
                self.turns += [] if chosen is None else [chosen]
        if chosen is None:
            self._finished.set()
        else:
            self._hand_to(chosen)

    def _hand_to(self, index: int) -> None:
        with self._lock:
            seat = self._seats.pop(index, None)
        if seat is not None:
            seat.release()
        else:
            _workers.run(lambda: self._run_one(index))

    def _run_one(self, index: int) -> None:
        """Run a microbatch on this thread from its start to its end, and pass the baton on."""
        error: BaseException | None = None
        try:
            try:
                with self._lock:
                    self._running = threading.get_ident()
                frame = self._make_frame(index, self)
                self.frames.append(frame)
                self._state.run(lambda: self._run_body(frame))
            finally:
                with self._lock:
                    self._running = None
        except BaseException as raised:
            error = raised
        with self._lock:
            if error is not None and self._error is None:
                error.__dict__.setdefault("shardwright_microbatch", index)
                self._error = error
            self._order.done(index)
        self._pass_on()

    def _run_body(self, frame: Frame) -> None:
        frame.streams.begin(self._caller)
        self._results[frame.index] = self._body(frame)
        frame.finished = True

    def _stop(self, error: BaseException) -> None:
        """End the step from the main thread: unwind the microbatch that runs, and with it all others."""
        with self._lock:
            if self._error is None:
                self._error = error
            if self._running is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._running), ctypes.py_object(_Cancelled))


class _Workers:
    """Threads that are used again: a new one would bring a new memory arena and a new team of OpenMP
    threads."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._count = 0

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            self._count += 1
            thread = threading.Thread(
                target=self._serve, args=(inbox,), name=f"shardwright-microbatch-{self._count}", daemon=True
            )
            thread.start()
        inbox.put(job)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            job = inbox.get()
            job()
            del job  # it holds the step
            with self._lock:
                self._idle.append(inbox)


_workers = _Workers()
