"""What to say when a job fails: who failed first and why, then the others in one line each.

Pure: texts and exit codes in, text out.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import LostRankError, RemoteRankError

_HEADER = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# A rank that ends with one of these tells of another rank's failure.
_SECOND_HAND = (RemoteRankError.__name__, LostRankError.__name__)
_MAX_LINE = 300
# Errors of PyTorch that scripts new to the library meet, and what to do. Ours bring their own remedy.
_REMEDIES = (
    (
        re.compile(
            r"_cuda_setDevice|Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available"
        ),
        "on a machine without a GPU, shardwright run --emulate-cuda (emulate_cuda=True of the estimator)",
    ),
    (
        re.compile(r"element 0 of tensors does not require grad"),
        "if a step function returned the loss: call model.backward(loss) inside that function, since what it returns"
        " is detached",
    ),
)


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker of this host ended.

    exit_code: minus the signal's number if a signal killed it.
    time_s: when its traceback began, or when it ended if there was none; orders the failures.
    stopped: the launcher had asked it to stop before.
    traceback: as printed, or "".
    shown: the traceback went to the terminal already.
    """

    rank: int
    exit_code: int
    time_s: float
    stopped: bool = False
    traceback: str = ""
    shown: bool = False


def traceback_start(line: str) -> int | None:
    """Return where in this line of stderr a traceback begins; None if none does.

    A progress bar often leaves its text, without an end of line, in front of it.
    """
    text = line.rstrip("\r\n")
    if not text.endswith(_HEADER):
        return 0 if strip_prefix(text).startswith('  File "') else None  # a SyntaxError has no header
    before = strip_prefix(text[: -len(_HEADER)])
    if before in ("", "  + Exception Group "):
        return 0
    quoted = before.strip(" |") == ""  # inside the message of another exception
    return None if quoted else len(text) - len(_HEADER)


def strip_prefix(text: str) -> str:
    """Remove the "[rank0]: " that torch.distributed puts before the lines of a traceback."""
    return _TORCH_PREFIX.sub("", text)


def exception_line(traceback: str) -> str:
    """Return the line of a traceback that names the exception; of chained ones the last.

    An exception that tells of another rank's failure may quote that rank's traceback: the outer one counts.
    """
    lines = strip_prefix(traceback).splitlines()
    found: list[str] = []
    in_frames = bool(lines) and not lines[0].startswith(_HEADER)
    for line in lines:
        if line == _HEADER:
            in_frames = True
        elif in_frames and line and not line.startswith(" ") and line not in _CHAINED:
            found.append(line)
            in_frames = False
    second_hand = [line for line in found if _tells_of_another(line)]
    if second_hand:
        return second_hand[0]
    if found:
        return found[-1]
    return next((line.strip(" |+-") for line in reversed(lines) if line.strip(" |+-")), "")


def first_failure(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the failure that came first and isn't an echo of another; None if nobody failed by itself."""
    failed = [end for end in ends if end.exit_code != 0 and not end.stopped]
    own = [end for end in failed if not _tells_of_another(exception_line(end.traceback))]
    return min(own or failed, key=lambda end: end.time_s, default=None)


def exit_status(exit_code: int) -> int:
    """Return what the launcher exits with for a worker's exit code: a shell's 128 + n for signal n."""
    return 128 - exit_code if exit_code < 0 else exit_code


def describe_failure(ends: Sequence[WorkerEnd]) -> str:
    """Return the closing words on a failed job, or "" if no worker failed by itself."""
    first = first_failure(ends)
    if first is None:
        return ""
    lines = [f"rank {first.rank} failed first: {_how_it_ended(first)}"]
    if first.traceback and not first.shown:
        lines += ["", strip_prefix(first.traceback).rstrip("\n")]
    elif first.traceback:
        lines += [f"  {_shorten(exception_line(first.traceback))}", "  (its traceback is above)"]
    else:
        lines += ["  (it left no traceback; what it printed is above)"]
    lines += [f"  try: {remedy}" for pattern, remedy in _REMEDIES if pattern.search(exception_line(first.traceback))]
    others = sorted((end for end in ends if end is not first), key=lambda end: end.rank)
    if others:
        lines += ["", "other ranks:"]
        lines += [f"  rank {end.rank}: {_one_line(end)}" for end in others]
    return "\n".join(lines) + "\n"


def follows_from_stop(traceback: str) -> bool:
    """In a job that is being stopped: does this only tell of Ctrl-C, or of ranks that stopped before?"""
    line = exception_line(traceback)
    return line.startswith("KeyboardInterrupt") or _tells_of_another(line)


def _one_line(end: WorkerEnd) -> str:
    if end.exit_code == 0:
        return "finished"
    cause = exception_line(end.traceback)
    if end.stopped and not cause:
        return "stopped by the launcher"
    return _shorten(f"{_how_it_ended(end)}; {cause}" if cause else _how_it_ended(end))


def _how_it_ended(end: WorkerEnd) -> str:
    if end.exit_code >= 0:
        return f"exit code {end.exit_code}"
    try:
        name = signal.Signals(-end.exit_code).name
    except ValueError:
        name = f"signal {-end.exit_code}"
    hint = " (out of memory, or killed by hand)" if name == "SIGKILL" and not end.stopped else ""
    return f"killed by {name}{hint}"


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 3] + "..."


def _tells_of_another(line: str) -> bool:
    return line.partition(":")[0].rpartition(".")[2] in _SECOND_HAND
