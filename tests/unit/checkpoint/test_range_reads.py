"""Tensors of a file in an object store: the right ones, and no more bytes than they need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwright.checkpoint import range_reads, safe_loading, storage
from shardwright.checkpoint.manifest import Entry, Slice
from shardwright.checkpoint.plan import box_of, plan
from shardwright.checkpoint.reader import Reader
from shardwright.checkpoint.storage import RemotePath
from shardwright.checkpoint.storage.remote_path import Stat
from shardwright.errors import CheckpointError
from stored_files import count_reads, stored

BIG = torch.arange(600 * 1001, dtype=torch.float32).view(600, 1001)
CONTENT = {
    "big": BIG,
    "tied": BIG,
    "column order": torch.arange(35, dtype=torch.bfloat16).view(5, 7).t(),
    "number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "nested": {"list": [torch.tensor([True, False]), "text"], "lr": 0.5},
}


@pytest.fixture
def root() -> Iterator[RemotePath]:
    with stored(CONTENT) as place:
        yield place


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every request."""
    return count_reads(monkeypatch)


def entry(name: str) -> Entry:
    tensor = CONTENT[name]
    assert isinstance(tensor, torch.Tensor)
    shape = tuple(tensor.shape)
    part = Slice("f.pt", (name,), (0,) * len(shape), shape)
    return Entry("model", name, None, shape, str(tensor.dtype).removeprefix("torch."), (part,))


def box(root: RemotePath, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.full(shape, -1.0)
    Reader(root, trust=False).fill(made, offset, plan(entry(name), [box_of(offset, shape)]))
    return made


def test_the_outline_has_shapes_and_values_without_reading_tensors(root: RemotePath, read: list[int]) -> None:
    content = safe_loading.read_lazily(root / "f.pt", trust=False)
    assert content["big"].shape == (600, 1001)
    assert range_reads.is_elsewhere(content["big"])
    assert content["nested"]["lr"] == 0.5
    assert sum(read) < 600_000 < (root / "f.pt").stat().st_size


def test_whole_values(root: RemotePath) -> None:
    reader = Reader(root, trust=False)
    for name in ("big", "tied", "column order", "number", "empty"):
        assert torch.equal(reader.value("f.pt", (name,)), CONTENT[name])  # type: ignore[arg-type]
    nested = reader.value("f.pt", ("nested",))
    assert torch.equal(nested["list"][0], torch.tensor([True, False]))
    assert nested["list"][1] == "text"


@pytest.mark.parametrize(("offset", "shape"), [((100, 0), (57, 1001)), ((599, 1000), (1, 1)), ((3, 500), (590, 77))])
def test_a_box_is_read_alone(root: RemotePath, read: list[int], offset: tuple[int, int], shape: tuple[int, int]) -> None:
    Reader(root, trust=False).outline("f.pt", ())
    before = sum(read)
    made = box(root, "big", offset, shape)
    assert torch.equal(made, BIG[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]])
    extent = 4 * ((shape[0] - 1) * 1001 + shape[1])
    assert sum(read) - 2 * before == extent


def test_what_lies_between_is_left_out_where_it_is_much(
    root: RemotePath, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reads, "_REQUEST_BYTES", 1000)
    Reader(root, trust=False).outline("f.pt", ())
    before = sum(read)
    assert torch.equal(box(root, "big", (3, 500), (590, 77)), BIG[3:593, 500:577])
    assert sum(read) - 2 * before == 590 * 77 * 4


def test_large_boxes_come_in_pieces(root: RemotePath, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reads, "_EXTENT_BYTES", 10_000)
    assert torch.equal(box(root, "big", (0, 0), (600, 1001)), BIG)
    assert torch.equal(box(root, "column order", (1, 1), (5, 3)), CONTENT["column order"][1:6, 1:4])  # type: ignore[index]
    assert max(read[-1:]) <= 10_000


def test_a_file_that_was_cut_is_an_error(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (root / "f.pt").read_bytes()
    storage.of(root).put(root / "f.pt", data[:-100])
    with pytest.raises(CheckpointError, match="can't be loaded"):
        Reader(root, trust=False).value("f.pt", ("big",))


def test_without_knowing_offsets_the_whole_file_is_read(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_loading, "_torch_tells_offsets", lambda: False)
    assert torch.equal(box(root, "big", (100, 0), (57, 1001)), BIG[100:157])


def test_a_refused_type_is_named(root: RemotePath) -> None:
    with pytest.raises(CheckpointError, match=r"g.pt would hold .*Path.*, which safe loading refuses|would hold"):
        safe_loading.write_file(root / "g.pt", {"x": Stat}, trust=False)
