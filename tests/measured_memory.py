"""Peak memory of real training steps, in bytes of tensors.

glibc is told to give each larger allocation a mapping of its own, which goes back to the system when it is freed. Resident
memory then follows what tensors hold, and its peak, less what is there beside them between steps, is theirs.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwright.torch as smp

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
THRESHOLD_BYTES = 32 * 1024


def map_tensors() -> None:
    """Call it before the tensors that count are made."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES) == 1


def tensor_bytes() -> int:
    """What the tensors that Python can reach hold now."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            memory = found.untyped_storage()
            storages[memory._cdata] = memory.nbytes()
    return sum(storages.values())


def peak_of(step: Callable[[], object], *, warm_up: int = 2, steps: int = 2) -> int:
    """Most bytes of tensors during a few steps, after a few others."""
    for _ in range(warm_up):
        step()
    rest = status("VmRSS") - tensor_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        step()
    return status("VmHWM") - rest


def status(field: str) -> int:
    """A size of this process in /proc, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def train_once(model: Any, optimizer: Any, width: int) -> None:
    """One step of wrapped layers that take `width` features, so that the optimizer has state."""

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.ones(2, width))
    optimizer.step()
    optimizer.zero_grad()
