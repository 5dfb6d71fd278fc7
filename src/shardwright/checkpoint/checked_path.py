"""A file in an object store of which nothing is read unchecked."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from shardwright.checkpoint.integrity import Damaged, damaged_block
from shardwright.checkpoint.manifest import FileRecord
from shardwright.checkpoint.storage import RemotePath

_NUM_KEPT = 2
"""Blocks: those that the next read often begins in."""


class CheckedPath(RemotePath):
    """Reads whole blocks, and compares them with the sums of its record, which has some.

    damage: what a read has raised, where torch has put another error in its place.
    Raises: Damaged from every read of what isn't what was written.
    """

    def __init__(self, path: RemotePath, record: FileRecord) -> None:
        super().__init__(path.fs, path.key)
        assert record.blocks is not None
        self._blocks = record.blocks
        self._size_bytes = record.size_bytes
        self._kept: dict[int, memoryview] = {}
        self.damage: Damaged | None = None

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """As of any path, all blocks that the ranges touch checked."""
        size = self._blocks.num_bytes
        touched = {index for start, stop in ranges for index in range(start // size, -(-stop // size))}
        have = self._checked(sorted(touched - self._kept.keys()))
        have.update((index, block) for index, block in self._kept.items() if index in touched)
        made = []
        for start, stop in ranges:
            data = bytearray(max(0, stop - start))
            for index in range(start // size, -(-stop // size)):
                begin = index * size
                part = have[index][max(0, start - begin) : stop - begin]
                at = max(begin, start) - start
                data[at : at + len(part)] = part
            made.append(data)
        self._kept = {index: memoryview(bytes(have[index])) for index in sorted(touched)[-_NUM_KEPT:]}
        return made

    def _checked(self, indices: Sequence[int]) -> dict[int, memoryview]:
        """Blocks, read together where they lie side by side."""
        size = self._blocks.num_bytes
        runs: list[tuple[int, int]] = []
        for index in indices:
            if runs and runs[-1][1] == index:
                runs[-1] = runs[-1][0], index + 1
            else:
                runs.append((index, index + 1))
        found = super().read_ranges([(first * size, min(last * size, self._size_bytes)) for first, last in runs])
        blocks = {}
        for (first, last), data in zip(runs, found, strict=True):
            for index in range(first, last):
                block = memoryview(data)[(index - first) * size : (index + 1 - first) * size]
                if xxhash.xxh3_64(block).digest() != self._blocks.digest(index):
                    self.damage = damaged_block(self.name, self._size_bytes, size, index)
                    raise self.damage
                blocks[index] = block
        return blocks
