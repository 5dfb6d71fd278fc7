"""Memory that fused operations use within one call and keep for the next one.

On a CPU the first touch of fresh memory costs several times as much as a copy into it, and many short-lived
large tensors leave holes between those that stay. CUDA's caching allocator has neither problem.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_kept: dict[tuple[str, torch.dtype], Tensor] = {}


def workspace(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialised tensor of dtype and device of `like`.

    It may be used until the same name is asked for again: within one function that doesn't give way to others.
    Never return or save it. Called by: any rank, from the thread that computes.
    """
    size = torch.Size(shape)
    if type(like) not in (Tensor, torch.nn.Parameter) or like.device.type != "cpu":
        return like.new_empty(size)
    numel = size.numel()
    key = (name, like.dtype)
    kept = _kept.get(key)
    if kept is None or kept.numel() < numel:
        with torch.inference_mode(False):
            kept = _kept[key] = torch.empty(numel, dtype=like.dtype, device="cpu")
    return kept[:numel].view(size)


def clear() -> None:
    """Give all kept memory back."""
    _kept.clear()
