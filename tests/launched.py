"""Start `shardwright run` as a user would, and see every process that it brings about.

Processes are found by a mark in their environment, so that orphans in sessions of their own count too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

_MARK = "SHARDWRIGHT_TEST_MARK"
_MAIN = "from shardwright.cli.main import main; main()"


class Launched:
    """One running `shardwright run`; a context manager that leaves no process."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self._output = folder / f"out-{self.mark}"
        self._errors = folder / f"err-{self.mark}"
        with self._output.open("wb") as stdout, self._errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, "run", *arguments],
                cwd=folder,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment, _MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    @property
    def stdout(self) -> str:
        """What the job has printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """What the job, and the launcher itself, have said on stderr so far."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[int]:
        """Every live process of this job, front and supervisor included."""
        found = []
        mark = f"{_MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile, or is somebody else's
        return found

    def supervisor(self) -> int:
        """The front's only child."""
        return next(pid for pid in self.processes() if _parent(pid) == self.process.pid)

    def wait_for(self, text: str, times: int = 1, timeout_s: float = 15.0) -> None:
        """Wait until the job has printed a text that often, on either stream."""
        end_s = time.monotonic() + timeout_s
        while (self.stdout + self.stderr).count(text) < times:
            assert time.monotonic() < end_s, f"no {text!r} x {times} in:\n{self.stdout}\n{self.stderr}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 15.0) -> int:
        """Wait for the end, see that nothing is left, and return the exit code."""
        end_s = time.monotonic() + timeout_s
        exit_code = self.process.wait(timeout_s)
        while left := self.processes():
            assert time.monotonic() < end_s, f"left after {timeout_s} s: {left}\n{self.stderr}"
            time.sleep(0.05)
        return exit_code


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Wait for a condition to come true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def can_listen(port: int) -> bool:
    """Is the port free?"""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
            sock.listen()
        except OSError:
            return False
        return True


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
