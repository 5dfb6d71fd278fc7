"""Keep hold of every process a job starts, so that none outlives it.

Two facts of Linux are used. A *subreaper* is the new parent of any orphan below it, so that a data-loader
process whose worker was killed stays findable. A *death signal* makes the kernel kill a child when its parent
goes, even when the parent had no chance to act. Elsewhere these calls do nothing, and the process group of
each worker is what can be stopped.

Source: prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
_prctl = ctypes.CDLL(None, use_errno=True).prctl if _LINUX else None


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants."""
    if _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent goes; called between fork and exec.

    parent_pid: who the parent was before the fork; if it is gone already, this process ends here.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)


def descendants(pid: int) -> list[int]:
    """Return the live processes below `pid`; empty where there is no /proc. Zombies don't count."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for entry in os.listdir("/proc") if _LINUX else []:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command's name stands in parentheses and may itself hold spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(int(parent), []).append((int(entry), state in (b"Z", b"X")))
    found: list[int] = []
    pending = [pid]
    while pending:
        for child, dead in children.get(pending.pop(), []):
            pending.append(child)
            if not dead:
                found.append(child)
    return found


def kill_descendants(session_leaders: Iterable[int] = (), *, timeout_s: float = 5.0) -> list[int]:
    """Kill everything below this process and wait until it is gone.

    session_leaders: workers not yet reaped, whose process groups are killed too (all there is outside Linux).
    Returns: processes that are still there after `timeout_s` (blocked inside the kernel); normally none.
    """
    for leader in session_leaders:
        _send(os.killpg, leader)
    deadline = time.monotonic() + timeout_s
    while True:
        # A process can fork between the listing and the signal, hence the loop.
        left = descendants(os.getpid())
        for pid in left:
            _send(os.kill, pid)
        reaped = reap()
        if not left and not reaped:
            return []
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def reap() -> dict[int, int]:
    """Collect every child that has ended; returns its exit code, or minus the signal that killed it."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def wake_on(numbers: Iterable[int]) -> int:
    """Catch these signals and return a descriptor that yields the number of each as one byte.

    A loop can then wait for signals and everything else with one `select`. Unblocks the signals, which the
    caller may have blocked around a fork. Main thread only.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    # nohup ignores SIGHUP on purpose.
    wanted = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    for number in wanted:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    return read_fd


def _send(call: Callable[[int, int], None], pid: int) -> None:
    try:
        call(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
