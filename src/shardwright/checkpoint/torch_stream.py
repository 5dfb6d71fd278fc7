"""A torch file that is written tensor by tensor, so that its writer needs memory for one of them.

The form is that of torch.save: a zip file of uncompressed records, one for the memory of each tensor, and a pickle of
everything else in which tensors refer to records. torch.save writes the pickle first, but readers look records up by name;
here it comes last, when all tensors are known. What refers to a tensor in the meantime is a `Stored`. Of views only what they
show is written.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html, "Serialized file format for torch.save".
"""

from __future__ import annotations

import collections
import io
import itertools
import mmap
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import torch
from torch import Tensor

from shardwright.checkpoint.integrity import HashingWriter
from shardwright.checkpoint.safe_loading import PortablePickler, Written, check_readable, not_picklable
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.checkpoint.storage.attempts import attempt

_ROOT = "archive"
_ALIGNMENT = 64
_PAGES_FROM_BYTES = 128 << 10
"""Larger tensors begin pages of the file: reading into place takes two thirds of the time then. Half a page is lost for each."""
_MIN_BLOCK_BYTES = 1 << 20
_MAX_BLOCKS = 1024
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
    strides: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True)
class Joined:
    """Stands for a flat tensor in which others, flat too, lie back to back, cast to its dtype: it is written without being made."""

    parts: Sequence[Tensor]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return sum(part.numel() for part in self.parts)


@dataclass(frozen=True)
class _Record:
    """What a tensor's memory is called in the pickle."""

    stored: Stored


def write_file(path: Place, content: object, *, trust: bool, name: str = "") -> Written:
    """Write a new torch file durably, without copies of its tensors, and make sure that it can be read back.

    content: as for torch.save, and `Joined`. The sums of zip files are left out: they take longer than writing.
    name: what errors call it, if the path is only its first one.
    Raises: OSError if the disk refuses; CheckpointError naming the type if the content can't be pickled, or safe loading would
        refuse it.
    """
    work = partial(_write_once, path, content, trust=trust, name=name or path.name)
    # What is lost of an upload can't be sent again alone, so the file begins again.
    return attempt("write", path, work) if isinstance(path, RemotePath) else work()


def _write_once(path: Place, content: object, *, trust: bool, name: str) -> Written:
    file = StreamedTorchFile(path, num_bytes=_num_bytes(content), crc=False)
    try:
        written = file.finish(content, name)
    except BaseException:
        file.close()
        raise
    check_readable(path, trust=trust, name=name)
    return written


def _num_bytes(content: object) -> int:
    """Of the tensors in nested containers, about."""
    if isinstance(content, Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, Joined):
        return content.num_elements * content.dtype.itemsize
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return sum(map(_num_bytes, inner))


