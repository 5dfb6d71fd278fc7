"""Tensors in host memory seen without what lies around them."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Do its elements fill one range of memory, each byte once?"""
    found: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return found


def alone(tensor: Tensor) -> Tensor:
    """A dense CPU tensor as one whose storage begins and ends with it. Shares its memory, and keeps it alive."""
    as_bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return torch.from_numpy(as_bytes).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
