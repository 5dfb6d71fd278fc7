"""Which tensor lies where in which flat buffer.

Pure: descriptions of tensors in, a plan out; no process group, no device. The plan depends only on the order
and the descriptions of the tensors, so ranks that hold equal replicas compute equal plans without talking.

Used for gradients (`reducer`), for the flat chunks of a broadcast (`sync`), and for parameters of which every owner
updates a share (`optimizer_state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

MIB = 1024 * 1024


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's `.grad`: its own, unless it was told to accumulate in another one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


@dataclass(frozen=True)
class TensorInfo:
    """What a plan needs to know of one tensor.

    stride: of the tensor itself; kept inside the bucket where the tensor is dense, so that a channels-last
    parameter has a channels-last gradient.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @classmethod
    def of_gradient(cls, name: str, parameter: Tensor) -> TensorInfo:
        """Of a parameter's gradient, which may have another dtype than the parameter."""
        return replace(cls.of(name, parameter), dtype=gradient_dtype(parameter))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in a bucket: elements [offset, offset + num_elements) of the flat buffer.

    position: of the tensor in the sequence given to `plan_buckets`.
    """

    position: int
    name: str
    offset: int
    num_elements: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view_of(self, flat: Tensor) -> Tensor:
        """Return the slot's part of a flat buffer, in the tensor's own shape and strides."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def flattened(self, value: Tensor) -> Tensor:
        """Return the elements of a tensor of the slot's shape in the slot's order of memory; maybe a view."""
        if tuple(value.stride()) == self.stride:
            return flat_memory(value)
        flat = value.new_empty(self.num_elements)
        flat.as_strided(self.shape, self.stride).copy_(value)
        return flat


@dataclass(frozen=True)
class Bucket:
    """A flat buffer of one dtype on one device, and the slots in it, back to back."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]

    @property
    def num_elements(self) -> int:
        last = self.slots[-1]
        return last.offset + last.num_elements

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def padded_elements(self, num_shares: int) -> int:
        """Elements of a buffer that can be cut into so many equal shares."""
        return -(-self.num_elements // num_shares) * num_shares


def plan_buckets(
    tensors: Sequence[TensorInfo],
    *,
    cap_bytes: int,
    first_cap_bytes: int | None = None,
    reverse: bool = False,
) -> tuple[Bucket, ...]:
    """Pack tensors into buckets of one dtype and device each, in one fixed order.

    tensors: in registration order, each parameter once.
    cap_bytes: no bucket is larger, except one that holds a single larger tensor.
    first_cap_bytes: cap of the first bucket of each dtype and device. With gradients a small first bucket
        lets communication begin soon after the backward pass has.
    reverse: pack from the last tensor to the first, the order in which a backward pass finishes gradients.
    Returns: the buckets by the position of their last tensor in packing order, that is, in the order in which
        they fill up if tensors become ready in packing order.
    """
    order = range(len(tensors) - 1, -1, -1) if reverse else range(len(tensors))
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    caps: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    for position in order:
        info = tensors[position]
        key = (info.dtype, info.device)
        cap = caps.setdefault(key, cap_bytes if first_cap_bytes is None else min(first_cap_bytes, cap_bytes))
        members = open_buckets.setdefault(key, [])
        if members and sizes[key] + info.num_bytes > cap:
            closed.append(members)
            members = open_buckets[key] = []
            caps[key] = cap_bytes
        members.append(position)
        sizes[key] = info.num_bytes + (sizes[key] if len(members) > 1 else 0)
    closed.extend(open_buckets.values())
    closed.sort(key=lambda members: order.index(members[-1]))
    return tuple(_bucket(index, [(p, tensors[p]) for p in members]) for index, members in enumerate(closed))


def _bucket(index: int, members: Iterable[tuple[int, TensorInfo]]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for position, info in members:
        stride = dense_strides(info.shape, info.stride)
        slots.append(Slot(position, info.name, offset, info.num_elements, info.shape, stride))
        offset += info.num_elements
    return Bucket(index, info.dtype, info.device, tuple(slots))


def dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return `stride` if it fills memory without gaps or overlaps, else the contiguous strides of `shape`."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if step != expected:
            return contiguous_strides(shape)
        expected *= size
    return stride


def is_dense(tensor: Tensor) -> bool:
    """True if the tensor's elements fill one stretch of memory, in whatever order of dimensions."""
    stride = tuple(tensor.stride())
    return dense_strides(tuple(tensor.shape), stride) == stride


def flat_memory(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as one flat tensor, in memory order, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor in row-major order."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
