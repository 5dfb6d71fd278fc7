"""One torch file of a checkpoint: what is in it, and bytes of it straight into the memory of tensors, checked on the way.

torch.load maps the file; where a tensor lies in it follows from where it lies in the mapping. Bytes are read into place
and summed while they are in the processor's cache; those for memory whose values still count are first read aside and
summed, and read into place when all are known to be good. What can't be read so (other dtype, other device, gaps on either
side) is copied from the mapping then. Several threads read, each a stretch of its own: one request at a time leaves a disk idle.
"""

from __future__ import annotations

import os
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from shardwright.checkpoint import range_reads, safe_loading
from shardwright.checkpoint.checked_path import CheckedPath
from shardwright.checkpoint.integrity import Damaged, Problem, damaged_block
from shardwright.checkpoint.manifest import FileRecord
from shardwright.checkpoint.storage import RemotePath
from shardwright.errors import CheckpointError

_STEP_BYTES = 1 << 18
"""Read at once: what stays in a core's second cache until it is summed."""
_STRETCH_BYTES = 32 << 20
"""What one thread reads in one go."""
_THREADS = 4
_LOCAL_HEADER_BYTES = 30


class Transfer(NamedTuple):
    """Copy `source`, a tensor of a file's content, into `target`, of the same shape.

    at_once: what the target holds may be lost before the source is known to be good.
    """

    source: Tensor
    target: Tensor
    at_once: bool


class _Piece(NamedTuple):
    """Memory that bytes of the file belong into, from `start` on."""

    start: int
    memory: memoryview

    @property
    def stop(self) -> int:
        return self.start + self.memory.nbytes


def is_checkable(record: FileRecord) -> bool:
    """Can parts of this file be checked while they are read?"""
    return record.blocks is not None


