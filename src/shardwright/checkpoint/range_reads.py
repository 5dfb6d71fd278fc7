"""Tensors of a torch file in an object store, read only as far as they are wanted.

The file is loaded without the content of its tensors, which takes its directory and its pickle. Every tensor then knows
where its bytes lie in the file, and so do views of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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


def has_place(value: Tensor) -> bool:
    """Is it known where in the file the content of such a tensor lies?"""
    return getattr(value.untyped_storage(), "_checkpoint_offset", None) is not None


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


def read_into(path: RemotePath, target: Tensor, view: Tensor) -> None:
    """Copy the content of a tensor, or of a view of one, whose content is still in the store."""
    read_all(path, [(target, view)])


@torch.no_grad()
def read_all(path: RemotePath, wanted: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the content of views of a file's tensors, each into its target, in the order of the file.

    Reads each byte once, also where several views share it (but for the edges of views larger than what is held), and what
    lies between wanted bytes where that is cheaper than asking again. Several requests at a time.
    """
    pieces = sorted((p for pair in wanted for p in _pieces(path, *pair)), key=lambda piece: (piece.start, piece.stop))
    batch: list[_Piece] = []
    end = size = 0
    for piece in pieces:
        more = piece.stop - (end if piece.start - end < _REQUEST_BYTES else piece.start)
        is_shared = end - piece.start > (piece.stop - piece.start) // 2
        if batch and size + more > _EXTENT_BYTES and not is_shared:
            _read_batch(path, batch)
            batch, size, more = [], 0, piece.stop - piece.start
        batch.append(piece)
        end, size = max(end, piece.stop), size + max(0, more)
    _read_batch(path, batch)


class _Piece(NamedTuple):
    """Bytes [start, stop) of a file, in which a view lies that belongs into the target."""

    start: int
    stop: int
    target: Tensor
    view: Tensor


def _pieces(path: RemotePath, target: Tensor, view: Tensor) -> Iterator[_Piece]:
    """A view in parts, none of which is too large, or has much between its bytes."""
    if not view.numel():
        return
    wanted = view.numel() * view.element_size()
    extent = _extent(view)
    dim = max((d for d in range(view.dim()) if view.shape[d] > 1), key=view.stride, default=None)
    if dim is not None and extent > _EXTENT_BYTES:
        half = view.shape[dim] // 2
        for start, length in ((0, half), (half, view.shape[dim] - half)):
            yield from _pieces(path, target.narrow(dim, start, length), view.narrow(dim, start, length))
    elif dim is not None and extent - wanted > view.shape[dim] * _REQUEST_BYTES:
        for number in range(view.shape[dim]):
            yield from _pieces(path, target.select(dim, number), view.select(dim, number))
    else:
        start = _begin(path, view)
        yield _Piece(start, start + extent, target, view)


def _runs(pieces: Iterable[_Piece]) -> list[tuple[int, int]]:
    """What to read for pieces, which are in order."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if runs and piece.start - runs[-1][1] < _REQUEST_BYTES:
            runs[-1] = runs[-1][0], max(runs[-1][1], piece.stop)
        else:
            runs.append((piece.start, piece.stop))
    return runs


def _read_batch(path: RemotePath, pieces: list[_Piece]) -> None:
    runs = _runs(pieces)
    found = zip(runs, path.read_ranges(runs), strict=True)
    (start, stop), data = next(found, ((0, 0), b""))
    for piece in pieces:
        while piece.start >= stop:
            (start, stop), data = next(found)
        size = piece.view.element_size()
        part = torch.frombuffer(data, dtype=torch.uint8, count=piece.stop - piece.start, offset=piece.start - start)
        if part.data_ptr() % size:
            part = part.clone()
        piece.target.copy_(part.view(piece.view.dtype).as_strided(piece.view.shape, piece.view.stride()))


def _extent(view: Tensor) -> int:
    """Bytes from its first element to its last."""
    last = sum((size - 1) * int(stride) for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * int(view.element_size())


def _begin(path: RemotePath, view: Tensor) -> int:
    offset = getattr(view.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise CheckpointError("this release of torch doesn't tell where in a file a tensor lies", where=str(path))
    return int(offset) + int(view.storage_offset()) * view.element_size()
