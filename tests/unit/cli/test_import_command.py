"""`shardwright ckpt import`: from every form, with the optimizer where there is one, into a checkpoint that resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwright.torch as smp
import small_checkpoints
from shardwright.checkpoint.exchange.importing import in_order

Run = Callable[..., tuple[int, str]]


def by_name(file: Path) -> dict[str, Any]:
    content = torch.load(file)
    return {content["param_names"][index]: values for index, values in content["state"].items()}


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            same(found[name], value)
        else:
            assert torch.equal(found[name], value)


@pytest.fixture
def job() -> Iterator[None]:
    smp.init({"microbatches": 2, "log_level": "warning"})
    yield
    smp.shutdown()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_exported_and_imported_again(saved: Path, tmp_path: Path, run: Run, form: str, precision: str) -> None:
    start, out = saved / precision, tmp_path / "out"
    assert run("export", start, out, "--tag", "two", "--format", form, "--optimizer")[0] == 0
    code, text = run("import", out, tmp_path / "new", "--tag", "again", "--json", *(["--trust"] if form == "dcp" else []))
    assert code == 0
    assert json.loads(text)["optimizer"] == len(by_name(start / "optimizer_whole"))
    assert run("verify", tmp_path / "new", "again")[0] == 0
    assert run("diff", start / "whole", tmp_path / "new" / "again")[0] == 0
    same(by_name(tmp_path / "new" / "optimizer_again"), by_name(start / "optimizer_whole"))
    one, other = (torch.load(file) for file in (start / "optimizer_whole", tmp_path / "new" / "optimizer_again"))
    assert {k: v for k, v in other.items() if k not in ("state", "param_groups", "param_names")} == {
        k: v for k, v in one.items() if k not in ("state", "param_groups", "param_names")
    }
    assert [g["weight_decay"] for g in other["param_groups"]] == [0.1, 0.0]
    assert run("reshard", tmp_path / "new" / "again", tmp_path / "layout", "--rdp", 2)[0] == 0
    assert run("diff", start / "two", tmp_path / "layout" / "again") == (0, "no difference\n")


def test_training_goes_on(saved: Path, tmp_path: Path, run: Run, job: None) -> None:
    assert run("export", saved / "fp32", tmp_path / "out", "--tag", "two", "--format", "dcp", "--optimizer")[0] == 0
    assert run("import", tmp_path / "out", tmp_path, "--tag", "again", "--trust")[0] == 0
    assert (tmp_path / "newest").read_text() == "again"
    model, optimizer = small_checkpoints.wrapped(seed=1)
    smp.resume_from_checkpoint(tmp_path, partial=False)
    expected = json.loads((saved / "fp32" / "losses.json").read_text())
    assert small_checkpoints.train(model, optimizer, 2, 4) == expected


def plain(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained without the library."""
    model = small_checkpoints.Small()
    model.blocks[0][0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randint(0, 11, (8, 3))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_torch_file_with_a_numbered_optimizer(tmp_path: Path, run: Run) -> None:
    """Names follow from the order of the model's tensors: buffers, tied tensors and frozen parameters are told apart."""
    model, optimizer = plain(lr=0.5)
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model_state_dict": wrapped, "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    code, text = run("import", tmp_path / "a.pt", tmp_path / "new", "--tag", "a", "--remove-prefix", "module.")
    assert code == 0, text
    same(torch.load(tmp_path / "new" / "a"), model.state_dict())
    assert torch.load(tmp_path / "new" / "user_content_a") == {"epoch": 3}
    names = {p: name for name, p in model.named_parameters()}
    same(by_name(tmp_path / "new" / "optimizer_a"), {names[p]: values for p, values in optimizer.state.items()})
    assert torch.load(tmp_path / "new" / "optimizer_a")["param_groups"][0]["lr"] == 0.5


def test_dcp_folder_of_a_plain_loop(tmp_path: Path, run: Run) -> None:
    """Parameters are numbered, and the frozen one has no state."""
    model, optimizer = plain(lr=0.5)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "losses": [0.5, {"last": 0.25}]}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    code, text = run("import", tmp_path / "dcp", tmp_path / "new", "--tag", "a", "--trust")
    assert code == 0, text
    same(torch.load(tmp_path / "new" / "a"), model.state_dict())
    assert torch.load(tmp_path / "new" / "user_content_a") == {"epoch": 3, "losses": [0.5, {"last": 0.25}]}
    names = {p: name for name, p in model.named_parameters()}
    same(by_name(tmp_path / "new" / "optimizer_a"), {names[p]: values for p, values in optimizer.state.items()})
    for damaged in ("__0_0.distcp", ".metadata"):
        (tmp_path / "dcp" / damaged).write_bytes(b"nothing of this")
        code, text = run("import", tmp_path / "dcp", tmp_path / "new", "--tag", "b", "--trust")
        assert code == 2
        assert "the DCP folder can't be read" in text
    assert not list((tmp_path / "new").glob("*b*"))


