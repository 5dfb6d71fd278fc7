"""Where the bytes of a checkpoint live: a local (or mounted) folder, or an object store by its URL.

`place` makes of a path or URL something that is read like a `pathlib.Path`; for a local one it is a Path. What differs
between kinds of storage when writing (how a file comes to be, what makes a checkpoint valid, how one replaces another)
is behind `Storage`, one interface with two implementations; `of` finds the one for a place.

`steps` tells tests which elementary operation comes next, so that they can let it fail.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.checkpoint.storage.base import NewFile, Place, Storage
from shardwright.checkpoint.storage.local import LocalStorage
from shardwright.checkpoint.storage.remote import ObjectStorage
from shardwright.checkpoint.storage.remote_path import RemotePath, is_url, open_url
from shardwright.errors import CheckpointError

__all__ = ["NewFile", "Place", "RemotePath", "Storage", "absolute", "is_url", "of", "place"]

_LOCAL = LocalStorage()
_OBJECTS = ObjectStorage()


def absolute(where: str) -> str:
    """A path or URL so that it means the same in every folder: relative paths are taken from here."""
    if is_url(where):
        return where.rstrip("/")
    return os.path.abspath(where.split("://", 1)[-1])


def place(where: str | os.PathLike[str] | RemotePath) -> Place:
    """What a path or URL names; `file://` and plain paths are local.

    Raises: CheckpointError if it is neither, or what reads that kind of URL isn't installed.
    """
    if isinstance(where, (Path, RemotePath)):
        return where
    text = os.fspath(where)
    if text.startswith("<"):
        raise CheckpointError(f"path is a {text.strip('<>')}, expected a string or a path")
    return open_url(text) if is_url(text) else Path(text.split("://", 1)[-1])


def of(where: Place) -> Storage:
    """The operations of the storage that a place belongs to."""
    return _OBJECTS if isinstance(where, RemotePath) else _LOCAL
