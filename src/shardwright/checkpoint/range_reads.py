"""Tensors of a torch file in an object store, read only as far as they are wanted.

The file is loaded without the content of its tensors, which takes its directory and its pickle. Every tensor then knows
where its bytes lie in the file, and so do views of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.errors import CheckpointError

_EXTENT_BYTES = 64 << 20
"""At most so much is read, and held, for one piece."""
_REQUEST_BYTES = 1 << 20
"""What lies between wanted bytes is read along where that is less than this for each request that it saves."""


def is_elsewhere(value: Any) -> bool:
    """Is it a tensor whose content is still in the store?"""
    return isinstance(value, Tensor) and value.device.type == "meta"


def fetched(path: RemotePath, value: Any) -> Any:
    """The value with the content of all tensors in nested containers."""
    if is_elsewhere(value):
        made = torch.empty(value.shape, dtype=value.dtype)
        read_into(path, made, value)
        return made
    if isinstance(value, dict):
        return type(value)((key, fetched(path, item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(fetched(path, item) for item in value)
    return value


@torch.no_grad()
def copy(path: Place, target: Tensor, source: Tensor) -> None:
    """Copy a tensor of a file's content, or a view of one, wherever its own content is."""
    if isinstance(path, RemotePath) and is_elsewhere(source):
        read_into(path, target, source)
    else:
        target.copy_(source)


@torch.no_grad()
def read_into(path: RemotePath, target: Tensor, view: Tensor) -> None:
    """Copy the content of a tensor, or of a view of one, whose content is still in the store.

    Reads each wanted byte once, and what lies between where that is cheaper than asking again.
    """
    if not view.numel():
        return
    wanted = view.numel() * view.element_size()
    extent = _extent(view)
    dim = max((d for d in range(view.dim()) if view.shape[d] > 1), key=view.stride, default=None)
    if dim is not None and extent > _EXTENT_BYTES:
        half = view.shape[dim] // 2
        for start, length in ((0, half), (half, view.shape[dim] - half)):
            read_into(path, target.narrow(dim, start, length), view.narrow(dim, start, length))
    elif dim is not None and extent - wanted > view.shape[dim] * _REQUEST_BYTES:
        for number in range(view.shape[dim]):
            read_into(path, target.select(dim, number), view.select(dim, number))
    else:
        start = _begin(path, view)
        data = bytearray(path.read_range(start, start + extent))
        target.copy_(torch.frombuffer(data, dtype=view.dtype).as_strided(view.shape, view.stride()))


def _extent(view: Tensor) -> int:
    """Bytes from its first element to its last."""
    last = sum((size - 1) * int(stride) for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * int(view.element_size())


def _begin(path: RemotePath, view: Tensor) -> int:
    offset = getattr(view.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise CheckpointError("this release of torch doesn't tell where in a file a tensor lies", where=str(path))
    return int(offset) + int(view.storage_offset()) * view.element_size()
