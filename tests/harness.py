"""Run a function on several ranks: real processes, gloo on CPU, file rendezvous, one thread each.

    results = run_ranks(2, check_something, argument, config={"pipeline_parallel_degree": 2})

The function is named by its file, so that any module-level function works, however pytest imported its
module. What it returns is pickled back. If a rank fails, the others get a moment to fail too (a failure
travels to all ranks), then `RankFailure` is raised with every rank's traceback and output; what still runs
then, or when time is up, first shows its stacks. No process outlives the call, whatever happens.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_GRACE_S = 12.0
"""How long the other ranks may take to end after the first one failed."""

_OUTPUT_TAIL = 6000
"""Characters of each rank's output shown on failure."""


class RankFailure(AssertionError):
    """A rank raised, died or hung. `tracebacks`: by rank, the text of what it raised."""

    def __init__(self, text: str, tracebacks: Mapping[int, str]) -> None:
        super().__init__(text)
        self.tracebacks = dict(tracebacks)


@dataclass(frozen=True)
class _Job:
    """One run, as it is sent to every rank."""

    module: str
    file: str | None
    function: str
    arguments: bytes
    config: dict[str, Any] | None
    environment: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of one rank. error: its traceback, or how it ended; None if it returned.

    seconds: from the start of the run to this rank's answer.
    """

    value: Any = None
    error: str | None = None
    seconds: float = 0.0
    exit_code: int | None = None


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    config: Mapping[str, Any] | None = None,
    timeout_s: float = 60,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on n fresh processes, after `init(config)` if there is one; return the results."""
    with RankPool(n) as pool:
        return pool.run(fn, *args, config=config, timeout_s=timeout_s, environment=environment)


class RankPool:
    """Rank processes that stay up: imports are paid once, every run has groups of its own.

    After a run that failed or hung, the processes are replaced.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[_RankProcess] = []
        self._num_runs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        config: Mapping[str, Any] | None = None,
        timeout_s: float = 60,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args)` on every rank; return the results in rank order, or raise RankFailure."""
        outcomes = self.outcomes(fn, *args, config=config, timeout_s=timeout_s, environment=environment)
        if any(outcome.error is not None for outcome in outcomes):
            raise _failure(fn, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        config: Mapping[str, Any] | None = None,
        timeout_s: float = 60,
        grace_s: float = _GRACE_S,
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Like `run`, but return what became of each rank, for tests of failures themselves."""
        self._num_runs += 1
        rendezvous = self._folder / f"rendezvous-{self._num_runs}"
        job = _Job(
            module="__script__" if fn.__module__ == "__main__" else fn.__module__,
            file=getattr(sys.modules.get(fn.__module__), "__file__", None),
            function=fn.__qualname__,
            arguments=pickle.dumps(args),
            config=None if config is None else dict(config),
            environment={**(environment or {}), "SHARDWRIGHT_INIT_METHOD": f"file://{rendezvous}"},
        )
        completed = False
        try:
            self._ensure_started()
            for process in self._processes:
                process.give(job)
            outcomes = self._collect(timeout_s, grace_s)
            completed = all(outcome.error is None for outcome in outcomes)
            return outcomes
        finally:
            if not completed:
                self._kill()
            with contextlib.suppress(OSError):
                rendezvous.unlink()

    @property
    def process_ids(self) -> list[int]:
        """The processes that are up, by rank."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all processes."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self) -> None:
        """End all processes; the next run starts new ones."""
        self._kill()

    def _ensure_started(self) -> None:
        if any(not process.is_alive() for process in self._processes):
            self._kill()
        while len(self._processes) < self.n:
            self._processes.append(_RankProcess(len(self._processes), self.n, self._folder))

    def _collect(self, timeout_s: float, grace_s: float) -> list[Outcome]:
        start = time.monotonic()
        deadline = start + timeout_s
        outcomes: dict[int, Outcome] = {}
        failed = False
        while len(outcomes) < self.n and time.monotonic() < deadline:
            pending = {
                process.connection: process for process in self._processes if process.rank not in outcomes
            }
            for ready in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
                process = pending[ready]  # type: ignore[index]
                outcome = process.take(time.monotonic() - start)
                outcomes[process.rank] = outcome
                if outcome.error is not None and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + grace_s)
        hung = [process for process in self._processes if process.rank not in outcomes]
        for process in hung:
            process.dump_stacks()
        if hung:
            time.sleep(0.5)
        seconds = time.monotonic() - start
        for process in hung:
            outcomes[process.rank] = Outcome(error=f"still running after {seconds:.0f} s", seconds=seconds)
        return [
            Outcome(
                outcome.value,
                None if outcome.error is None else outcome.error + process.output(),
                outcome.seconds,
                outcome.exit_code,
            )
            for process, outcome in ((process, outcomes[process.rank]) for process in self._processes)
        ]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.reap()
        self._processes.clear()


