"""How threads of this process get host memory."""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8  # glibc's malloc.h


def share_one_arena() -> None:
    """Let threads that start from now on allocate from the arena that the main thread uses.

    glibc gives each thread its own, and what one microbatch frees could not be used by the next, which runs in another
    thread: a few hundred MB for a model of 30M parameters. Microbatches never run at once, so nobody waits for a lock.
    An arena that exists stays in use; so this comes before communication starts its threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
