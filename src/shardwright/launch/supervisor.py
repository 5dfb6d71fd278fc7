"""Watch the workers of one host: pass on their output, notice failures, stop them all.

One thread and one loop. What the loop does about an event:

    a worker fails     the others get `PEERS_S` to end by themselves with their own reason, then SIGTERM,
                       then, `TERMINATE_S` later, SIGKILL for everything below this process
    SIGINT, SIGTERM    passed on to every worker, SIGKILL after the grace; a second SIGINT kills at once
    the front is gone  SIGKILL at once (see `process`)
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwright.launch import guard
from shardwright.launch.command import LaunchSettings
from shardwright.launch.relay import Relay, say
from shardwright.launch.report import (
    WorkerEnd,
    describe_failure,
    exit_status,
    first_failure,
    follows_from_stop,
)

PEERS_S = 5.0
TERMINATE_S = 3.0
_TICK_S = 0.25
_CAUSE_S = 30.0  # a traceback that was let through longer ago is not why a worker ended
_MAX_PIECES = 64
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    stdout: Relay
    stderr: Relay
    end: WorkerEnd | None = None
    stopped: bool = False


class Supervisor:
    """The workers of one host, from start to end.

    Calls: `run`, once, in a process of its own that has no other children and no threads.
    """

    def __init__(
        self, settings: LaunchSettings, command: list[str], environments: list[dict[str, str]], front_fd: int
    ) -> None:
        """command: what every worker runs.   environments: one for each local rank.

        front_fd: read end of a pipe that closes when the front process goes.
        """
        self._settings = settings
        self._command = command
        self._environments = environments
        self._front_fd = front_fd
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._signal: int | None = None  # the first stop signal that came
        self._front_gone = False
        self._terminate_at_s: float | None = None
        self._kill_at_s: float | None = None

    def run(self) -> int:
        """Start the workers, watch them until all have ended, and return the exit code of the job."""
        guard.become_subreaper()
        wake_fd = guard.wake_on((*STOP_SIGNALS, signal.SIGCHLD))
        self._selector.register(wake_fd, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._front_fd, selectors.EVENT_READ, self._on_front_gone)
        try:
            self._start()
            while self._running():
                events = self._selector.select(_TICK_S)
                # Ends before words: what others print about a lost worker comes after its end.
                self._note_ends()
                for key, _ in events:
                    if key.fd in self._selector.get_map():
                        key.data(key.fd)
                self._tick()
        finally:
            guard.kill_descendants([worker.process.pid for worker in self._running()])
        return self._finish()

    def _start(self) -> None:
        parent = os.getpid()
        for environment in self._environments:
            process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=lambda: guard.die_with_parent(parent),
            )
            rank = int(environment["RANK"])
            tag = f"[rank {rank}] " if self._settings.tag_output else ""
            worker = _Worker(
                rank,
                process,
                Relay(1, tag=tag, log=self._open_log(rank, "out")),
                Relay(2, tag=tag, log=self._open_log(rank, "err"), hold_tracebacks=True),
            )
            self._workers.append(worker)
            assert process.stdout is not None
            assert process.stderr is not None
            self._watch_stream(process.stdout.fileno(), worker.stdout)
            self._watch_stream(process.stderr.fileno(), worker.stderr)

    def _open_log(self, rank: int, stream: str) -> BinaryIO | None:
        folder = self._settings.log_dir
        again = f".restart{self._settings.num_restarts}" if self._settings.num_restarts else ""
        return (Path(folder) / f"rank_{rank}{again}.{stream}").open("wb") if folder else None

    def _watch_stream(self, fd: int, relay: Relay) -> None:
        os.set_blocking(fd, False)

        def read(fd: int) -> None:
            if not _pump(fd, relay):
                self._selector.unregister(fd)

        self._selector.register(fd, selectors.EVENT_READ, read)

    def _on_signals(self, wake_fd: int) -> None:
        for number in os.read(wake_fd, 4096):
            if number in STOP_SIGNALS:
                self._stop(number)

    def _stop(self, number: int) -> None:
        if self._signal is not None:
            if number == signal.SIGINT:
                self._kill_at_s = time.monotonic()
            return
        self._signal = number
        self._kill_at_s = time.monotonic() + self._settings.grace_s
        self._terminate_at_s = None
        self._send_all(number)
        again = "; once more to kill them now" if number == signal.SIGINT else ""
        say(f"{signal.Signals(number).name}: workers have {self._settings.grace_s:g} s to end{again}")

    def _on_front_gone(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._front_gone = True
        self._kill_at_s = time.monotonic()

    def _send_all(self, number: int) -> None:
        for worker in self._running():
            worker.stopped = True
            os.kill(worker.process.pid, number)  # not reaped yet, so the pid is still its own

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.end is None]

    def _note_ends(self) -> None:
        ended = guard.reap()
        for worker in self._workers:
            if worker.process.pid in ended:
                self._end(worker, ended[worker.process.pid], time.monotonic())

    def _tick(self) -> None:
        now_s = time.monotonic()
        for worker in self._running():
            worker.stdout.tick(now_s)
            worker.stderr.tick(now_s)
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s:
            self._terminate_at_s = None
            self._kill_at_s = now_s + TERMINATE_S
            self._send_all(signal.SIGTERM)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + 1.0
            self._send_all(signal.SIGKILL)

    def _end(self, worker: _Worker, exit_code: int, now_s: float) -> None:
        """Note the end of a worker, with all that it still had to say."""
        worker.process.returncode = exit_code  # reaped by `guard.reap`
        for pipe, relay in ((worker.process.stdout, worker.stdout), (worker.process.stderr, worker.stderr)):
            assert pipe is not None
            _pump(pipe.fileno(), relay)
            if pipe.fileno() in self._selector.get_map():
                self._selector.unregister(pipe.fileno())
            pipe.close()
            relay.close(now_s)
        traceback = self._cause(worker.stderr, exit_code, now_s)
        if not traceback or self._signal is not None:
            worker.stderr.release()
        worker.end = WorkerEnd(
            worker.rank,
            exit_code,
            worker.stderr.traceback_time_s if traceback else now_s,
            stopped=worker.stopped,
            traceback=traceback,
            shown=worker.stderr.shown,
        )
        if (
            exit_code != 0
            and self._signal is None
            and self._terminate_at_s is None
            and self._kill_at_s is None
        ):
            self._terminate_at_s = now_s + PEERS_S

    def _cause(self, stderr: Relay, exit_code: int, now_s: float) -> str:
        """Return the traceback that explains this end, or ""."""
        if exit_code == 0 or (stderr.shown and (exit_code < 0 or now_s - stderr.traceback_time_s > _CAUSE_S)):
            return ""
        if self._signal is not None and follows_from_stop(stderr.traceback):
            stderr.drop()
            return ""
        return stderr.traceback

    def _finish(self) -> int:
        ends = [worker.end for worker in self._workers if worker.end is not None]
        failure = first_failure(ends)
        words = describe_failure(ends)
        if self._front_gone:
            words = "the launcher was killed; all workers were stopped\n"
        elif self._signal is not None:
            words = f"stopped by {signal.Signals(self._signal).name}\n" + words
        if words:
            say(words.rstrip("\n"))
        if self._signal is not None:
            return 128 + self._signal
        if failure is not None:
            return exit_status(failure.exit_code)
        return 1 if self._front_gone else 0


def _pump(fd: int, relay: Relay) -> bool:
    """Pass on what can be read now, within limits; False when the stream has ended."""
    for _ in range(_MAX_PIECES):
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        relay.feed(data, time.monotonic())
    return True
