"""Views as tensors of their own."""

from __future__ import annotations

import gc

import torch

from shardwright.checkpoint import host_memory


def test_a_view_alone_shares_and_keeps_its_memory() -> None:
    buffer = torch.arange(100.0)
    alone = host_memory.alone(buffer[10:30].view(4, 5).t())
    buffer[10] = -1.0
    assert alone[0, 0] == -1.0
    assert alone.untyped_storage().nbytes() == 80
    del buffer
    gc.collect()
    assert alone.sum() == sum(range(11, 30)) - 1
