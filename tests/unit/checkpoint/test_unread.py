"""State dicts whose tensors are in an object store: translated, cut and loaded like any other, and read only as far as needed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.checkpoint import full_files, safe_loading, storage, unread
from shardwright.checkpoint.storage import RemotePath
from shardwright.checkpoint.unread import Unread
from shardwright.errors import CheckpointError
from stored_files import count_reads, stored

BIG = torch.arange(600 * 1001, dtype=torch.float32).view(600, 1001)
OTHER = torch.arange(300 * 1001, dtype=torch.bfloat16).view(300, 1001)
CONTENT = {"big": BIG, "tied": BIG, "other": OTHER, "equal": BIG.clone(), "one": torch.tensor(1.0), "text": "t"}


@pytest.fixture
def root() -> Iterator[RemotePath]:
    with stored(CONTENT) as place:
        yield place


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every request."""
    return count_reads(monkeypatch)


@pytest.fixture
def content(root: RemotePath, read: list[int]) -> dict[str, Any]:
    found = full_files.read_state_dict(root / "f.pt", trust=False)
    read.clear()
    return found


def heads(t: Tensor) -> Tensor:
    """The rows of some of three heads, which lie apart."""
    return t.unflatten(0, (3, 2, -1)).select(1, 1).flatten(0, 1)


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "rows": (lambda t: t[100:150], 50 * 1001),
    "a copy of rows": (lambda t: t.detach().clone()[100:150].contiguous().cpu(), 50 * 1001),
    "rows of a transposed copy": (lambda t: t.t().clone(memory_format=torch.contiguous_format).t()[7:9], 2 * 1001),
    "a column": (lambda t: t[:, 5], 599 * 1001 + 1),
    "heads": (heads, 500 * 1001),
    "joined": (lambda t: torch.cat([t[3:4], t[1:2] * 2]), 3 * 1001),
    "flat memory of a transposed one": (lambda t: t.t().as_strided((600 * 1001,), (1,)), 600 * 1001),
    "filled": (lambda t: t.new_zeros(3).copy_(t[0, :3]), 3),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_made_of_them(content: dict[str, Any], read: list[int], way: str) -> None:
    function, num_elements = WAYS[way]
    expected = function(BIG)
    target = torch.empty(expected.shape)
    target.copy_(function(content["big"]))
    assert torch.equal(target, expected)
    assert sum(read) == num_elements * 4


def test_each_byte_is_read_once_in_a_block(content: dict[str, Any], read: list[int]) -> None:
    model = nn.ParameterDict({"all": nn.Parameter(torch.empty(600, 1001)), "rows": nn.Parameter(torch.empty(50, 1001))})
    half = torch.empty(300, 1001)
    with torch.no_grad(), unread.landing_together():
        model["all"].copy_(content["big"])
        model["all"].copy_(content["tied"])  # the same target twice
        model["rows"].copy_(content["big"][7:57])
        half.copy_(content["other"])
        assert read == []
    assert torch.equal(model["all"], BIG)
    assert torch.equal(model["rows"], BIG[7:57])
    assert torch.equal(half, OTHER.float())
    assert sum(read) < BIG.nbytes + OTHER.nbytes + 4096  # tensors begin pages


def test_a_block_that_fails_changes_nothing(content: dict[str, Any], read: list[int]) -> None:
    target = torch.zeros(600, 1001)

    def fail() -> None:
        with unread.landing_together():
            target.copy_(content["big"])
            raise ValueError("another name is missing")

    with pytest.raises(ValueError, match="name"):
        fail()
    assert not target.any()
    assert read == []
    target.copy_(content["big"])  # no block is open now
    assert torch.equal(target, BIG)


def test_looking_at_values_reads_them(content: dict[str, Any]) -> None:
    assert not content["big"].is_meta
    assert torch.equal(content["big"], content["equal"])
    assert content["one"].item() == 1.0
    assert content["big"][0, :3].tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="would change"):
        content["big"].mul_(2)
    with pytest.raises(RuntimeError):
        content["big"].view(7)


def test_here_keeps_structure_and_ties(content: dict[str, Any], read: list[int]) -> None:
    nested = collections.OrderedDict(a=[content["big"], content["big"].clone()], b={"c": (content["big"], 3)})
    found = unread.here(nested)
    assert type(found) is collections.OrderedDict
    assert found["a"][0] is found["b"]["c"][0]
    assert found["a"][0] is not found["a"][1]
    assert torch.equal(found["a"][1], BIG)
    assert found["b"]["c"][1] == 3
    assert sum(read) == BIG.nbytes


def test_modules_load_them(root: RemotePath, read: list[int]) -> None:
    source = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    source[1].running_mean.fill_(3)
    safe_loading.write_file(root / "m.pt", source.state_dict(), trust=False)
    other = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    other.load_state_dict(full_files.read_state_dict(root / "m.pt", trust=False))
    for name, value in source.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_safetensors_files(root: RemotePath, read: list[int]) -> None:
    from safetensors.torch import save

    tensors = {"big": BIG, "other": OTHER, "none": torch.empty(0, 3)}
    storage.of(root).put(root / "f.safetensors", save(tensors))
    content = full_files.read_state_dict(root / "f.safetensors", trust=False)
    assert sum(read) < 1000
    assert all(isinstance(value, Unread) for value in content.values())
    for name, value in unread.here(content).items():
        assert torch.equal(value, tensors[name])
    for data in (b"", b"{}", save(tensors)[:50], b"\x00" * 100):
        storage.of(root).put(root / "bad.safetensors", data)
        with pytest.raises(CheckpointError, match="is no safetensors file"):
            full_files.read_state_dict(root / "bad.safetensors", trust=False)


def test_files_of_the_form_before_torch_1_6_are_read_whole(root: RemotePath, tmp_path: Any) -> None:
    torch.save({"big": BIG}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    storage.of(root).upload(tmp_path / "old.pt", root / "old.pt")
    assert torch.equal(full_files.read_state_dict(root / "old.pt", trust=False)["big"], BIG)
