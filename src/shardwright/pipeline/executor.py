"""Microbatches as threads with one baton.

Each microbatch of a step runs on a thread of its own, so that what torch keeps per thread (grad mode, autocast, hooks,
modes, streams) can't leak from one to another. Only the thread with the baton runs. A microbatch that must wait for
a value is always set aside, whether or not the message has come, and `schedule.choose` names the next one; the
thread that waits hands the baton over itself.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from shardwright.pipeline.frame import Frame
from shardwright.pipeline.schedule import Policy, Waiting, choose
from shardwright.pipeline.shared import SharedUses
from shardwright.topology import context

# The main thread looks up from its wait this often, so that a failure elsewhere can interrupt it.
_GLANCE_S = 0.5


class _Cancelled(BaseException):
    """Unwinds a microbatch that was set aside when another one failed."""


class Executor:
    """Runs the microbatches of one step on this rank. Used once.

    body(frame): runs a microbatch to its end on the calling thread.
    policy: of this rank.   gate: no backward before all forwards ("simple").
    """

    def __init__(
        self,
        body: Callable[[Frame], Any],
        make_frame: Callable[[int, Executor], Frame],
        policy: Policy,
        *,
        gate: bool,
    ) -> None:
        self._body = body
        self._make_frame = make_frame
        self._policy = policy
        self._gate = gate
        self._state = ThreadState()
        self._waiting: dict[int, _Seat] = {}
        self._next_new = 0
        self._num_done = 0
        self._at_gate: set[int] = set()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self.frames: list[Frame] = []
        self._results: dict[int, Any] = {}
        self.uses = SharedUses()

    def run(self) -> list[Any]:
        """Run all microbatches; returns what `body` returned for each, in order. Raises what one of them raised."""
        board = context.world().board
        try:
            self._start_next()
            while not self._finished.wait(_GLANCE_S):
                board.raise_if_failed()
        except BaseException as error:  # an interrupt in the main thread, or another rank's failure
            if self._error is None:
                self._error = error
            self._cancel()
            self._finished.wait(2 * _GLANCE_S)
            raise
        finally:
            board.running_thread = None
        if self._error is not None:
            raise self._error
        return [self._results[i] for i in range(self._policy.num_microbatches)]

    # ------------------------------------------------------------------ called by frames, on their threads

    def wait_turn(self, frame: Frame) -> None:
        """Set the microbatch aside before a wait; returns when it is its turn."""
        seat = _Seat(frame)
        self._waiting[frame.index] = seat
        chosen = self._choose()
        if chosen == frame.index:
            del self._waiting[chosen]
            return
        frame.streams.leave()
        self._hand_to(chosen)
        seat.baton.acquire()
        if self._error is not None:
            raise _Cancelled
        context.world().board.running_thread = threading.get_ident()
        frame.streams.enter()

    def forward_done(self, frame: Frame) -> None:
        """With "simple": wait until every microbatch of this rank is done with forward."""
        self.uses.forward_ends(frame.index)
        if self._gate and frame.index not in self._at_gate:
            self._at_gate.add(frame.index)
            self.wait_turn(frame)

    # ------------------------------------------------------------------ the baton

    def _choose(self) -> int:
        total = self._policy.num_microbatches
        closed = self._gate and len(self._at_gate) < total
        waiting = [
            Waiting(i, not seat.frame.computed, closed and i in self._at_gate) for i, seat in self._waiting.items()
        ]
        return choose(self._policy, waiting, self._next_new)

    def _hand_to(self, index: int) -> None:
        if index == self._next_new and index not in self._waiting:
            self._next_new += 1
            _workers.run(lambda: self._run_one(index))
        else:
            self._waiting.pop(index).baton.release()

    def _start_next(self) -> None:
        self._hand_to(self._choose())

    def _run_one(self, index: int) -> None:
        try:
            context.world().board.running_thread = threading.get_ident()
            frame = self._make_frame(index, self)
            self.frames.append(frame)
            frame.streams.begin()
            with self._state.applied():
                self._results[index] = self._body(frame)
        except _Cancelled:
            pass
        except BaseException as error:
            if self._error is None:
                error.__dict__.setdefault("shardwright_microbatch", index)
                self._error = error
            self._cancel()
        self._num_done += 1
        self.uses.ends(index)
        self._at_gate.add(index)  # without a backward it never comes to the gate
        if self._error is not None:
            if not self._waiting:
                self._finished.set()
        elif self._num_done == self._policy.num_microbatches:
            self._finished.set()
        else:
            self._start_next()

    def _cancel(self) -> None:
        """Wake every microbatch that was set aside, so that its thread unwinds."""
        for index in list(self._waiting):
            seat = self._waiting.pop(index, None)
            if seat is not None:
                seat.baton.release()


class _Seat:
    """Where a microbatch waits for the baton."""

    __slots__ = ("baton", "frame")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.baton = threading.Semaphore(0)


class _Workers:
    """Threads that are used again: a new thread would bring a new memory arena and a new team of OpenMP threads."""

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
            inbox.get()()
            with self._lock:
                self._idle.append(inbox)


_workers = _Workers()


class ThreadState:
    """What torch keeps per thread, read from the thread that makes this, to be applied on others."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._modes: Sequence[Any] = tuple(_get_current_function_mode_stack())
        self._context = contextvars.copy_context()
        self._cuda_stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def applied(self) -> ExitStack:
        """A context manager under which the current thread has this state."""
        stack = ExitStack()
        for variable, value in self._context.items():
            stack.callback(variable.reset, variable.set(value))
        stack.enter_context(torch.inference_mode(self._inference))
        if not self._inference:
            stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, enabled, dtype in self._autocast:
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            stack.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(self._autocast_cache)
        for mode in self._modes:
            stack.enter_context(mode)
        if self._cuda_stream is not None:
            stack.enter_context(torch.cuda.stream(self._cuda_stream))
        return stack
