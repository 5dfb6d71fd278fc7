"""A torch file that is written tensor by tensor, so that its writer needs memory for one of them.

The form is that of torch.save: a zip file of uncompressed records, one for the memory of each tensor, and a pickle of
everything else in which tensors refer to records. torch.save writes the pickle first, but readers look records up by name;
here it comes last, when all tensors are known. What refers to a tensor in the meantime is a `Stored`.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html, "Serialized file format for torch.save".
"""

from __future__ import annotations

import collections
import io
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor

from shardwright.checkpoint.integrity import HashingWriter
from shardwright.checkpoint.safe_loading import PortablePickler, not_picklable
from shardwright.checkpoint.storage import Place

_ROOT = "archive"
_ALIGNMENT = 64
_CHUNK_BYTES = 16 << 20
_LOCAL_HEADER_BYTES, _ZIP64_BYTES, _EXTRA_HEADER_BYTES = 30, 20, 4
_PADDING = 0x4246  # the same tag as torch's own padding
_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
"""Other dtypes came after torch gave up typed storages; their files name the dtype beside untyped memory."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Stands for a tensor that is in the file. Where one object stands in several places, loading gives one tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True)
class _Record:
    """What a tensor's memory is called in the pickle."""

    stored: Stored


class StreamedTorchFile:
    """A new file. In order: `add` for every tensor, `finish` once; or `close` after an exception.

    Errors of the disk are raised by `finish`, see `HashingWriter`.
    """

    def __init__(self, path: Place) -> None:
        self._writer = HashingWriter(path)
        self._zip = zipfile.ZipFile(cast(IO[bytes], self._writer), "w", zipfile.ZIP_STORED)
        self._num_tensors = 0

    def add(self, tensor: Tensor) -> Stored:
        """Write a tensor, in row-major order."""
        stored = Stored(str(self._num_tensors), tensor.dtype, tuple(tensor.shape), tensor.numel())
        self._num_tensors += 1
        self._write(f"data/{stored.key}", tensor.numel() * tensor.element_size(), row_major_bytes(tensor))
        return stored

    def finish(self, content: Any, name: str) -> tuple[int, str]:
        """Write what the file holds, any object with `Stored` in the place of tensors.

        Tensors that it holds besides are written as well.   name: what errors call the file.
        Returns: the file's size in bytes and its digest (xxh3_128, hex).
        Raises: OSError with the file's name if the disk refused anything; CheckpointError for content that pickle refuses.
        """
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self).dump(content)
        except Exception as error:
            raise not_picklable(name, error) from error
        for name, data in (("data.pkl", buffer.getvalue()), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
            self._write(name, len(data), iter([memoryview(data)]))
        self._zip.close()
        digest = self._writer.finish()
        return self._writer.size_bytes, digest

    def close(self) -> None:
        """Give up; the file stays unfinished."""
        self._writer.close()

    def _write(self, name: str, num_bytes: int, pieces: Iterator[memoryview]) -> None:
        info = zipfile.ZipInfo(f"{_ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
        large = num_bytes * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile itself decides
        head = _LOCAL_HEADER_BYTES + len(info.filename) + (_ZIP64_BYTES if large else 0) + _EXTRA_HEADER_BYTES
        padding = -(self._writer.size_bytes + head) % _ALIGNMENT
        info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
        info.file_size = num_bytes
        with self._zip.open(info, "w", force_zip64=large) as record:
            for piece in pieces:
                record.write(piece)


def row_major_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The elements of a tensor in row-major order, a few MB at a time: no copy of it is made, whatever its strides."""
    if tensor.numel() * tensor.element_size() <= _CHUNK_BYTES or tensor.is_contiguous():
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        yield memoryview(cast(Any, flat.numpy())) if flat.numel() else memoryview(b"")
        return
    rows = max(1, len(tensor) * _CHUNK_BYTES // (tensor.numel() * tensor.element_size()))
    for part in tensor.split(rows):
        yield from row_major_bytes(part[0] if len(part) == 1 else part)


class _Pickler(PortablePickler):
    """Writes `Stored` as torch writes tensors."""

    def __init__(self, buffer: io.BytesIO, file: StreamedTorchFile) -> None:
        super().__init__(buffer, protocol=2)
        self._file = file

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            obj = self._file.add(obj)
        if isinstance(obj, Stored):
            strides = torch.empty(obj.shape, device="meta").stride()
            plain: tuple[Any, ...] = (_Record(obj), 0, obj.shape, strides, False, collections.OrderedDict())
            if obj.dtype in _STORAGES:
                return torch._utils._rebuild_tensor_v2, plain
            return torch._utils._rebuild_tensor_v3, (*plain, obj.dtype)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Record):
            return None
        stored = obj.stored
        num = stored.num_elements if stored.dtype in _STORAGES else stored.num_elements * stored.dtype.itemsize
        return "storage", _STORAGES.get(stored.dtype, torch.UntypedStorage), stored.key, "cpu", num
