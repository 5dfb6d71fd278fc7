"""FF-35 a: whatever reads a checkpoint, the file that would run code runs nothing, and is named; there is one way to allow it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwright.torch as smp
import small_checkpoints
from hostile_files import MakesFolder, plant
from shardwright.checkpoint import safe_loading
from shardwright.errors import CheckpointError

PARTIAL = ["model_0_0.pt", "optimizer_0_0.pt", "user_content.pt", "rng_0.pt"]
FULL = ["whole", "optimizer_whole", "user_content_whole", "rng_whole"]
Run = Callable[..., tuple[int, str]]
CONFIG = {"microbatches": 2, "log_level": "warning"}


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints."""
    shutil.copytree(saved / "fp32", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.mark.parametrize("name", FULL)
def test_a_full_checkpoint(root: Path, marker: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(root / "manifest_whole.json", name, marker)
    smp.init(CONFIG)
    try:
        small_checkpoints.wrapped()
        with pytest.raises(CheckpointError) as caught:
            smp.resume_from_checkpoint(root, "whole", partial=False)
        assert f"{name} holds" in str(caught.value)
        assert safe_loading.TRUST_ENV in str(caught.value)
        assert not marker.exists()
        monkeypatch.setenv(safe_loading.TRUST_ENV, "1")
        with pytest.raises(CheckpointError) if name != "user_content_whole" else pytest.MonkeyPatch.context():
            smp.resume_from_checkpoint(root, "whole", partial=False)
        assert marker.exists(), "the documented way to allow it"
    finally:
        smp.shutdown()


def test_a_pickle_in_the_place_of_text(root: Path, marker: Path) -> None:
    smp.init(CONFIG)
    try:
        small_checkpoints.wrapped()
        (root / "newest").write_bytes(pickle.dumps(MakesFolder(marker)))
        assert smp.resume_from_checkpoint(root) == {"step": 2}, "the latest that is whole"
        for name, tag in (("manifest_whole.json", "whole"), ("two_partial/manifest.json", "two")):
            (root / name).write_bytes(pickle.dumps(MakesFolder(marker)))
            with pytest.raises(CheckpointError, match=Path(name).name.replace(".", r"\.")):
                smp.resume_from_checkpoint(root, tag, partial=tag == "two")
    finally:
        smp.shutdown()
    assert not marker.exists()


def test_files_of_others_and_of_single_ranks(root: Path, marker: Path) -> None:
    torch.save({"x": MakesFolder(marker)}, root / "fullmodel.pt")
    torch.save({"x": MakesFolder(marker)}, root / "state_0_0")
    (root / "by_hand_partial").mkdir()
    for name in ("model_0_0.pt", "optimizer_0_0.pt"):
        torch.save({"x": MakesFolder(marker)}, root / "by_hand_partial" / name)
    smp.init(CONFIG)
    try:
        small_checkpoints.wrapped()
        with pytest.raises(CheckpointError, match=r"fullmodel\.pt holds"):
            smp.resume_from_checkpoint(root, "fullmodel.pt", partial=False)
        with pytest.raises(CheckpointError, match="state_0_0 holds"):
            smp.load(str(root / "state"))
        with pytest.raises(CheckpointError, match=r"_0_0\.pt holds"):
            smp.resume_from_checkpoint(root, "by_hand")
    finally:
        smp.shutdown()
    assert not marker.exists()


@pytest.mark.parametrize("name", [*PARTIAL, *FULL])
def test_commands_that_look(root: Path, marker: Path, name: str, run: Run) -> None:
    partial = name in PARTIAL
    tag, mark = ("two", root / "two_partial" / "manifest.json") if partial else ("whole", root / "manifest_whole.json")
    plant(mark, name, marker)
    run("show", root, tag, "--tensors")
    run("verify", root, "--all")
    code, text = run("diff", root / tag, root / ("whole" if partial else "two"))
    assert not marker.exists()
    if name in ("model_0_0.pt", "whole"):
        assert code != 0
        assert f"{name} holds" in text


@pytest.mark.parametrize("name", ["model_0_0.pt", "whole"])
def test_commands_that_convert(root: Path, marker: Path, tmp_path: Path, name: str, run: Run) -> None:
    tag, mark = ("two", root / "two_partial" / "manifest.json") if name in PARTIAL else ("whole", root / "manifest_whole.json")
    plant(mark, name, marker)
    torch.save({"model": MakesFolder(marker)}, tmp_path / "plain.pt")
    for *call, place in (
        ("export", root, tmp_path / "model.safetensors", "--tag", tag, name),
        ("export", root, tmp_path / "dcp", "--tag", tag, "--format", "dcp", name),
        ("reshard", root / tag, tmp_path / "resharded", "--pp", 2, name),
        ("import", tmp_path / "plain.pt", tmp_path / "imported", "--tag", "new", "plain.pt"),
    ):
        code, text = run(*call)
        assert code != 0, call
        assert place in text
        assert "Traceback" not in text
    assert not marker.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "plain.pt", "resharded", "imported"}
    assert not list((tmp_path / "resharded").glob("*_partial")), "nothing half-made"
