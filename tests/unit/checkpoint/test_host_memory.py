"""Large tensors in huge pages, and views as tensors of their own."""

from __future__ import annotations

import gc

import pytest
import torch

from shardwright.checkpoint import host_memory


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 20, 3), (1025, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_an_empty_tensor_is_what_was_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = host_memory.empty(shape, dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == (shape, dtype, True)
    assert made.untyped_storage().nbytes() == made.nbytes
    made.fill_(3)
    gc.collect()
    assert bool((made == 3).all())


def test_strides_are_kept_without_gaps_and_dropped_with() -> None:
    turned = torch.zeros(1500, 2000).t()
    assert host_memory.empty_like(turned).stride() == turned.stride()
    assert host_memory.empty_like(torch.zeros(1500, 2000)[:, :1900]).is_contiguous()


def test_a_view_alone_shares_and_keeps_its_memory() -> None:
    buffer = torch.arange(100.0)
    alone = host_memory.alone(buffer[10:30].view(4, 5).t())
    buffer[10] = -1.0
    assert alone[0, 0] == -1.0
    assert alone.untyped_storage().nbytes() == 80
    del buffer
    gc.collect()
    assert alone.sum() == sum(range(11, 30)) - 1
