"""What is known of a tensor without holding it: its spec, and the state that can change what an op returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, strides (in elements), dtype and requires_grad of a tensor that may be elsewhere."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        grad = ", grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{grad}"


def spec_of(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, carries_grad(tensor))


def carries_grad(tensor: torch.Tensor) -> bool:
    """Does a gradient flow into this tensor? A view made under no_grad says that it requires grad, and gets none."""
    if not tensor.requires_grad:
        return False
    return not tensor._is_view() or tensor.grad_fn is not None


@lru_cache(maxsize=4096)
def twin(spec: Spec) -> torch.Tensor:
    """A tensor on the meta device that answers every question about the spec."""
    return torch.empty_strided(
        spec.shape, spec.stride, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad
    )


@lru_cache(maxsize=4096)
def wire_stride(spec: Spec) -> tuple[int, ...]:
    """Strides in which a tensor of this spec travels: its own if its elements fill memory without gaps."""
    expected = 1
    for stride, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return contiguous_stride(spec.shape)
        expected *= size
    return spec.stride


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def for_wire(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """`tensor` in the memory layout in which its spec says that it travels (a copy only if it must be)."""
    stride = wire_stride(spec)
    if tensor.stride() == stride:
        return tensor
    out = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=tensor.device)
    return out.copy_(tensor)


def ambient_key(device_type: str) -> tuple[Any, ...]:
    """State of this thread that changes dtypes or grad flags of results: part of every cache key."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
    )
