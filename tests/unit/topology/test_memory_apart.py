"""Memory that does not come from the allocator."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from shardwright.topology.host_memory import empty_apart

CPU = torch.device("cpu")
MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_it_is_a_flat_tensor_of_its_own(dtype: torch.dtype) -> None:
    first, second = empty_apart(7, dtype, CPU), empty_apart(7, dtype, CPU)
    first.fill_(3)
    second.fill_(4)
    assert first.shape == (7,)
    assert first.dtype == dtype
    assert first.sum() == 21


def test_nothing_to_hold() -> None:
    assert empty_apart(0, torch.float32, CPU).shape == (0,)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_stays_as_long_as_a_view_does_and_then_goes() -> None:
    gc.collect()
    before = resident_bytes()
    view = empty_apart(16 * MIB, torch.float32, CPU).fill_(1)[-2:]
    assert resident_bytes() - before > 60 * MIB
    assert view.tolist() == [1, 1]
    del view
    assert resident_bytes() - before < 4 * MIB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_no_holes_between_what_stays() -> None:
    """The allocator keeps blocks of a size that it has seen before, under anything small that was allocated after them."""
    torch.empty(6 * MIB).fill_(1)
    before = resident_bytes()
    blocks, small = [], []
    for _ in range(8):
        blocks.append(empty_apart(3 * MIB, torch.float32, CPU).fill_(1))
        small.append(torch.ones(1000))
    assert resident_bytes() - before > 90 * MIB
    del blocks
    assert resident_bytes() - before < 20 * MIB
    assert all(float(t.sum()) == 1000 for t in small)
