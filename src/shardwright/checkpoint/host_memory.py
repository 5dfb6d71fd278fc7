"""Large tensors in host memory: made so that touching them for the first time is cheap, and seen without what lies around them.

The first write to ordinary memory costs several times the copy itself: the system maps and clears it page by page. In
huge pages that is a small part of it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_LARGE_BYTES = 4 << 20


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor with undefined values; in huge pages if it is large and the system has them."""
    num_elements = torch.Size(shape).numel()
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    # Room to begin at a huge page; what isn't touched takes no memory.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a system built without them
        return torch.empty(tuple(shape), dtype=dtype)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=-address % _HUGE_PAGE_BYTES).view(tuple(shape))


def empty_like(tensor: Tensor) -> Tensor:
    """The same for a tensor of this shape and dtype; the same strides too, if it has no gaps."""
    made = empty(tensor.shape, tensor.dtype)
    return made.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else made


def is_dense(tensor: Tensor) -> bool:
    """Do its elements fill one range of memory, each byte once?"""
    found: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return found


def alone(tensor: Tensor) -> Tensor:
    """A dense CPU tensor as one whose storage begins and ends with it. Shares its memory, and keeps it alive."""
    as_bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return torch.from_numpy(as_bytes).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
