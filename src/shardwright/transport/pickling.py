"""Python values to bytes and back: tensors keep their device type, and land on the receiver's device.

A value becomes a *head* (the pickle, with small buffers packed behind it) and the *bulk* (large buffers, sent
from where they lie and received where they stay). Tensors are cut out of the pickle; a view sends only its
own elements. Each tensor of a message has memory of its own on arrival, unless it is the same object twice.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardwright.transport.p2p import is_dense, travelling_strides

_BULK_BYTES: Final = 1 << 18
"""Buffers from this size on travel by themselves."""

_ALIGNMENT: Final = 64


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return the head and the bulk, whose pieces are flat uint8 tensors on the CPU.

    Raises: what pickling the value raises.
    """
    stream = io.BytesIO()
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes == 0:
            return True  # nothing to cut out
        buffers.append(raw)
        return False

    _Pickler(stream, protocol=5, buffer_callback=take).dump(value)
    pickled = stream.getvalue()
    sizes = [buffer.nbytes for buffer in buffers]
    head = bytearray(struct.pack(f"<QI{len(sizes)}Q", len(pickled), len(sizes), *sizes))
    head += pickled
    bulk = []
    for buffer in buffers:
        if buffer.nbytes >= _BULK_BYTES:
            writable = bytearray(buffer) if buffer.readonly else buffer
            bulk.append(torch.frombuffer(writable, dtype=torch.uint8))
        else:
            head += bytes(-len(head) % _ALIGNMENT)
            head += buffer
    return bytes(head), bulk


def bulk_sizes(head: memoryview) -> list[int]:
    """Return the sizes of the bulk's pieces in bytes."""
    return [size for size in _layout(head)[1] if size >= _BULK_BYTES]


def decode(head: memoryview, bulk: Sequence[Tensor], device: torch.device) -> Any:
    """Return the value. `head` must be writable and is kept by the value if it holds arrays.

    device: this process's; where tensors go that were on a device at the sender.
    """
    length, sizes, start = _layout(head)
    pieces = iter(bulk)
    position = start + length
    buffers: list[Any] = []
    for size in sizes:
        if size >= _BULK_BYTES:
            buffers.append(memory_of(next(pieces)))
        else:
            position += -position % _ALIGNMENT
            buffers.append(head[position : position + size])
            position += size
    return _Unpickler(io.BytesIO(head[start : start + length]), buffers, device).load()


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor on the CPU."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _layout(head: memoryview) -> tuple[int, tuple[int, ...], int]:
    length, count = struct.unpack_from("<QI", head)
    sizes = struct.unpack_from(f"<{count}Q", head, 12)
    return length, sizes, 12 + 8 * count


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            return _rebuild_tensor, (
                pickle.PickleBuffer(_bytes_of(value)),
                tuple(value.shape),
                travelling_strides(value),
                value.dtype,
                value.device.type,
                value.requires_grad,
            )
        if isinstance(value, torch.UntypedStorage):
            flat = torch.empty(0, dtype=torch.uint8, device=value.device)
            return _rebuild_storage, (flat.set_(value),)
        if isinstance(value, torch.storage.TypedStorage):
            return _rebuild_typed_storage, (value._untyped_storage, value.dtype)
        return NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._backward_hooks
        and not tensor.__dict__
    )


def _bytes_of(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    elif not tensor.is_contiguous():
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    if tensor.numel() == 0:
        return b""
    return tensor.cpu().view(-1).view(torch.uint8).numpy()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: Sequence[Any], device: torch.device) -> None:
        super().__init__(stream, buffers=buffers)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == "_rebuild_tensor":
            return self._rebuild_tensor
        return super().find_class(module, name)

    def _rebuild_tensor(
        self,
        buffer: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device_type: str,
        requires_grad: bool,
    ) -> Tensor:
        tensor = _rebuild_tensor(buffer, shape, strides, dtype, device_type, requires_grad)
        if device_type != "cpu" and self._device.type == device_type:
            tensor = tensor.detach().to(self._device).requires_grad_(requires_grad)
        return tensor


def _rebuild_tensor(
    buffer: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device_type: str,
    requires_grad: bool,
) -> Tensor:
    view = memoryview(buffer)
    if view.nbytes == 0:
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
    else:
        flat = torch.frombuffer(view, dtype=torch.uint8)
        if view.nbytes < _BULK_BYTES:
            flat = flat.clone()  # out of the head, which would be kept otherwise
        tensor = flat.view(dtype).as_strided(shape, strides)
    return tensor.requires_grad_(requires_grad)


def _rebuild_storage(flat: Tensor) -> torch.UntypedStorage:
    return flat.untyped_storage()


def _rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )
