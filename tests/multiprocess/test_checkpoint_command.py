"""`shardwright ckpt` on checkpoints of real jobs in several layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import models
import shardwright.torch as smp
from any_layout import config, train, wrap
from harness import RankPool
from shardwright.cli.main import main


def save_some(path: str, tags: list[str], partial: bool = True) -> None:
    made, model, optimizer = wrap("mlp")
    for step, tag in enumerate(tags):
        train(made, model, optimizer, step, step + 1)
        smp.save_checkpoint(path, tag, partial=partial, model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def saved(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three partial checkpoints of two stages, one full one; in another folder the same training with two replicas."""
    path = tmp_path_factory.mktemp("saved")
    stages, replicas = config((2, 1, 1)), config((1, 1, 2), shard_optimizer_state=True)
    pool2.run(save_some, str(path / "a"), ["one", "two", "three"], config=stages)
    pool2.run(save_some, str(path / "a"), ["whole"], False, config=stages)
    pool2.run(save_some, str(path / "b"), ["one", "two"], config=replicas)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit code and what was printed."""
    with pytest.raises(SystemExit) as end:
        main(["ckpt", *map(str, arguments)])
    printed = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), printed.out + printed.err


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "ls", folder / "a")
    assert code == 0
    lines = text.splitlines()[1:]
    assert sorted(line[2:].split()[0] for line in lines) == ["one_partial", "three_partial", "two_partial", "whole"]
    assert [line for line in lines if line.startswith("* ")] == [line for line in lines if "whole" in line]
    assert "pp=2 tp=1 rdp=1" in text
    (folder / "a" / "two_partial" / "model_1_0.pt").unlink()
    found = {c["name"]: c for c in json.loads(run(capsys, "ls", folder / "a", "--json")[1])}
    assert not found["two_partial"]["complete"]
    assert "model_1_0.pt is missing" in found["two_partial"]["problems"][0]
    assert found["whole"]["kind"] == "full"
    assert all(c["complete"] for name, c in found.items() if name != "two_partial")


def test_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.make("mlp").model
    count = sum(p.numel() for p in model.parameters())
    code, text = run(capsys, "show", folder / "a", "two", "--tensors")
    assert code == 0
    assert f"{count:,}" in text
    assert all(name in text for name in model.state_dict())
    content = json.loads(run(capsys, "show", folder / "b", "--tensors", "--json")[1])
    assert content["name"] == "two_partial"
    moments = [t for t in content["tensors"] if t["name"].endswith("[exp_avg]")]
    assert len(moments) == len(list(model.parameters()))


def test_verify_finds_every_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", folder / "a", "--all")[0] == 0
    for name in ("two_partial/optimizer_1_0.pt", "whole"):
        flip(folder / "a" / name)
        code, text = run(capsys, "verify", folder / "a", name.split("/")[0])
        assert code == 1
        assert f"{Path(name).name} is flipped" in text
    result = json.loads(run(capsys, "verify", folder / "a", "--all", "--json")[1])
    assert {name for name, problems in result.items() if problems} == {"two_partial", "whole"}


def test_diff_over_layouts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages and two replicas saw the same batches, so that only roundings differ."""
    assert run(capsys, "diff", folder / "a/one", folder / "b/one", "--tolerance", "1e-6") == (0, "no difference\n")
    code, text = run(capsys, "diff", folder / "a/one", folder / "b/two", "--tolerance", "1e-6")
    assert code == 1
    assert "head.weight" in text
    assert "[exp_avg]" in text
    assert run(capsys, "diff", folder / "a/whole", folder / "a/one")[0] == 1  # the full one has no entries of moments


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = tmp_path / name
    assert run(capsys, "export", folder / "b", out, "--tag", "one")[0] == 0
    content = load_file(out) if out.suffix == ".safetensors" else torch.load(out)
    made = models.make("mlp").model
    made.load_state_dict(content, strict=True)
    code, text = run(capsys, "export", folder / "b", out)
    assert code == 2
    assert "exists" in text


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "b" / "one_partial" / "manifest.json").unlink()  # incomplete ones go first
    assert "would delete one_partial" in run(capsys, "prune", folder / "b", "--keep", 1, "--dry-run")[1]
    assert (folder / "b" / "one_partial").exists()
    assert run(capsys, "prune", folder / "b", "--keep", 1)[0] == 0
    assert sorted(p.name for p in (folder / "b").iterdir()) == ["newest", "two_partial"]
    assert "nothing to delete" in run(capsys, "prune", folder / "b", "--keep", 1)[1]


@pytest.mark.parametrize("arguments", [("ls", "{}/none"), ("show", "{}/a", "other"), ("verify", "{}/a", "other")])
def test_what_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, text = run(capsys, *(a.format(folder) for a in arguments))
    assert code == 2
    assert "try:" in text
