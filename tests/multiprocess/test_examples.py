"""Examples and benchmarks run as users start them: with plain `python`, and over several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_ranks import losses_of, run_example
from harness import RankPool

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = ["-m", "shardwright.cli.main", "run", "--nproc", "2", "--pp", "2"]
STAGES = {"partitions": 2}
SLICES = {"tensor_parallel_degree": 2, "ddp": True}


def _output(*words: str, folder: Path) -> str:
    """Run python with these words; returns what it printed, fails with it if the exit code isn't 0."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", [[], [*LAUNCHED, "--microbatches", "4"]], ids=["alone", "pp2"])
def test_image_classifier_learns(launcher: list[str], tmp_path: Path) -> None:
    printed = _output(*launcher, str(ROOT / "examples/image_classifier.py"), folder=tmp_path)
    accuracies = re.findall(r"test: loss .*, accuracy ([\d.]+)", printed)
    assert len(accuracies) == 1, printed
    assert float(accuracies[0]) > 0.6


@pytest.mark.parametrize("launcher", [[], LAUNCHED], ids=["alone", "pp2"])
def test_gpt2_saves_resumes_and_writes_text(launcher: list[str], tmp_path: Path) -> None:
    script = str(ROOT / "examples/train_gpt2.py")
    common = [*launcher, script, "--steps", "4", "--checkpoint", "saved"]
    _output(*common, "--save-at", "2", "--losses", "first", folder=tmp_path)
    printed = _output(*common, "--resume", "saved", "--sample", "20", "--losses", "second", folder=tmp_path)
    assert "def " in printed
    first = (tmp_path / "first").read_text().splitlines()
    assert len(first) == 4
    assert (tmp_path / "second").read_text().splitlines() == first[2:]


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """One process."""
    with RankPool(1) as pool:
        yield pool


def assert_close(printed: str, wanted: str, tolerance: float) -> None:
    """The losses of the same steps, up to the rounding of sums in another order."""
    losses, truth = losses_of(printed), losses_of(wanted)
    assert losses.keys() == truth.keys()
    assert truth
    for step, values in truth.items():
        assert losses[step][0] == pytest.approx(values[0], rel=tolerance), (step, printed, wanted)


def test_trainer_with_steps_in_its_class(alone: RankPool, pool2: RankPool) -> None:
    """43 sentences in batches of 16 and microbatches of 2: the last batch is uneven."""
    wanted = run_example(alone, "trainer_class.py")
    assert len(losses_of(wanted)) == 20
    assert int(re.findall(r"evaluation: (\d+) of 43 right", wanted)[0]) > 25
    assert run_example(pool2, "trainer_class.py", layout=STAGES) == wanted
    assert_close(run_example(pool2, "trainer_class.py", layout=SLICES), wanted, 1e-3)  # 20 steps of AdamW


def test_detection_with_objects(alone: RankPool, pool2: RankPool) -> None:
    wanted = run_example(alone, "detection.py", "--steps", "20")
    assert len(losses_of(wanted)) == 4
    assert run_example(pool2, "detection.py", "--steps", "20", layout=STAGES) == wanted


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("pipeline.py", "--layers 4 --d 32 --heads 2 --seq 16 --vocab 64 --split 2,2 --split2 1,1,1,1"),
        ("unit_overhead.py", "--layers 4 --micro 2"),
        ("tensor.py", "--layers 2 --d 32 --heads 2 --seq 16 --vocab 64"),
    ],
)
def test_benchmarks_run_every_row(script: str, options: str, tmp_path: Path) -> None:
    words = [*options.split(), "--steps", "2", "--rounds", "1", "--wait", "0"]
    printed = _output(str(ROOT / "benchmarks" / script), *words, folder=tmp_path)
    assert "failed" not in printed
    assert "commit" in printed
