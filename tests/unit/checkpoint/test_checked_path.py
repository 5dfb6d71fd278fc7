"""Out of an object store: what is read is checked by blocks, what isn't wanted is neither read nor checked."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwright.checkpoint import integrity, safe_loading, storage
from shardwright.checkpoint.checked_path import CheckedPath
from shardwright.checkpoint.manifest import Blocks, FileRecord
from shardwright.checkpoint.placing import Placing
from shardwright.checkpoint.storage import RemotePath
from stored_files import count_reads

MB = 1 << 20


@pytest.fixture
def folder() -> Iterator[RemotePath]:
    place = storage.place(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(place, RemotePath)
    place.fs.mkdirs(place.key)
    yield place
    place.fs.rm(place.key, recursive=True)


def content() -> dict[str, Any]:
    return {name: torch.randn(n, MB // 4) for name, n in (("first", 5), ("second", 3), ("third", 7))} | {"step": 3}


def write(folder: RemotePath, value: object) -> FileRecord:
    written = safe_loading.write_file(folder / "f", value, trust=False)
    return FileRecord(written.size_bytes, written.digest, "model", 0, written.blocks)


def flip(folder: RemotePath, at: int) -> None:
    data = bytearray((folder / "f").read_bytes())
    data[at] ^= 4
    folder.fs.pipe_file((folder / "f").key, bytes(data))


@pytest.mark.parametrize("in_place", [True, False])
def test_only_what_is_wanted_is_read_and_checked(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    value = content()
    record = write(folder, value)
    flip(folder, 12 * MB)  # in "third"
    read = count_reads(monkeypatch)
    reader = Placing(folder, {"f": record}, trust=False, check=True, in_place=in_place)
    live = torch.zeros(3, MB // 4)
    assert reader.value("f", ("step",)) == 3
    found = reader.placed("f", reader.value("f", ("second",)), live)
    reader.check_all()
    reader.run()
    assert torch.equal(found, value["second"])
    assert found.data_ptr() == live.data_ptr()
    assert sum(read) <= (5 if in_place else 9) * MB + 3 * MB, "a pass more where live values must stay until all is known"

    reader.placed("f", reader.value("f", ("third",)), torch.zeros(7, MB // 4))
    with pytest.raises(integrity.Damaged, match="f is flipped: bytes 12582912 to 13631488"):
        reader.check_all()


@pytest.mark.parametrize("at", [100, -100])
def test_damage_of_what_describes_the_tensors(folder: RemotePath, at: int) -> None:
    record = write(folder, content())
    flip(folder, at)
    reader = Placing(folder, {"f": record}, trust=False, check=True, in_place=True)
    with pytest.raises(integrity.Damaged, match="f is flipped"):
        reader.value("f", ())


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_any_ranges(folder: RemotePath, size: int) -> None:
    data = bytes(torch.randint(0, 256, (997,), dtype=torch.uint8))
    folder.fs.pipe_file((folder / "f").key, data)
    writer = integrity.HashingWriter(folder / "g", block_bytes=size)
    writer.write(data)
    writer.finish()
    record = FileRecord(len(data), "", "model", 0, writer.blocks())
    assert isinstance(record.blocks, Blocks)
    path = CheckedPath(folder / "f", record)
    ranges = [(0, 997), (3, 3), (5, 6), (63, 65), (990, 997), (10, 500), (400, 700)]
    for wanted in (ranges, *([each] for each in ranges)):
        assert path.read_ranges(wanted) == [bytearray(data[start:stop]) for start, stop in wanted]
    with path.open() as file:
        assert file.read() == data
