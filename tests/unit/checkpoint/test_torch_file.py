"""Bytes of a file go where they belong, once, and only if they are those that were written."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import integrity, torch_file, torch_stream
from shardwright.checkpoint.manifest import FileRecord
from shardwright.checkpoint.placing import Placing


@pytest.fixture(params=[256, 1000, 1 << 20], ids="blocks of {}".format)
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch_stream, "_MIN_BLOCK_BYTES", request.param)
    monkeypatch.setattr(torch_stream, "_MAX_BLOCKS", 1 << 30)
    monkeypatch.setattr(torch_file, "_STRETCH_BYTES", 3000)  # so that several threads read
    return int(request.param)


def content() -> dict[str, Any]:
    tied = torch.randn(100)
    return {
        "matrix": torch.randn(37, 53),
        "turned": torch.randn(20, 30).t(),
        "half": torch.randn(7, 11).bfloat16(),
        "step": torch.tensor(3.0),
        "nested": {"flag": torch.tensor([True, False, True]), "list": [torch.arange(1000), "text"]},
        "tied": tied,
        "same": tied,
        "empty": torch.empty(0, 4),
        "number": 5,
        "by_name": collections.defaultdict(list, {"a": torch.arange(7)}),
        "complex": torch.randn(9, dtype=torch.complex64),
        "conjugate": torch.randn(9, dtype=torch.complex64).conj(),
        "negative": torch.randn(9, dtype=torch.complex64).conj().imag,
        "columns": torch.randn(6, 8)[:, 2:5],
        "eight_bits": torch.randn(3, 5).to(torch.float8_e4m3fn),
    }


def write(folder: Path, value: object) -> FileRecord:
    written = torch_stream.write_file(folder / "f", value, trust=False)
    return FileRecord(written.size_bytes, written.digest, "model", 0, written.blocks)


def reader_of(folder: Path, record: FileRecord, *, check: bool = True, in_place: bool = False) -> Placing:
    return Placing(folder, {"f": record}, trust=False, check=check, in_place=in_place)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype
        eight_bits = expected.dtype.is_floating_point and expected.itemsize == 1
        assert torch.equal(*(value.float() if eight_bits else value for value in (found, expected)))
    elif isinstance(expected, dict):
        assert isinstance(found, type(expected)) or type(expected) is dict
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def blank(value: Any) -> Any:
    """The same with tensors of zeros, and some of another kind."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return {key: blank(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("live", [True, False])
def test_all_values_arrive(tmp_path: Path, block_bytes: int, check: bool, live: bool, in_place: bool) -> None:
    saved = content()
    record = write(tmp_path, saved)
    reader = reader_of(tmp_path, record, check=check, in_place=in_place)
    present = {**blank(saved), "turned": torch.zeros(20, 30).t(), "half": torch.zeros(7, 11)} if live else None
    found = reader.placed("f", reader.value("f", ()), present)
    (tmp_path / "f").unlink()  # what is open stays
    reader.check_all()
    reader.run()
    assert_same(found, saved)
    if present is not None:
        assert found["matrix"].data_ptr() == present["matrix"].data_ptr()
        assert found["half"].data_ptr() != present["half"].data_ptr()


def read_and_check(reader: Placing, present: Any) -> None:
    reader.placed("f", reader.value("f", ()), present)
    reader.check_all()


@pytest.mark.parametrize("live", [True, False])
def test_a_flipped_byte_anywhere_is_found_and_nothing_live_changes(tmp_path: Path, block_bytes: int, live: bool) -> None:
    saved = content()
    record = write(tmp_path, saved)
    whole = (tmp_path / "f").read_bytes()
    for at in (*range(0, len(whole), 401), len(whole) - 1):
        (tmp_path / "f").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        present = blank(saved)
        with pytest.raises(integrity.Damaged, match="f is"):
            read_and_check(reader_of(tmp_path, record), present if live else None)
        assert_same(present, blank(saved))


@pytest.mark.parametrize("change", [lambda data: data[:-100], lambda data: data[:100], lambda _: b""])
def test_a_cut_file_is_found(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    record = write(tmp_path, content())
    (tmp_path / "f").write_bytes(change((tmp_path / "f").read_bytes()))
    with pytest.raises(integrity.Damaged):
        reader_of(tmp_path, record).value("f", ())


@pytest.mark.parametrize("live", [True, False])
def test_only_the_blocks_that_are_wanted_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    """What another rank's half holds doesn't matter here; what is wanted is read once, the rest of its blocks along."""
    monkeypatch.setattr(torch_stream, "_MIN_BLOCK_BYTES", 4096)
    saved = torch.randn(512, 1024)  # 2 MB
    record = write(tmp_path, {"w": saved})
    data = bytearray((tmp_path / "f").read_bytes())
    data[data.index(saved[400].numpy().tobytes())] ^= 1
    (tmp_path / "f").write_bytes(data)
    reader = reader_of(tmp_path, record, in_place=live)
    reads: list[int] = []
    first = reader.placed("f", reader.value("f", ("w",))[:256], torch.zeros(256, 1024) if live else None)
    file = reader._files["f"]
    monkeypatch.setattr(file, "_read_into", lambda m, at, real=file._read_into: (reads.append(m.nbytes), real(m, at)))
    reader.check_all()
    reader.run()
    assert torch.equal(first, saved[:256])
    assert first.nbytes <= sum(reads) <= first.nbytes + 2 * 4096
    reader.placed("f", reader.value("f", ("w",))[256:])
    with pytest.raises(integrity.Damaged, match="flipped"):
        reader.check_all()


def test_a_file_without_sums_of_blocks_is_read_all_the_same(tmp_path: Path) -> None:
    saved = content()
    del saved["by_name"]  # safe loading takes it only as we write it
    torch.save(saved, tmp_path / "f")
    record = FileRecord((tmp_path / "f").stat().st_size, "", "model", 0)
    reader = reader_of(tmp_path, record)
    found = reader.placed("f", reader.value("f", ()))
    reader.run()
    assert_same(found, saved)
