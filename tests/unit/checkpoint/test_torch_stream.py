"""Torch files that are written tensor by tensor, and tensors that are described before they are there."""

from __future__ import annotations

import argparse
import collections
import mmap as mmap_module
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from shardwright.checkpoint import torch_stream
from shardwright.checkpoint.deferred import Deferred, filled
from shardwright.checkpoint.torch_stream import Joined, StreamedTorchFile
from shardwright.checkpoint.whole import Delivery
from shardwright.errors import CheckpointError

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip


def many() -> dict[str, Tensor]:
    return {
        **{str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES},
        "turned": torch.randn(5, 7).t(),
        "part": torch.randn(9, 4)[2:5, 1:],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def same(one: Tensor, other: Tensor) -> bool:
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_was_added(tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_stream, "_CHUNK_BYTES", 16)
    path, tensors = tmp_path / "file", many()
    file = StreamedTorchFile(path)
    content: Any = collections.OrderedDict((name, file.add(tensor)) for name, tensor in tensors.items())
    content["tied"] = content["turned"]
    content["nested"] = {0: {"step": content["number"], "plain": (1, None)}, "queue": collections.deque([1], maxlen=2)}
    content["real"] = torch.arange(3)
    content._metadata = {"": {"version": 2}}
    size, digest, _ = file.finish(content, "file")
    assert size == path.stat().st_size
    assert digest == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert zipfile.ZipFile(path).testzip() is None
    with torch.serialization.safe_globals([collections.deque]):
        found = torch.load(path, weights_only=True, mmap=mmap)
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name].data_ptr() % 64 == 0 for name, tensor in tensors.items() if tensor.numel())
    assert found["tied"] is found["turned"]
    assert found["nested"][0]["step"] is found["number"]
    assert found["nested"]["queue"] == collections.deque([1], maxlen=2)
    assert torch.equal(found["real"], torch.arange(3))
    assert found._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_of_any_content_is_what_torch_makes_of_it(tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_stream, "_CHUNK_BYTES", 1000)
    wide, tied = torch.randn(30, 20), torch.randn(100)
    content = {
        **many(),
        "channels_last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(300, dtype=torch.complex64).conj(),
        "negative": torch.randn(9, dtype=torch.complex64).conj().imag,
        "columns": wide[:, 3:7],
        "tied": [tied, tied, tied.view(100)],
        "sparse": torch.eye(4).to_sparse(),
        "rows": torch.eye(4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8),
        "storage": torch.arange(4).untyped_storage(),
        "learned": torch.ones(2, requires_grad=True),
        "args": (argparse.Namespace(lr=0.1), {1, 2}, None),
    }
    path = tmp_path / "file"
    written = torch_stream.write_file(path, content, trust=True)
    assert written[:2] == (path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))
    torch.save(content, tmp_path / "torch")
    found, expected = (torch.load(tmp_path / name, weights_only=False, mmap=mmap) for name in ("file", "torch"))
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert type(found[name]) is type(value)
            assert (found[name].layout, found[name].requires_grad) == (value.layout, value.requires_grad)
            assert torch.equal(found[name].to_dense(), value.to_dense()) if value.layout is not torch.strided else (
                value.itemsize == 1 or torch.equal(found[name], value)
            )
    assert found["channels_last"].stride() == expected["channels_last"].stride()
    assert found["columns"].untyped_storage().nbytes() == 30 * 4 * 4, "not the buffer that it is a view of"
    assert len({tensor.data_ptr() for tensor in found["tied"]}) == 1
    assert bytes(found["storage"]) == bytes(expected["storage"])
    assert torch.equal(found["quantized"].dequantize(), expected["quantized"].dequantize())
    assert found["args"] == content["args"]


def test_tensors_back_to_back_are_one(tmp_path: Path) -> None:
    parts = [torch.randn(40_000), torch.randn(3).bfloat16(), torch.zeros(0)]
    content = {"flat": [Joined(parts, torch.float32), Joined([], torch.float32)], "part": parts[0]}
    written = torch_stream.write_file(tmp_path / "file", content, trust=False)
    found = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert torch.equal(found["flat"][0], torch.cat([part.float() for part in parts]))
    assert found["flat"][1].shape == (0,)
    assert torch.equal(found["part"], parts[0])
    assert found["flat"][0].data_ptr() % mmap_module.PAGESIZE == 0
    assert len(written.blocks.digests) == 8, "one block"


@pytest.mark.parametrize("crc", [False, True])
def test_records_beyond_the_limit_of_old_zip_files(tmp_path: Path, crc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    file, tensors = StreamedTorchFile(tmp_path / "file", crc=crc), [torch.randn(100), torch.randn(1000), torch.randn(7)]
    file.finish([file.add(tensor) for tensor in tensors], "file")
    found = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found)


def test_a_full_disk_and_content_that_cannot_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StreamedTorchFile(tmp_path / "one")
    with pytest.raises(CheckpointError, match="one can't be written"):
        file.finish({"stream": open(tmp_path / "one")}, "one")  # noqa: SIM115
    file.close()
    file = StreamedTorchFile(tmp_path / "two")

    def refuse(data: Any) -> int:
        raise OSError(28, "No space left on device")

    class Full:
        write = staticmethod(refuse)

        def abandon(self) -> None:
            kept.abandon()

    kept, file._writer._file = file._writer._file, Full()  # type: ignore[assignment]
    stored = file.add(torch.ones(10))
    with pytest.raises(OSError, match="No space left.*two"):
        file.finish(stored, "two")


# ------------------------------------------------------------------ deferred tensors


def renamed(content: dict[str, Any]) -> dict[str, Any]:
    fused = torch.cat([content["q"].t(), content["k"].t()], 1)
    first, second = content["pair"].chunk(2)
    return {"fused": fused, "again": fused, "first": first.contiguous(), "second": second, "same": content["plain"], "n": 3}


def test_a_function_of_a_state_dict_runs_before_its_tensors_are_there() -> None:
    given = {"q": torch.randn(4, 3), "k": torch.randn(4, 3), "pair": torch.randn(6, 2), "plain": torch.randn(2)}
    deferred = {name: Deferred.named(name, tuple(t.shape), t.dtype) for name, t in given.items()}
    content, want = renamed(dict(deferred)), renamed(given)
    assert content["fused"].needs() == {"q", "k"}
    assert content["same"] is deferred["plain"]
    assert {n: v.shape for n, v in content.items() if n != "n"} == {n: v.shape for n, v in want.items() if n != "n"}
    put: dict[int, Tensor] = {}
    order: list[int] = []

    def take(made: Deferred, value: Tensor) -> None:
        put[id(made)] = value
        order.append(id(made))

    delivery = Delivery(take, content.values())
    for name, tensor in given.items():
        delivery.take(name, tensor)
    assert not delivery._given, "nothing is kept"
    assert order == [id(content[name]) for name in ("fused", "first", "second", "same")]
    found = filled(content, put)
    assert found["n"] == 3
    assert all(torch.equal(found[name], want[name]) for name in want if name != "n")


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.mul_(2),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: t.__imul__(2),
        lambda t: bool(t.sum() > 0),
        lambda t: torch.equal(t, t + 1),
    ],
)
def test_what_needs_values_is_refused(function: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(Deferred.named("t", (3,), torch.float32))
