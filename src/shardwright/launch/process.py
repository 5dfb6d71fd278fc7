"""Start a job on this host and leave nothing behind, however it ends.

Not torchrun's agent: that one dies from SIGKILL with its workers left running, doesn't react to Ctrl-C while
it waits for another node, and wraps a worker's reason in its own traceback. Workers are started here with
torchrun's environment variables instead, and meet at the store (c10d's TCPStore) that rank 0 opens, on one
node or several: what torchrun calls a static rendezvous. With `--max-restarts` the launcher of each node
starts its workers anew when one of them failed; no message passes between launchers, for one rank's failure
ends the ranks of every node.

Three generations of processes:

    front        what the user started; passes signals on, and cleans up if the supervisor is killed
    supervisor   parent of the workers; cleans up if the front is killed (a pipe between them closes)
    workers      each leads a session of its own; the kernel kills it if the supervisor goes

Front and supervisor are both subreapers (see `guard`), so that whichever survives finds every process.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from shardwright.errors import ConfigError
from shardwright.launch import guard, ports
from shardwright.launch.command import (
    LaunchSettings,
    check_devices,
    port_of_start,
    torchrun_equivalent,
    worker_command,
    worker_environment,
)
from shardwright.launch.devices import count_accelerators
from shardwright.launch.relay import say
from shardwright.launch.report import exit_status
from shardwright.launch.supervisor import STOP_SIGNALS, Supervisor

_FRONT_PATIENCE_S = 2.0  # beyond the workers' grace, before the front stops waiting for the supervisor


def run(settings: LaunchSettings, environ: Mapping[str, str] | None = None) -> int:
    """Run the job's workers of this host to their end and return the exit code for the shell.

    Called by: the command line, in a process without threads and other children: it takes over signals.
    Returns: 0 if every worker did, at the first start or a later one; the first failing worker's code of the
        last start (128 + n for signal n); 128 + n if the launcher itself got signal n.
    Raises: ConfigError before anything is started: no such script, a taken port, more processes than devices.
    """
    environ = dict(os.environ if environ is None else environ)
    _check_script(settings)
    num_devices = count_accelerators(environ)
    settings = _prefer_real_devices(settings, num_devices)
    check_devices(settings, num_devices, environ)
    with ExitStack() as stack:
        if settings.node_rank == 0:
            reserved = stack.enter_context(ports.reserve(settings.master_port))
            settings = replace(settings, master_port=ports.port_of(reserved))
        if settings.log_dir is not None:
            Path(settings.log_dir).mkdir(parents=True, exist_ok=True)
        num_cores = usable_cores()
        announce(settings, environ, num_cores)
        while True:
            environments = [
                worker_environment(settings, environ, local_rank, num_cores)
                for local_rank in range(settings.nproc)
            ]
            status, stopped = _run_supervised(settings, environments)
            if status == 0 or stopped or settings.num_restarts >= settings.max_restarts:
                return status
            settings = replace(settings, num_restarts=settings.num_restarts + 1)
            if settings.nnodes > 1 and settings.node_rank == 0:
                stack.enter_context(ports.reserve(port_of_start(settings)))
            say(f"restart {settings.num_restarts} of {settings.max_restarts}: all workers of this host start again")


def usable_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def announce(settings: LaunchSettings, environ: Mapping[str, str], num_cores: int) -> None:
    """Say on stderr what is started and how to do the same by hand; quiet from log_level "warning" on."""
    if settings.config.get("log_level", "info") not in ("debug", "info"):
        return
    where = f" on node {settings.node_rank} of {settings.nnodes}" if settings.nnodes > 1 else ""
    keys = ", ".join(f"{key} {value}" for key, value in settings.config.items())
    say(
        f"{settings.nproc} process{'es' * (settings.nproc != 1)}{where}{', ' + keys if keys else ''}, "
        f"port {settings.master_port}\n"
        f"  the same with torchrun: {torchrun_equivalent(settings, environ, num_cores)}"
    )


def _check_script(settings: LaunchSettings) -> None:
    if not settings.module and not Path(settings.script).is_file():
        raise ConfigError(
            f"there is no script {settings.script!r} in {os.getcwd()!r}",
            remedy="give its path, or -m for the name of a module",
        )


def _prefer_real_devices(settings: LaunchSettings, num_devices: int) -> LaunchSettings:
    if not settings.emulate_cuda or num_devices == 0:
        return settings
    say(f"--emulate-cuda is ignored, for this host has {num_devices} real CUDA device(s)")
    return replace(settings, emulate_cuda=False)


def _run_supervised(settings: LaunchSettings, environments: list[dict[str, str]]) -> tuple[int, bool]:
    """Start the workers once and wait for their end.

    Returns: the exit code, and whether the job was stopped from outside: by a signal to the launcher, or with
        the supervisor.
    """
    alive_read, alive_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    guard.become_subreaper()
    # No signal may come in before each side has its own way to deal with it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    supervisor = os.fork()
    if supervisor == 0:
        os.close(alive_write)
        _supervise(settings, environments, alive_read)
    os.close(alive_read)
    try:
        return _wait(supervisor, settings.grace_s + _FRONT_PATIENCE_S)
    finally:
        left = guard.kill_descendants()
        if left:
            say(f"processes {left} could not be killed")
        os.close(alive_write)


def _supervise(settings: LaunchSettings, environments: list[dict[str, str]], alive_read: int) -> NoReturn:
    status = 1
    try:
        # Away from the terminal's foreground group, so that Ctrl-C comes through the front, once.
        os.setpgid(0, 0)
        command = worker_command(settings, _python())
        status = Supervisor(settings, command, environments, alive_read).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(supervisor: int, patience_s: float) -> tuple[int, bool]:
    """Pass signals on to the supervisor until it ends; returns as `_run_supervised` does."""
    wake_fd = guard.wake_on((*STOP_SIGNALS, signal.SIGCHLD))
    stopped_by = 0
    give_up_at_s: float | None = None
    while True:
        ended = guard.reap()
        if supervisor in ended:
            exit_code = ended[supervisor]
            if exit_code < 0:
                name = signal.Signals(-exit_code).name
                say(f"the supervisor was killed by {name}; all workers were stopped")
            # From here on a signal waits for the supervisor of a restart, if there is one.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            late = set(_pending(wake_fd)) & set(STOP_SIGNALS)
            if late and not stopped_by:
                return 128 + min(late), True
            return exit_status(exit_code), bool(stopped_by) or exit_code < 0
        timeout_s = None if give_up_at_s is None else give_up_at_s - time.monotonic()
        if timeout_s is not None and timeout_s <= 0:
            return 128 + stopped_by, True
        ready, _, _ = select.select([wake_fd], [], [], timeout_s)
        for number in _pending(wake_fd) if ready else b"":
            if number in STOP_SIGNALS:
                os.kill(supervisor, number)
                stopped_by = stopped_by or number
                give_up_at_s = give_up_at_s or time.monotonic() + patience_s


def _pending(wake_fd: int) -> bytes:
    """Return the numbers of the signals that came since the last call."""
    try:
        return os.read(wake_fd, 4096)
    except BlockingIOError:
        return b""


def _python() -> str:
    python = sys.executable or shutil.which("python3")
    if not python:
        raise ConfigError("the Python interpreter could not be found", remedy="put python3 on the PATH")
    return python
