"""How threads of this process get host memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_M_ARENA_MAX = -8  # glibc's malloc.h
_HUGE_PAGE_BYTES = 2 << 20


def share_one_arena() -> None:
    """Let threads that start from now on allocate from the arena that the main thread uses.

    glibc gives each thread its own, and what one microbatch frees could not be used by the next, which runs in another
    thread: a few hundred MB for a model of 30M parameters. Microbatches never run at once, so nobody waits for a lock.
    An arena that exists stays in use; so this comes before communication starts its threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def empty_apart(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor for large values that come and go between small ones that stay.

    On the CPU its memory isn't the allocator's: it goes back to the system with the last tensor that shares it, and leaves
    no hole between others. New pages cost a fault each, huge ones where there are some (a sixth of the time); so it is not for
    what a step uses many times. Less than a huge page comes from the allocator.
    """
    num_bytes = num_elements * dtype.itemsize
    if device.type != "cpu" or num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(num_elements, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)
