"""Every way in which a folder can be broken is found and named."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from shardwright.checkpoint import integrity, layout
from shardwright.checkpoint.integrity import HashingWriter
from shardwright.checkpoint.layout import Layout
from shardwright.checkpoint.manifest import FileRecord, Manifest
from shardwright.checkpoint.storage import steps


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with two files and their manifest."""
    files = {}
    for rank, name in enumerate(("model_0_0.pt", "rng_0.pt")):
        writer = HashingWriter(tmp_path / name)
        writer.write(bytes(range(256)) * (rank + 1))
        files[name] = FileRecord(writer.size_bytes, writer.finish(), "model", rank)
    manifest = Manifest("t", "id", 0, Layout(1, 1, 1), {}, files, ())
    (tmp_path / layout.MANIFEST).write_bytes(manifest.to_bytes())
    return tmp_path


def kinds(folder: Path) -> list[tuple[str, str]]:
    return [(problem.kind, problem.file) for problem in integrity.verify(folder)]


def test_a_whole_folder_has_no_problem(checkpoint: Path) -> None:
    assert kinds(checkpoint) == []


def test_cut(checkpoint: Path) -> None:
    file = checkpoint / "model_0_0.pt"
    file.write_bytes(file.read_bytes()[:-1])
    assert kinds(checkpoint) == [("cut", "model_0_0.pt")]


def test_grown(checkpoint: Path) -> None:
    with open(checkpoint / "model_0_0.pt", "ab") as file:
        file.write(b"x")
    assert kinds(checkpoint) == [("grown", "model_0_0.pt")]


def test_flipped(checkpoint: Path) -> None:
    file = checkpoint / "model_0_0.pt"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert kinds(checkpoint) == [("flipped", "model_0_0.pt")]
    assert "checksum" in str(integrity.verify(checkpoint)[0])


def test_missing(checkpoint: Path) -> None:
    (checkpoint / "rng_0.pt").unlink()
    assert kinds(checkpoint) == [("missing", "rng_0.pt")]


def test_extra_is_named_but_harmless(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    assert kinds(checkpoint) == [("extra", "notes.txt")]
    assert integrity.harmful(integrity.verify(checkpoint)) == []


def test_half_written(checkpoint: Path) -> None:
    (checkpoint / layout.MANIFEST).unlink()
    assert kinds(checkpoint) == [("half-written", layout.MANIFEST)]


def test_unreadable(checkpoint: Path) -> None:
    (checkpoint / "rng_0.pt").unlink()
    (checkpoint / "rng_0.pt").symlink_to("rng_0.pt")  # a loop
    assert kinds(checkpoint) == [("unreadable", "rng_0.pt")]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-2], lambda data: data.replace(b'"t"', b'"u"'), lambda _: b""]
)
def test_damaged_manifest(checkpoint: Path, damage: Any) -> None:
    file = checkpoint / layout.MANIFEST
    file.write_bytes(damage(file.read_bytes()))
    assert kinds(checkpoint) == [("manifest", layout.MANIFEST)]


def test_the_writer_hashes_what_is_in_the_file(tmp_path: Path) -> None:
    writer = HashingWriter(tmp_path / "f")
    torch.save({"x": torch.arange(100_000)}, writer)
    digest = writer.finish()
    assert digest == integrity.file_digest(tmp_path / "f")
    assert writer.size_bytes == (tmp_path / "f").stat().st_size


def test_blocks_cover_the_file_whatever_the_pieces_written(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    for number, sizes in enumerate(((1,) * 100, (1000, 5, 3000), (4096,), (10_000,), ())):
        writer, start = HashingWriter(tmp_path / str(number), block_bytes=1024), 0
        for size in (*sizes, len(data) - sum(sizes)):
            writer.write(data[start : start + size])
            start += size
        assert writer.finish() == xxhash.xxh3_128_hexdigest(data)
        expected = [xxhash.xxh3_64_digest(data[at : at + 1024]) for at in range(0, len(data), 1024)]
        assert [writer.blocks().digest(i) for i in range(len(expected))] == expected
        record = FileRecord(writer.size_bytes, "d", "model", 0, writer.blocks())
        written = Manifest("t", "id", 0, Layout(1, 1, 1), {}, {"f": record}, ()).to_bytes()
        assert Manifest.from_bytes(written, where="").files["f"] == record


def test_a_full_disk_is_raised_by_finish_and_names_the_file(tmp_path: Path) -> None:
    def full(operation: str, where: str) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = HashingWriter(tmp_path / "f")
    with steps.watched(full):
        torch.save({"x": torch.arange(10)}, writer)  # survives: the serializer can't handle an exception
    with pytest.raises(OSError, match=r"No space left on device: .*f'") as caught:
        writer.finish()
    assert caught.value.errno == errno.ENOSPC