class _RankProcess:
    """One child: its process, the pipe to it, and the file that takes its output."""

    def __init__(self, rank: int, n: int, folder: Path) -> None:
        self.rank = rank
        self._output = open(folder / f"output-{rank}-{time.monotonic_ns()}", "w+b")  # noqa: SIM115
        self._told = 0
        self.connection, theirs = Pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": os.environ.get("SHARDWRIGHT_TEST_DEVICES", ""),
            "PYTHONPATH": os.pathsep.join([entry for entry in sys.path if entry]),
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
        }
        for name in ("MASTER_ADDR", "MASTER_PORT", "SM_HP_MP_PARAMETERS"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import harness, sys; harness._serve(*map(int, sys.argv[1:]))"]
            + [str(theirs.fileno()), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def give(self, job: _Job) -> None:
        self._told = self._size()
        with contextlib.suppress(OSError):  # a dead child shows when its answer is taken
            self.connection.send_bytes(pickle.dumps(job))

    def take(self, seconds: float) -> Outcome:
        try:
            value, error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            return Outcome(
                error=f"the process was {how}" if code < 0 else how, seconds=seconds, exit_code=code
            )
        return Outcome(value, error, seconds)

    def dump_stacks(self) -> None:
        if self.is_alive():
            self._process.send_signal(signal.SIGUSR1)

    def output(self) -> str:
        """Return the end of what the child has written during this run."""
        size = self._size()
        self._output.seek(max(self._told, size - _OUTPUT_TAIL))
        text = self._output.read().decode(errors="replace").strip()
        return f"\n[output]\n{text}" if text else ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> None:
        self._process.wait()
        self.connection.close()
        self._output.close()

    def _size(self) -> int:
        return os.fstat(self._output.fileno()).st_size


def _failure(fn: Callable[..., Any], outcomes: Sequence[Outcome]) -> RankFailure:
    lines = [f"{fn.__qualname__} failed"]
    for rank, outcome in enumerate(outcomes):
        what = "returned" if outcome.error is None else outcome.error.rstrip()
        lines += [f"---- rank {rank}, after {outcome.seconds:.1f} s ----", what]
    tracebacks = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    return RankFailure("\n".join(lines), tracebacks)


# -- in the child ----------------------------------------------------------------------------------------


def _serve(descriptor: int, parent: int) -> None:
    """Do jobs until the parent closes the pipe."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with(parent)
    connection = Connection(descriptor)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_answer(job))


def _answer(job: _Job) -> bytes:
    from shardwright.topology import context, failure

    for name, value in job.environment.items():
        os.environ[name] = value
    try:
        function = _find(job)
        if job.config is not None:
            context.init(job.config)
        value = function(*pickle.loads(job.arguments))
        answer = pickle.dumps((value, None))
        context.shutdown()
    except BaseException as error:
        failure.board().report(error)
        answer = pickle.dumps((None, traceback.format_exc()))
        with contextlib.suppress(Exception):
            context.shutdown(linger=False)
    finally:
        for name in job.environment:
            os.environ.pop(name, None)
    return answer


def _find(job: _Job) -> Callable[..., Any]:
    module: ModuleType | None = sys.modules.get(job.module)
    if module is None and job.file is not None:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    found: Any = module or importlib.import_module(job.module)
    for name in job.function.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _end_with(parent: int) -> None:
    """Ask the kernel to kill this process when the parent is gone, even if it was killed itself."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
