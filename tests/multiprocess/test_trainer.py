"""The unmodified Trainer of transformers under `shardwright run --emulate-cuda`, against itself in one plain process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from half_reference import train_in_half
from launched import Launched
from readme_commands import run_document
from trainer_script import Samples, build

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc"),
    pytest.mark.timeout(900),
]

SCRIPT = Path(__file__).parents[1] / "trainer_script.py"

# Six optimizer steps in two epochs; evaluation ends on a batch of one sample.
LIFE = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}
OWN_DATA = {"per_device_train_batch_size": 4}
# 4.57 logs losses with four decimals.
LOGGED = 1.001e-4 if transformers.__version__.startswith("4.") else 0.0
PIPELINE = ("--pp", "2", "--microbatches", "2")


def _words(options: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in options.items()]


def _plain(folder: Path, **options: Any) -> dict[str, Any]:
    words = _words({**LIFE, **options, "use_cpu": True})
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *words], env=environment, timeout=400, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def _launched(folder: Path, launch: tuple[str, ...], **options: Any) -> dict[str, Any]:
    words = _words({**LIFE, **options})
    with Launched(folder, "--emulate-cuda", *launch, str(SCRIPT), str(folder), *words) as job:
        assert job.finish(400) == 0, job.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _plain(tmp_path_factory.mktemp("plain"))


def _in_half_precision(plain: dict[str, Any], best: int) -> dict[str, Any]:
    """What half precision with fp32 masters made by hand gives for the samples and learning rates of the plain Trainer.

    best: the step whose model predicts at the end.
    """
    samples = Samples(48, 1, "gpt2")
    losses: list[list[float]] = []

    def losses_of(step: int) -> list[Callable[[Any], torch.Tensor]]:
        losses.append([])
        # Two batches of 8, each in two microbatches.
        return [functools.partial(loss_of, rows) for rows in torch.tensor(plain["asked"])[16 * step : 16 * step + 16].split(4)]

    def loss_of(rows: torch.Tensor, model: Any) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=samples.ids[rows], labels=samples.labels[rows]).loss
        losses[-1].append(loss.item())
        return loss

    def adam(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.AdamW([p for _, p in named], weight_decay=0.0, fused=True))
        return optimizers[0]

    def set_rate(step: int, _: object) -> None:
        optimizers[0].param_groups[0]["lr"] = plain["log"][step]["learning_rate"]

    optimizers: list[torch.optim.Optimizer] = []
    model = build("gpt2", 0.0)
    run = train_in_half(
        model, torch.float16, adam, losses_of, 6, forward=model, max_norm=1.0, poison=set_rate
    )
    model.load_state_dict(run.weights[best - 1], strict=False)  # without the tied head
    with torch.no_grad():
        predictions = model(input_ids=Samples(13, 3, "gpt2").ids).logits
    log = [
        {**entry, "loss": sum(mine) / len(mine), "grad_norm": norm}
        for entry, mine, norm in zip(plain["log"], losses, run.norms, strict=True)
    ]
    return {"log": log, "predictions": predictions.tolist()}


def _check_curve(
    found: dict[str, Any], expected: dict[str, Any], *, evaluation: bool, tolerance: float = 1e-5, max_norm: float = 1.0
) -> None:
    """Losses, norms before clipping and learning rates step by step; at the end predictions of every sample."""
    assert len(found["log"]) == len(expected["log"]) == 6
    for one, other in zip(found["log"], expected["log"], strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=LOGGED)
    assert any(entry["grad_norm"] > max_norm for entry in expected["log"]), "nothing was clipped"
    torch.testing.assert_close(
        torch.tensor(found["predictions"]), torch.tensor(expected["predictions"]), rtol=10 * tolerance, atol=10 * tolerance
    )
    if evaluation:
        assert found["eval_log"] == pytest.approx(expected["eval_log"], rel=tolerance)
        assert Path(found["best"]).name == Path(expected["best"]).name


def _check_folder(folder: Path, results: dict[str, Any], kind: type = AutoModelForCausalLM) -> None:
    """Two checkpoints are left, and plain transformers loads the final model and predicts the same."""
    assert len(list(folder.glob("checkpoint-*"))) == 2
    model, report = kind.from_pretrained(folder / "final", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    samples = Samples(13, 3, "gpt2")
    with torch.no_grad():
        logits = model(input_ids=samples.ids).logits
    torch.testing.assert_close(logits, torch.tensor(results["predictions"]), rtol=1e-5, atol=1e-5)


def _check_resume(folder: Path, again: Path, launch: tuple[str, ...], results: dict[str, Any], **options: Any) -> None:
    """From the oldest checkpoint that is left, everything that follows is the same to the last bit."""
    checkpoint = min(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shutil.copytree(checkpoint, again / checkpoint.name)
    resumed = _launched(again, launch, resume=checkpoint.name, **options)
    for key in ("log", "eval_log", "eval_loss", "predictions"):
        assert resumed[key] == results[key], key


def test_a_whole_life_over_stages(tmp_path: Path, plain: dict[str, Any]) -> None:
    (first := tmp_path / "first").mkdir()
    (again := tmp_path / "again").mkdir()
    found = _launched(first, PIPELINE)
    _check_curve(found, plain, evaluation=True)
    _check_folder(first, found)
    _check_resume(first, again, PIPELINE, found)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("launch", "options", "evaluation"),
    [
        # Replicas fill up the last batch with samples from the front, and mean losses of batches then differ.
        (("--pp", "1", "--tp", "2", "--ddp"), {"marked": True, **OWN_DATA}, False),
        ((*PIPELINE, "--tp", "2", "--ddp", "-o", "prescaled_batch=true"), {"marked": True}, True),
        ((*PIPELINE, "--nproc", "4", "--ddp", "-o", "shard_optimizer_state=true"), OWN_DATA, False),
    ],
    ids=["tp2", "pp2_tp2_prescaled", "pp2_dp2_sharded"],
)
def test_layouts(
    tmp_path: Path, plain: dict[str, Any], launch: tuple[str, ...], options: dict[str, Any], evaluation: bool
) -> None:
    (first := tmp_path / "first").mkdir()
    (again := tmp_path / "again").mkdir()
    found = _launched(first, launch, **options)
    _check_curve(found, plain, evaluation=evaluation)
    _check_folder(first, found)
    _check_resume(first, again, launch, found, **options)


@pytest.mark.heavy
def test_half_precision(tmp_path: Path, plain: dict[str, Any]) -> None:
    (first := tmp_path / "first").mkdir()
    (again := tmp_path / "again").mkdir()
    launch = (*PIPELINE, "-o", "fp16=true")
    found = _launched(first, launch, fp16=True)
    _check_curve(found, _in_half_precision(plain, int(found["best"].rpartition("-")[2])), evaluation=False)
    _check_resume(first, again, launch, found, fp16=True)


@pytest.mark.heavy
def test_dropout_masks_continue(tmp_path: Path) -> None:
    (first := tmp_path / "first").mkdir()
    (again := tmp_path / "again").mkdir()
    launch = (*PIPELINE, "--tp", "2", "--ddp")
    options = {"dropout": 0.2, "marked": True, **OWN_DATA}
    _check_resume(first, again, launch, _launched(first, launch, **options), **options)


@pytest.mark.heavy
def test_a_classifier(tmp_path: Path) -> None:
    """Without accumulation, under which the plain Trainer of 5.x sums the losses of such a model."""
    (one := tmp_path / "one").mkdir()
    (other := tmp_path / "other").mkdir()
    options = {"kind": "bert", "gradient_accumulation_steps": 1, "max_steps": 6, "num_train_epochs": 1, "max_grad_norm": 0.3}
    expected = _plain(one, **options)
    found = _launched(other, (*PIPELINE, "--tp", "2", "--ddp", "-o", "prescaled_batch=true"), marked=True, **options)
    _check_curve(found, expected, evaluation=True, max_norm=0.3)
    _check_folder(other, found, AutoModelForSequenceClassification)


@pytest.mark.heavy
def test_the_documented_script() -> None:
    run_document(Path(__file__).parents[2] / "docs" / "trainer.md")
