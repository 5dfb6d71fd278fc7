"""One training job of an estimator: its launchers, one for each host, from start to the archives.

The hosts are launchers side by side on this machine, each with its own workers and variables, that meet over
loopback as hosts of a cluster do over the network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwright.errors import JobFailedError
from shardwright.launch import guard
from shardwright.launch.script_environment import JobFolders

_MARK = "shardwright run: "
_REPORT = "failed first: "
_MAX_REPORT = 20_000


@dataclass(frozen=True)
class Host:
    """What one host runs: the command of its launcher, and the launcher's whole environment."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


class TrainingJob:
    """A job under way. Calls: the constructor starts it; `wait`, and `stop`, as often as wanted.

    name: unique in its output folder.   folders: where everything of it lies.
    model_data: the archive (or folder) with what the script saved as its model, once the job has ended well.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[Host],
        folders: JobFolders,
        *,
        show_logs: bool,
        compress: bool,
        copy_back: tuple[Path, Path] | None,
    ) -> None:
        """show_logs: also write the workers' output to this process's.   compress: make archives.

        copy_back: a folder, and where to copy it to when the job ends, well or not.
        """
        self.name = name
        self.folders = folders
        self.model_data: Path | None = None
        self._compress = compress
        self._copy_back = copy_back
        self._show_logs = show_logs
        self._error: BaseException | None = None
        self._stopped = False
        self._hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started = threading.Event()
        self._logs = [folders.output / f"{host.name}.log" for host in hosts]
        # Not a daemon: a program that ends without waiting still gets its archives.
        self._thread = threading.Thread(target=self._watch, name=f"training-job-{name}")
        self._thread.start()
        self._started.wait()

    def wait(self) -> None:
        """Return when the job has ended well.

        Interrupting it stops the job.
        Raises: JobFailedError with the report on the rank that failed first.
        """
        try:
            self._thread.join()
        except BaseException:
            self.stop()
            self._thread.join()
            raise
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop all workers; they get SIGTERM first, and some seconds. Doesn't wait for their end."""
        self._stopped = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _start(self) -> None:
        """Start the launchers. The kernel ends them with the thread that did, so it is the one that stays."""
        parent = os.getpid()
        for host in self._hosts:
            process = subprocess.Popen(
                list(host.command),
                cwd=self.folders.code,
                env=dict(host.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: guard.die_with_parent(parent),
            )
            self._processes.append(process)

    def _watch(self) -> None:
        try:
            try:
                self._start()
            finally:
                self._started.set()
            relays = [self._relay(process, log) for process, log in zip(self._processes, self._logs, strict=True)]
            codes = [process.wait() for process in self._processes]
            for relay in (thread for threads in relays for thread in threads):
                relay.join()
            if self._copy_back is not None:
                source, target = self._copy_back
                shutil.copytree(source, target, dirs_exist_ok=True)
            model = self._collect(self.folders.model, "model")
            self._collect(self.folders.data, "output")
            if any(codes):
                self._error = self._failure(codes)
            else:
                self.model_data = model
        except BaseException as error:
            self._error = error

    def _relay(self, process: subprocess.Popen[bytes], log_path: Path) -> list[threading.Thread]:
        log = log_path.open("wb")
        assert process.stdout is not None
        assert process.stderr is not None
        streams = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        lock, left = threading.Lock(), [len(streams)]

        def copy(stream: BinaryIO, target: object) -> None:
            for line in stream:
                with lock:
                    log.write(line)
                    log.flush()
                if self._show_logs:
                    print(line.decode(errors="replace"), end="", file=target, flush=True)  # type: ignore[call-overload]
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    log.close()

        threads = [threading.Thread(target=copy, args=pair) for pair in streams]
        for thread in threads:
            thread.start()
        return threads

    def _collect(self, folder: Path, name: str) -> Path:
        """Pack what lies in a folder; without compression it stays a folder."""
        if not self._compress:
            return folder
        archive = self.folders.output / f"{name}.tar.gz"
        partial = archive.with_suffix(".partial")
        with tarfile.open(partial, "w:gz", compresslevel=1) as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, arcname=path.name)
        partial.replace(archive)
        return archive

    def _failure(self, codes: Sequence[int]) -> JobFailedError:
        if self._stopped:
            return JobFailedError(f"training job {self.name!r} was stopped", where=str(self.folders.root))
        reports = [report_of(log.read_text(encoding="utf-8", errors="replace")) for log in self._logs]
        report = next((report for report in reports if report), "")
        own_words = self.folders.output / "failure"  # the original's place for a reason in the script's own words
        if own_words.is_file():
            report += "\n" + own_words.read_text(encoding="utf-8", errors="replace")[:1024]
        what = f"training job {self.name!r} failed, exit code {next(code for code in codes if code)}"
        return JobFailedError(f"{what}\n{report}".rstrip(), where=f"logs in {self.folders.output}")


def report_of(log: str) -> str:
    """Return the launcher's closing words on the failing rank, or the last lines of a log without any."""
    at = log.rfind(_REPORT)
    if at < 0:
        return "\n".join(log.splitlines()[-20:])
    start = log.rfind(_MARK, 0, at)
    return log[max(start, 0) :].removeprefix(_MARK)[:_MAX_REPORT]
