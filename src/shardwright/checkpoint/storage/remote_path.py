"""A place in an object store, read in the words of pathlib, through fsspec."""

from __future__ import annotations

import datetime
import fnmatch
import io
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from shardwright.checkpoint.storage.attempts import attempt
from shardwright.errors import CheckpointError

PART_BYTES = 8 << 20
"""Longer reads are requests for parts of this size, some at a time."""
_NUM_PARTS = 8
_BLOCK_BYTES = 16 << 10
_NUM_BLOCKS = 32
_LOCAL = ("file", "local")


class Stat(NamedTuple):
    """The part of os.stat_result that checkpoints need. st_mtime_ns: 0 where the store doesn't tell."""

    st_size: int
    st_mtime_ns: int


def is_url(where: str) -> bool:
    """Does a text name a place in a store, rather than a local path?"""
    return "://" in where and not where.startswith(tuple(f"{name}://" for name in _LOCAL))


def open_url(url: str) -> RemotePath:
    """The place that a URL names. Where the store is and who asks comes from the environment and from fsspec's settings.

    Raises: CheckpointError if what reads that kind of URL isn't installed.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        # Other processes change what is there, so listings are never kept.
        fs, key = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        name = url.split("://", 1)[0]
        raise CheckpointError(
            f"{url} can't be opened: {error}",
            remedy=f"install what fsspec needs for {name}:// (pip install 'shardwright[s3]' for s3://), or use another URL",
        ) from error
    return RemotePath(fs, key.rstrip("/"))


class RemotePath:
    """An object, or all objects whose names begin with it and a slash: a folder.

    Nothing is kept between calls. A store that doesn't answer is an error, never an absent file.
    Raises: FileNotFoundError as pathlib does; StorageError for everything else.
    """

    def __init__(self, fs: Any, key: str) -> None:
        self.fs = fs
        self.key = key

    # ------------------------------------------------------------------ names

    @property
    def name(self) -> str:
        """The last part of it."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from the last dot."""
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> RemotePath:
        """The folder that it lies in."""
        return RemotePath(self.fs, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Another one beside it."""
        return self.parent / name

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.fs, f"{self.key}/{name}")

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.key))

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Every process opens the store by itself."""
        return open_url, (str(self),)

    # ------------------------------------------------------------------ what is there

    def exists(self) -> bool:
        """Is there an object, or a folder?"""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Is it an object?"""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Does anything lie in it?"""
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def stat(self) -> Stat:
        """Size and time of an object."""
        return _stat(self._info())

    def sizes(self) -> dict[str, int]:
        """Every file that lies directly in it, with its size in bytes. One request; nothing for a folder that isn't there."""
        return {_name(info): int(info["size"]) for info in self._listed() if info["type"] == "file"}

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies directly in it, in the order of names. Empty where there is nothing."""
        yield from (self / name for name in sorted({_name(info) for info in self._listed()}))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What lies directly in it and has such a name."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # ------------------------------------------------------------------ content

    def open(self) -> io.BufferedReader:
        """The content as a file that reads what is asked for, and a little more."""
        return io.BufferedReader(_Ranges(self), buffer_size=1 << 12)

    def read_bytes(self) -> bytes:
        """The whole content."""
        return cast(bytes, attempt("read", self, partial(self.fs.cat_file, self.key)))

    def read_range(self, start: int, stop: int) -> bytes:
        """Some bytes of the content: [start, stop)."""
        return bytes(self.read_ranges([(start, stop)])[0])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """The same of several ranges; some requests at a time. Raises: EOFError if the content ends before."""
        parts = [(at, min(at + PART_BYTES, stop)) for start, stop in ranges for at in range(start, stop, PART_BYTES)]
        batches = (parts[first : first + _NUM_PARTS] for first in range(0, len(parts), _NUM_PARTS))
        found = (part for batch in batches for part in self._parts(batch))
        made = []
        for start, stop in ranges:
            data = bytearray(max(0, stop - start))
            for at in range(start, stop, PART_BYTES):
                part = next(found)
                if len(part) != min(at + PART_BYTES, stop) - at:
                    raise EOFError(f"{self} ends at {at + len(part)}, expected at least {stop} bytes")
                data[at - start : at - start + len(part)] = part
            made.append(data)
        return made

    def read_text(self, errors: str = "strict") -> str:
        """The whole content as UTF-8."""
        return self.read_bytes().decode(errors=errors)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete an object."""
        try:
            attempt("delete", self, partial(self.fs.rm_file, self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    # ------------------------------------------------------------------ requests

    def _parts(self, parts: list[tuple[int, int]]) -> list[bytes]:
        """Several at a time, where the store's client can."""
        starts, stops = ([part[i] for part in parts] for i in (0, 1))
        work = partial(self.fs.cat_ranges, [self.key] * len(parts), starts, stops, on_error="raise")
        return cast("list[bytes]", attempt("read", self, work))

    def _info(self) -> dict[str, Any]:
        return cast("dict[str, Any]", attempt("look at", self, partial(self.fs.info, self.key)))

    def _kind(self) -> str | None:
        try:
            return str(self._info()["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _listed(self) -> list[dict[str, Any]]:
        try:
            found = attempt("list", self, partial(self.fs.ls, self.key, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Stores with pretended folders may list the folder itself.
        return [info for info in found if info["name"].rstrip("/") != self.key]


class _Ranges(io.RawIOBase):
    """Reads an object piece by piece; of small pieces, the surroundings are kept."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._at = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._at + PART_BYTES * _NUM_PARTS, self._size)
        if stop <= self._at:
            return 0
        if stop - self._at >= _BLOCK_BYTES:
            found = self._path.read_range(self._at, stop)
        else:
            number, offset = divmod(self._at, _BLOCK_BYTES)
            found = self._block(number)[offset : offset + stop - self._at]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            while len(self._blocks) >= _NUM_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            start = number * _BLOCK_BYTES
            self._blocks[number] = self._path.read_range(start, min(start + _BLOCK_BYTES, self._size))
        return self._blocks[number]


def _name(info: dict[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rpartition("/")[2]


def _stat(info: dict[str, Any]) -> Stat:
    """fsspec's file systems name the time in their own ways."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        told = info.get(key)
        if isinstance(told, str):
            told = datetime.datetime.fromisoformat(told.replace("Z", "+00:00"))
        if isinstance(told, datetime.datetime):
            told = told.timestamp()
        if isinstance(told, (int, float)):
            return Stat(int(info["size"] or 0), int(told * 1e9))
    return Stat(int(info["size"] or 0), 0)
