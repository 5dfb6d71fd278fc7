"""Wait until gloo's threads have let go of the tensors that they were given.

After a collective a thread of gloo still drops its references to the tensors, for which it needs the Python
interpreter. If the interpreter ends in that moment, CPython ends the thread, and C++ takes that for a crash:
"terminate called without an active exception", exit code 134, after a training run that went well. Destroying
a group waits for its threads, but only when nobody refers to the group any more, and models and scripts do.
"""

from __future__ import annotations

import os
import time
from typing import Final

_THREADS: Final = "/proc/self/task"
_NAME: Final = b"(pt_gloo_runloop)"
_LOOK_EVERY_S: Final = 0.001
_BLIND_WAIT_S: Final = 0.02
"""Where the system doesn't tell what threads do."""


def wait_for_gloo(timeout_s: float = 5.0) -> None:
    """Return when no thread of gloo in this process has work left that it could do, or time is over.

    Called by: `context.shutdown`, when nothing is sent on the groups any more. No communication.
    """
    if not os.path.isdir(_THREADS):
        time.sleep(_BLIND_WAIT_S)
        return
    deadline = time.monotonic() + timeout_s
    quiet_looks = 0
    while quiet_looks < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)  # whoever waits for the interpreter gets it
        quiet_looks = 0 if _any_runs() else quiet_looks + 1


def _any_runs() -> bool:
    """Return whether one of the threads runs, or would if it got a processor.

    Reading releases the interpreter, so that no thread can seem to sleep because it waits for this one.
    """
    for thread in os.listdir(_THREADS):
        try:
            with open(f"{_THREADS}/{thread}/stat", "rb", buffering=0) as file:
                _, name, rest = file.read(256).partition(_NAME)
        except OSError:
            continue  # it ended meanwhile
        if name and rest.split()[0] != b"S":
            return True
    return False