class StreamedTorchFile:
    """A new file. In order: `add` for every tensor, `finish` once; or `close` after an exception.

    num_bytes: about how much there will be. Sums are kept of blocks so small that a part is checked by reading little else, so
        large that a manifest of them stays small.
    crc: also write the sums that zip files have; torch.load doesn't look at them, programs for zip files do.
    Errors of the disk are raised by `finish`, see `HashingWriter`.
    """

    def __init__(self, path: Place, *, num_bytes: int = 0, crc: bool = True) -> None:
        block_bytes = _MIN_BLOCK_BYTES
        while block_bytes * _MAX_BLOCKS < num_bytes:
            block_bytes *= 2
        self._writer = HashingWriter(path, block_bytes=block_bytes)
        self._zip = zipfile.ZipFile(cast(IO[bytes], self._writer), "w", zipfile.ZIP_STORED)
        self._crc = crc
        self._num_tensors = 0

    def add(self, tensor: Tensor | Joined) -> Stored:
        """Write a tensor: in the order of memory if that has no gaps, else in row-major order."""
        num_elements, shape, strides, pieces = _laid_out(tensor)
        stored = Stored(str(self._num_tensors), tensor.dtype, shape, strides, num_elements)
        self._num_tensors += 1
        self._write(f"data/{stored.key}", num_elements * tensor.dtype.itemsize, pieces)
        return stored

    def finish(self, content: Any, name: str) -> Written:
        """Write what the file holds, any object with `Stored` in the place of tensors.

        Tensors that it holds besides are written as well.   name: what errors call the file.
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
        return Written(self._writer.size_bytes, digest, self._writer.blocks())

    def close(self) -> None:
        """Give up; the file stays unfinished."""
        self._writer.close()

    def _write(self, name: str, num_bytes: int, pieces: Iterator[memoryview]) -> None:
        info = zipfile.ZipInfo(f"{_ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
        large = num_bytes * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile itself decides
        head = _LOCAL_HEADER_BYTES + len(info.filename) + (_ZIP64_BYTES if large else 0) + _EXTRA_HEADER_BYTES
        alignment = _ALIGNMENT if num_bytes < _PAGES_FROM_BYTES else mmap.PAGESIZE
        padding = -(self._writer.size_bytes + head) % alignment
        info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
        info.file_size = num_bytes
        if self._crc or not name.startswith("data/"):
            with self._zip.open(info, "w", force_zip64=large) as record:
                for piece in pieces:
                    record.write(piece)
            return
        file = cast(IO[bytes], self._zip.fp)
        info.compress_size, info.CRC, info.header_offset = num_bytes, 0, file.tell()
        file.write(info.FileHeader(zip64=large))
        for piece in pieces:
            file.write(piece)
        info.extra = b""
        self._zip.filelist.append(info)
        self._zip.NameToInfo[info.filename] = info


def _laid_out(tensor: Tensor | Joined) -> tuple[int, tuple[int, ...], tuple[int, ...], Iterator[memoryview]]:
    """How a tensor lies in a file: number of elements, shape, strides, bytes."""
    if isinstance(tensor, Joined):
        parts = (row_major_bytes(part.to(tensor.dtype)) for part in tensor.parts)
        return tensor.num_elements, (tensor.num_elements,), (1,), itertools.chain.from_iterable(parts)
    tensor = tensor.detach()
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        in_memory = tensor.as_strided((tensor.numel(),), (1,))
        return tensor.numel(), tuple(tensor.shape), tensor.stride(), row_major_bytes(in_memory)
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.numel(), tuple(tensor.shape), strides, row_major_bytes(tensor)


def row_major_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The elements of a tensor in row-major order, a few MB at a time: no copy of it is made, whatever its strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.nbytes <= _CHUNK_BYTES or (tensor.is_contiguous() and tensor.device.type == "cpu"):
        flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        yield memoryview(cast(Any, flat.numpy())) if flat.numel() else memoryview(b"")
        return
    rows = max(1, len(tensor) * _CHUNK_BYTES // tensor.nbytes)
    for part in tensor.split(rows):
        yield from row_major_bytes(part[0] if len(part) == 1 else part)


class _Pickler(PortablePickler):
    """Writes `Stored` as torch writes tensors."""

    def __init__(self, buffer: io.BytesIO, file: StreamedTorchFile) -> None:
        super().__init__(buffer, protocol=2)
        self._file = file
        self._seen: dict[tuple[Any, ...], tuple[Stored, Tensor]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Joined):
            obj = self._file.add(obj)
        if type(obj) is Tensor and obj.layout is torch.strided and not (obj.requires_grad or obj.is_quantized or obj.is_meta):
            obj = self._once(obj)
        if isinstance(obj, Stored):
            plain: tuple[Any, ...] = (_Record(obj), 0, obj.shape, obj.strides, False, collections.OrderedDict())
            if obj.dtype in _STORAGES:
                return torch._utils._rebuild_tensor_v2, plain
            return torch._utils._rebuild_tensor_v3, (*plain, obj.dtype)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Record):
            stored = obj.stored
            num = stored.num_elements if stored.dtype in _STORAGES else stored.num_elements * stored.dtype.itemsize
            return "storage", _STORAGES.get(stored.dtype, torch.UntypedStorage), stored.key, "cpu", num
        if isinstance(obj, torch.storage.TypedStorage):  # of tensors that torch takes apart itself, such as quantized ones
            memory, kind, num = obj._untyped_storage, getattr(torch, obj._pickle_storage_type()), obj._size()
        elif isinstance(obj, torch.UntypedStorage):
            memory, kind, num = obj, torch.UntypedStorage, obj.nbytes()
        else:
            return None
        stored = self._once(torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory))
        return "storage", kind, stored.key, "cpu", num

    def _once(self, tensor: Tensor) -> Stored:
        """Write a tensor, unless it has been: the same view of the same memory."""
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if key not in self._seen or not tensor.numel():
            self._seen[key] = self._file.add(tensor), tensor  # kept, so that no other one gets its memory
        return self._seen[key][0]