def test_tied_tensors_and_views(tmp_path: Path, run: Run) -> None:
    """Once in the file, as they are in the source, and without what lies around them."""
    large = torch.rand(300, 40)
    content = {"one": large[:3], "same": large[:3], "turned": large[:5].T, "negative": torch.rand(3, dtype=torch.cfloat).conj().imag}
    torch.save(content, tmp_path / "a")
    assert run("import", tmp_path / "a", tmp_path / "new", "--tag", "a")[0] == 0
    found = torch.load(tmp_path / "new" / "a")
    same(found, content)
    assert found["one"].data_ptr() == found["same"].data_ptr()
    assert (tmp_path / "new" / "a").stat().st_size < 8000
    torch.save({"model": {"a": torch.eye(3).to_sparse(), "b": torch.rand(2)}}, tmp_path / "sparse")
    assert run("import", tmp_path / "sparse", tmp_path / "new", "--tag", "b")[0] == 0
    assert torch.equal(torch.load(tmp_path / "new" / "b")["a"].to_dense(), torch.eye(3))


def test_files_of_hugging_face(tmp_path: Path, run: Run) -> None:
    content = {f"layer.{i}.weight": torch.rand(3, i + 1) for i in range(4)}
    for name in ("one", "many", "bin"):
        (tmp_path / name).mkdir()
    save_file(content, tmp_path / "one" / "model.safetensors")
    halves: list[dict[str, Tensor]] = [dict(list(content.items())[:2]), dict(list(content.items())[2:])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "many" / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}}
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(content, tmp_path / "bin" / "pytorch_model.bin")
    for source in ("one", "many", "bin", "one/model.safetensors"):
        tag = source.replace("/", "-").removesuffix(".safetensors")
        assert run("import", tmp_path / source, tmp_path / "new", "--tag", tag)[0] == 0
        same(torch.load(tmp_path / "new" / tag), content)
        size = sum(t.numel() * t.element_size() for t in content.values())
        assert (tmp_path / "new" / tag).stat().st_size < size + 8000


def test_names_only_where_there_is_one_way() -> None:
    listed = [("a", (2, 3)), ("mean", (3,)), ("b", (3,)), ("c", (4,)), ("var", (4,))]
    assert in_order([(2, 3), (3,), (3,), (4,), (4,)], listed) == ["a", "mean", "b", "c", "var"]
    assert in_order([(2, 3), (3,), (3,)], listed) == ["a", "mean", "b"]
    assert in_order([(2, 3), (3,)], listed) is None  # mean or b
    assert in_order([(2, 3), None, (3,)], listed) == ["a", "mean", "b"]
    assert in_order([(3,), (2, 3)], listed) is None
    assert in_order([], listed) == []


def test_refused(saved: Path, tmp_path: Path, run: Run) -> None:
    model, optimizer = plain()
    two = torch.optim.SGD(small_checkpoints.groups_of(model), lr=0.1)
    files: dict[str, tuple[Any, str]] = {
        "groups": ({"model": model.state_dict(), "optimizer": two.state_dict()}, "there are several groups"),
        "form": ({"model": model.state_dict(), "optimizer": {"m": 1}}, "not in torch's form"),
        "keys": ({"weights": model.state_dict(), "step": 3}, "--model-key"),
        "empty": ({"model": {}}, "no tensors by name"),
        "list": ([1, 2], "expected a state dict"),
    }
    for name, (content, words) in files.items():
        torch.save(content, tmp_path / name)
        code, text = run("import", tmp_path / name, tmp_path / "new", "--tag", "a")
        assert code == 2
        assert words in text, text
    assert run("export", saved / "fp32", tmp_path / "dcp", "--format", "dcp")[0] == 0
    code, text = run("import", tmp_path / "dcp", tmp_path / "new", "--tag", "a")
    assert code == 2
    assert "could run code" in text
    assert run("import", tmp_path / "none", tmp_path / "new", "--tag", "a")[0] == 2
    assert not (tmp_path / "new").exists()
    arguments = ("import", tmp_path / "groups", tmp_path / "new", "--tag", "a", "--no-optimizer")
    assert run(*arguments)[0] == 0
    for more, words in (((), "exists"), (("--tag", "b.safetensors"), "would name a file of torch's form")):
        code, text = run(*arguments, *more)
        assert code == 2
        assert words in text
    weights = ("import", tmp_path / "keys", tmp_path / "new", "--tag", "b", "--model-key", "weights")
    assert run(*weights)[0] == 0
