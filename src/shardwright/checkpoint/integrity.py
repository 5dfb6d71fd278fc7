"""Is a checkpoint whole? Checksums while writing, and every way in which a folder can be broken, by name.

Only the standard library and xxhash: works without torch and without a process group.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import xxhash

from shardwright.checkpoint import layout, storage
from shardwright.checkpoint.manifest import Blocks, Manifest
from shardwright.checkpoint.storage import Place
from shardwright.checkpoint.storage.attempts import StorageError
from shardwright.errors import CheckpointError

SKIP_CHECKSUMS_ENV = "SHARDWRIGHT_SKIP_CHECKSUMS"
_READ_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20

Kind = Literal["half-written", "manifest", "missing", "cut", "grown", "flipped", "unreadable", "extra"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint folder.

    kind: "half-written" no manifest, the save never finished; "manifest" it is damaged or unknown; "missing"
    a file; "cut"/"grown" a file of the wrong size; "flipped" the right size with other content; "unreadable"
    the system refuses to read it; "extra" a file that the manifest doesn't list (harmless).
    """

    kind: Kind
    file: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file} is {self.kind}: {self.detail}"


class Damaged(CheckpointError):
    """Something read isn't what was saved; says what, as a `Problem` does."""


def damaged_block(file: str, size_bytes: int, block_bytes: int, index: int) -> Damaged:
    """The error for a block whose sum isn't that of what was written."""
    begin = index * block_bytes
    end = min(begin + block_bytes, size_bytes)
    return Damaged(str(Problem("flipped", file, f"bytes {begin} to {end} aren't what was written")))


class HashingWriter:
    """A new file that counts and hashes what is written to it, and reaches the disk before it counts as done.

    torch.save writes through C++ code that must not see an exception, so a failed write is remembered, later
    ones are dropped, and `finish` raises it.

    block_bytes: what `blocks` sums separately.
    Protocol: write, ... , then finish once; or close after an exception.
    """

    def __init__(self, path: Place, *, block_bytes: int = 1 << 20) -> None:
        self.path = path
        self.size_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._block_bytes = block_bytes
        self._block = xxhash.xxh3_64()
        self._block_digests = bytearray()
        self._failure: OSError | None = None
        self._closed = False
        self._file = storage.of(path).create(path)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; returns how many, also when the disk refused them (see `finish`), or the file is closed."""
        left = whole = memoryview(data).cast("B")
        while left and self._failure is None and not self._closed:
            # Small enough to be in the processor's cache still when it is copied to the system's.
            size = min(_WRITE_BYTES, self._block_bytes - self.size_bytes % self._block_bytes)
            part, left = left[:size], left[size:]
            try:
                self._file.write(part)
            except OSError as error:
                self._failure = error
            else:
                self._sum(part)
        return whole.nbytes

    def _sum(self, part: memoryview) -> None:
        self._digest.update(part)
        self._block.update(part)
        self.size_bytes += part.nbytes
        if self.size_bytes % self._block_bytes == 0:
            self._block_digests += self._block.digest()
            self._block.reset()

    def blocks(self) -> Blocks:
        """Digests of the blocks of what was written; after `finish`."""
        rest = self._block.digest() if self.size_bytes % self._block_bytes else b""
        return Blocks(self._block_bytes, bytes(self._block_digests) + rest)

    def flush(self) -> None:
        """Part of the file interface that torch.save expects; `finish` does the work."""

    def finish(self) -> str:
        """Flush to the disk, close, and return the digest (xxh3_128, hex).

        Raises: OSError of the first write that failed (no space left, quota, I/O error), with the file's
            name.
        """
        self._closed = True
        if self._failure is None:
            try:
                self._file.finish()
            except OSError as error:
                self._failure = error
        else:
            self._file.abandon()
        if isinstance(self._failure, StorageError):
            raise self._failure
        if self._failure is not None:
            raise OSError(self._failure.errno, self._failure.strerror, str(self.path)) from self._failure
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close without promises, unless it is finished; for the path after an exception."""
        if not self._closed:
            self._closed = True
            self._file.abandon()


def checksums_skipped() -> bool:
    """Did the user switch off the comparison of checksums when loading?"""
    return os.environ.get(SKIP_CHECKSUMS_ENV, "").strip().lower() in ("1", "true", "yes", "on")


def file_digest(path: Place) -> str:
    """Return the xxh3_128 of a file, hex. Reads it once."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with storage.of(path).open(path) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises: CheckpointError if there is none (the save never finished) or it is damaged.
    """
    path = folder / layout.MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder.name} has no {layout.MANIFEST}: the save never finished, or another library wrote it",
            where=str(folder),
        ) from error
    return Manifest.from_bytes(data, where=str(path))


def inspect(folder: Place) -> tuple[Manifest | None, list[Problem]]:
    """Check everything that can be seen without reading the files: the manifest, that all files are there,
    sizes.

    Returns: the manifest (None if unusable) and the problems, "extra" files included.
    """
    if not (folder / layout.MANIFEST).exists():
        return None, [Problem("half-written", layout.MANIFEST, "not there, so the save never finished")]
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        what = error.what if isinstance(error, CheckpointError) else str(error)
        return None, [Problem("manifest", layout.MANIFEST, what)]
    problems = check_files(folder, manifest, manifest.files, checksums=False)
    listed = {*manifest.files, layout.MANIFEST, manifest.data_folder}
    present = [path.name for place in {folder, data_place(folder, manifest)} for path in place.iterdir()]
    problems += [Problem("extra", name, "not listed in the manifest") for name in sorted(present) if name not in listed]
    return manifest, problems


def data_place(folder: Place, manifest: Manifest) -> Place:
    """Where the files of a checkpoint lie. folder: that of its manifest."""
    return folder / manifest.data_folder if manifest.data_folder else folder


def check_files(
    folder: Place, manifest: Manifest, names: Collection[str], *, checksums: bool
) -> list[Problem]:
    """Compare some files of the manifest with what is on disk.

    names: files listed in the manifest.   checksums: also read them and compare the content.
    """
    problems = []
    place = data_place(folder, manifest)
    sizes = storage.of(place).sizes(place)
    for name in sorted(names):
        record = manifest.files[name]
        try:
            size_bytes = sizes[name] if name in sizes else (place / name).stat().st_size
            if size_bytes != record.size_bytes:
                kind: Kind = "cut" if size_bytes < record.size_bytes else "grown"
                problems.append(Problem(kind, name, f"{size_bytes} bytes, expected {record.size_bytes}"))
            elif checksums and record.digest and (digest := file_digest(place / name)) != record.digest:
                problems.append(Problem("flipped", name, f"checksum {digest}, expected {record.digest}"))
        except FileNotFoundError:
            problems.append(Problem("missing", name, "listed in the manifest, not on disk"))
        except OSError as error:
            problems.append(Problem("unreadable", name, str(error)))
    return problems


def verify(folder: Place) -> list[Problem]:
    """Find every fault of a checkpoint folder, all files read. Empty: it is exactly what was saved."""
    manifest, problems = inspect(folder)
    if manifest is None:
        return problems
    broken = {problem.file for problem in problems}
    return problems + check_files(folder, manifest, manifest.files.keys() - broken, checksums=True)


def harmful(problems: Collection[Problem]) -> list[Problem]:
    """Leave out what doesn't keep a checkpoint from loading."""
    return [problem for problem in problems if problem.kind != "extra"]
