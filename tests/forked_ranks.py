"""Ranks forked from a process that has imported everything: hundreds of jobs, each with processes of its own.

For scripts that tests start, not for the tests' own process: a process that forks must have started no thread, so
nothing here or in the script may initialise a world or run a backward pass outside of the ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = "SHARDWRIGHT_TEST_JOB"


@dataclass(frozen=True)
class Ended:
    """What became of a rank. error: its traceback and output, or by which signal it ended; None if it returned."""

    value: Any = None
    error: str | None = None
    killed: bool = False


class Job:
    """Ranks of one job, which run `function(*arguments)` after `init(config)`. A context manager that leaves no process."""

    def __init__(self, n: int, function: Callable[..., Any], *arguments: Any, config: Mapping[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="job-"))
        sys.stdout.flush()
        sys.stderr.flush()
        self.processes: dict[int, int] = {}
        """rank -> process; those that have not been waited for."""
        self._ended: dict[int, Ended] = {}
        for rank in range(n):
            process = os.fork()
            if process == 0:
                _be_rank(rank, n, self._folder, function, arguments, config)
            self.processes[rank] = process

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for process in self.processes.values():
            os.waitpid(process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def has_mark(self, name: str) -> bool:
        """Has a rank called `mark`?"""
        return (self._folder / name).exists()

    def kill(self) -> None:
        """End all ranks at once, as the end of their launcher does."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def wait(self, timeout_s: float) -> list[Ended]:
        """Wait for all ranks; return what became of each. One that hangs shows its stacks, and counts as an error."""
        end_s = time.monotonic() + timeout_s
        while self.processes:
            for rank, process in list(self.processes.items()):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    del self.processes[rank]
                    self._ended[rank] = self._outcome(rank, status)
            if time.monotonic() > end_s:
                for process in self.processes.values():
                    os.kill(process, signal.SIGUSR1)
                time.sleep(0.5)
                for rank in self.processes:
                    self._ended[rank] = Ended(error=f"still running after {timeout_s} s\n{self._output(rank)}")
                break
            time.sleep(0.002)
        return [self._ended[rank] for rank in sorted(self._ended)]

    def _outcome(self, rank: int, status: int) -> Ended:
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return Ended(error=f"killed by {name}\n{self._output(rank)}", killed=name == "SIGKILL")
        value, error, imported = pickle.loads((self._folder / f"result-{rank}").read_bytes())
        for name in imported:  # the next ranks have them from the start
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        return Ended(value, None if error is None else f"{error}\n{self._output(rank)}")

    def _output(self, rank: int) -> str:
        return (self._folder / f"output-{rank}").read_text(errors="replace")[-6000:]


def mark(name: str) -> None:
    """Tell the process that looks on that this rank has come so far."""
    Path(os.environ[_FOLDER], name).touch()


def _be_rank(
    rank: int, n: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...], config: Mapping[str, Any]
) -> None:
    """The life of a forked process; never returns."""
    from shardwright.topology import context, failure

    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n), CUDA_VISIBLE_DEVICES="",
        SHARDWRIGHT_INIT_METHOD=f"file://{folder / 'rendezvous'}", **{_FOLDER: str(folder)},
    )  # fmt: skip
    before = set(sys.modules)
    value, told = None, None
    try:
        context.init(dict(config))
        value = function(*arguments)
        context.shutdown()
    except BaseException as error:
        told = traceback.format_exc()
        failure.board().report(error)
        with contextlib.suppress(Exception):
            context.shutdown(linger=False)
    imported = [name for name in list(sys.modules) if name not in before and not name.startswith("_remote_module")]
    (folder / f"result-{rank}").write_bytes(pickle.dumps((value, told, imported)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