class TorchFile:
    """An open file, which may be deleted meanwhile.

    content: what torch.load makes of it; tensors are mapped.
    check: compare what is read with the sums of `record`. Only where `is_checkable`.
    """

    def __init__(self, path: Any, record: FileRecord, *, trust: bool, check: bool) -> None:
        self._path: Any = CheckedPath(path, record) if check and isinstance(path, RemotePath) else path
        self._record = record
        self._check = check
        self._file = open(path, "rb", buffering=0) if isinstance(path, Path) else None  # noqa: SIM115 - closed with it
        records = self._records()
        if check and self._file is not None:
            self._check_ends(records)
        try:
            self.content = safe_loading.read_lazily(self._path, trust=trust)
        except CheckpointError:
            if isinstance(self._path, CheckedPath) and self._path.damage is not None:
                raise self._path.damage from None
            raise
        self._base = _base(self.content, records, self._record.size_bytes)

    def _records(self) -> list[tuple[int, int, int]]:
        """Of each tensor in the file: where its header begins, where its bytes begin, how many there are."""
        if self._file is None:
            return []
        found = []
        try:
            with zipfile.ZipFile(self._path) as archive:
                for info in archive.infolist():
                    if info.file_size and info.filename.split("/")[-2:-1] == ["data"]:
                        header = os.pread(self._file.fileno(), _LOCAL_HEADER_BYTES, info.header_offset)
                        name, extra = struct.unpack_from("<HH", header, 26)
                        start = info.header_offset + _LOCAL_HEADER_BYTES + name + extra
                        found.append((info.header_offset, start, info.file_size))
        except (zipfile.BadZipFile, struct.error, ValueError) as error:
            if self._check:
                raise Damaged(str(Problem("flipped", self._path.name, f"not a readable archive: {error}"))) from error
            return []
        return sorted(found)

    def _check_ends(self, records: Sequence[tuple[int, int, int]]) -> None:
        """Make sure of all but the tensors, before anything is made of it."""
        size = self._record.size_bytes
        first, last = (records[0][1], records[-1][1] + records[-1][2]) if records else (size, size)
        self._check_ranges([(0, first), (last, size)], [])

    def check(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Make sure of the bytes of these; read those that may be read at once. Returns: what is left to fetch.

        Raises: Damaged if some aren't what was written.
        """
        if self._file is None:  # each read is checked
            self.fetch([transfer for transfer in transfers if transfer.at_once])
            rest = [transfer for transfer in transfers if not transfer.at_once]
            for source, *_ in rest:
                range_reads.copy(self._path, torch.empty(source.shape, dtype=source.dtype), source)
            return rest
        if self._base is None:
            self._check_ranges([(0, self._record.size_bytes)], [])
            return list(transfers)
        pieces, rest = self._pieces([transfer for transfer in transfers if transfer.at_once])
        rest += [transfer for transfer in transfers if not transfer.at_once]
        ranges = sorted(self._range(source) for source, *_ in transfers if source.numel())
        self._check_ranges(ranges, pieces)
        return rest

    def fetch(self, transfers: Sequence[Transfer]) -> None:
        """Copy values into place, in the order of the file."""
        if isinstance(self._path, RemotePath):
            elsewhere = [transfer for transfer in transfers if range_reads.is_elsewhere(transfer.source)]
            range_reads.read_all(self._path, [(transfer.target, transfer.source) for transfer in elsewhere])
            transfers = [transfer for transfer in transfers if not range_reads.is_elsewhere(transfer.source)]
        pieces, rest = self._pieces(transfers) if self._base is not None else ([], transfers)
        stretches = [
            _Piece(piece.start + start, piece.memory[start : start + _STRETCH_BYTES])
            for piece in pieces
            for start in range(0, piece.memory.nbytes, _STRETCH_BYTES)
        ]

        def read(stretch: _Piece) -> None:
            for start in range(0, stretch.memory.nbytes, _STEP_BYTES):
                self._read_into(stretch.memory[start : start + _STEP_BYTES], stretch.start + start)

        self._with_threads(read, stretches)
        with torch.no_grad():
            for source, target, _ in rest:
                range_reads.copy(self._path, target, source)

    def _pieces(self, transfers: Sequence[Transfer]) -> tuple[list[_Piece], list[Transfer]]:
        """Those that can be read into place, in order, and the others."""
        pieces: list[_Piece] = []
        rest: list[Transfer] = []
        for transfer in sorted(transfers, key=lambda transfer: transfer.source.data_ptr()):
            source, target, _ = transfer
            if not source.numel():
                continue
            start, _ = self._range(source)
            if _is_straight(source, target) and (not pieces or pieces[-1].stop <= start):
                pieces.append(_Piece(start, _memory_of(target)))
                torch.autograd.graph.increment_version(target)
            else:
                rest.append(transfer)
        return pieces, rest

    def _range(self, tensor: Tensor) -> tuple[int, int]:
        """Where the first element of one from the content begins in the file, and the last one ends."""
        assert self._base is not None
        start = tensor.data_ptr() - self._base
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * tensor.element_size()

    def _check_ranges(self, ranges: Sequence[tuple[int, int]], pieces: Sequence[_Piece]) -> None:
        """Check all blocks that the ranges touch, and read the pieces, which lie in some of them. Both in order."""
        assert self._record.blocks is not None
        num_bytes = self._record.blocks.num_bytes
        touched = dict.fromkeys(
            index for start, stop in ranges for index in range(start // num_bytes, -(-stop // num_bytes))
        )
        stops = [piece.stop for piece in pieces]

        def check(indices: Sequence[int]) -> None:
            aside = memoryview(bytearray(_STEP_BYTES))
            for index in indices:
                begin = index * num_bytes
                end = min(begin + num_bytes, self._record.size_bytes)
                self._check_block(index, _cover(begin, end, pieces, bisect_right(stops, begin)), aside)

        self._with_threads(check, _batches(list(touched), max(1, _STRETCH_BYTES // num_bytes)))

    def _check_block(self, index: int, parts: Iterator[tuple[int, int, memoryview | None]], aside: memoryview) -> None:
        """Read the parts of a block, into their memory or aside, and compare its sum."""
        assert self._record.blocks is not None
        digest = xxhash.xxh3_64()
        for start, stop, memory in parts:
            for low in range(start, stop, _STEP_BYTES):
                high = min(low + _STEP_BYTES, stop)
                step = aside[: high - low] if memory is None else memory[low - start : high - start]
                self._read_into(step, low)
                digest.update(step)
        if digest.digest() != self._record.blocks.digest(index):
            raise damaged_block(self._path.name, self._record.size_bytes, self._record.blocks.num_bytes, index)

    def _with_threads(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Do all, in about this order. Raises: what the first of them raised."""
        if len(items) < 2:
            for item in items:
                work(item)
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(work, items):
                pass

    def _read_into(self, memory: memoryview, start: int) -> None:
        assert self._file is not None
        while memory:
            count = os.preadv(self._file.fileno(), [memory], start)
            if count == 0:
                raise Damaged(str(Problem("cut", self._path.name, f"it ends at byte {start}")))
            memory, start = memory[count:], start + count


def _cover(
    begin: int, end: int, pieces: Sequence[_Piece], first: int
) -> Iterator[tuple[int, int, memoryview | None]]:
    """Bytes [begin, end) of a file in parts [start, stop): with the memory of those that are in a piece.

    pieces: in order.   first: number of the first one that ends after `begin`.
    """
    while first < len(pieces) and (piece := pieces[first]).start < end:
        first += 1
        if piece.start > begin:
            yield begin, piece.start, None
        start, stop = max(piece.start, begin), min(piece.stop, end)
        yield start, stop, piece.memory[start - piece.start : stop - piece.start]
        begin = stop
    if begin < end:
        yield begin, end, None


def _batches(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _base(content: Any, records: Sequence[tuple[int, int, int]], size_bytes: int) -> int | None:
    """The address at which the file is mapped; None if the tensors aren't just those of the archive, as torch writes it."""
    storages: dict[int, int] = {}
    for tensor in _tensors(content):
        if tensor.layout is torch.strided and tensor.numel():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    if not storages or len(storages) != len(records):
        return None
    base = min(storages) - records[0][1]
    expected = {base + start: num_bytes for _, start, num_bytes in records}
    return base if storages == expected and records[-1][1] + records[-1][2] <= size_bytes else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _is_straight(source: Tensor, target: Tensor) -> bool:
    """Are the bytes of the source, in their order, those of the target?"""
    same = source.dtype is target.dtype and target.device.type == "cpu" and type(target.detach()) is Tensor
    as_stored = not any(tensor.is_conj() or tensor.is_neg() for tensor in (source, target))
    return same and as_stored and source.is_contiguous() and target.is_contiguous()


def _memory_of(target: Tensor) -> memoryview:
    return target.detach().view(-1).view(torch.uint8).numpy().data
