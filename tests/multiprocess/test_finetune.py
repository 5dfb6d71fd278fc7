"""Fine-tuning a real pretrained encoder on four processes is fine-tuning it on one, by every route to its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "finetune_encoder.py"
FOUR = ["-m", "shardwright.cli.main", "run", "--pp", "2", "--tp", "2", "--ddp"]


def finetuned(folder: Path, launcher: list[str], *options: str) -> dict[str, Any]:
    """The losses and predictions of a run of the example."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--result", "result.json", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def check_alike(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert found["predictions"] == alone["predictions"]
    assert found["accuracy"] == alone["accuracy"]


def test_a_few_steps(tmp_path: Path) -> None:
    options = ["--steps", "3", "--test", "30"]
    alone = finetuned(tmp_path / "alone", [], *options)
    check_alike(finetuned(tmp_path / "four", FOUR, *options, "--route", "folder", "--export", "out"), alone)


@pytest.mark.heavy
@pytest.mark.timeout(1300)
def test_over_stages_and_slices_it_learns_as_in_one_process(tmp_path: Path) -> None:
    """The large route to the end of training; the short one for some steps, since only how weights come in differs."""
    options = ["--test", "120", "--lr", "6e-4"]
    alone = finetuned(tmp_path / "alone", [], "--steps", "25", *options)
    assert alone["accuracy"] > 0.5
    assert alone["majority"] < 0.25
    found = finetuned(tmp_path / "file", FOUR, "--steps", "25", *options, "--route", "file", "--export", "out")
    check_alike(found, alone)
    assert found["exported_predictions"] == found["predictions"]
    built = finetuned(tmp_path / "build", FOUR, "--steps", "3", *options, "--route", "build")
    assert built["losses"] == pytest.approx(alone["losses"][:3], rel=1e-4)
