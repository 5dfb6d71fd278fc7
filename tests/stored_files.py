"""A torch file in an object store that lives in memory, and what is read of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwright.checkpoint import safe_loading, storage
from shardwright.checkpoint.storage import RemotePath


@contextmanager
def stored(content: object) -> Iterator[RemotePath]:
    """A folder with the content in `f.pt`."""
    place = storage.place(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(place, RemotePath)
    safe_loading.write_file(place / "f.pt", content, trust=False)
    yield place
    place.fs.rm(place.key, recursive=True)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every request from now on."""
    found: list[int] = []
    original = RemotePath._parts

    def counted(self: RemotePath, parts: list[tuple[int, int]]) -> list[bytes]:
        found.extend(stop - start for start, stop in parts)
        return original(self, parts)

    monkeypatch.setattr(RemotePath, "_parts", counted)
    return found
