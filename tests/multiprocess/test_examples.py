"""Examples and benchmarks run as users start them: with plain `python`, and over several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from example_ranks import losses_of, run_example
from harness import RankPool

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = ["-m", "shardwright.cli.main", "run", "--nproc", "2", "--pp", "2"]
STAGES = {"partitions": 2}
SLICES = {"tensor_parallel_degree": 2, "ddp": True}
REPLICAS = {"ddp": True}


def _output(*words: str, folder: Path, timeout_s: float = 150) -> str:
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
        timeout=timeout_s,
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


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_image_classifier_with_autocast(alone: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    words = ("--amp", "--steps", "20", "--save")
    wanted = run_example(alone, "image_classifier.py", *words, f"{tmp_path}/one.pt")
    assert run_example(pool2, "image_classifier.py", *words, f"{tmp_path}/two.pt", layout=STAGES) == wanted
    exact = run_example(alone, "image_classifier.py", "--steps", "20")
    assert losses_of(exact)[20] != losses_of(wanted)[20]
    assert names_in(tmp_path) == {"one.pt_0", "one.pt_0_0", "two.pt_0", "two.pt_0_0", "two.pt_1", "two.pt_1_0"}
    whole = torch.load(tmp_path / "one.pt_0")["model_state_dict"]
    parts = [torch.load(tmp_path / f"two.pt_{rank}")["model_state_dict"] for rank in (0, 1)]
    assert {**parts[0], **parts[1]}.keys() == whole.keys()
    assert all(torch.equal(part[name], whole[name]) for part in parts for name in part if name != "_smp_is_partial")


def test_image_classifier_over_replicas(pool2: RankPool) -> None:
    """Each reads pictures of its own; the test pictures are the same, so one accuracy counts."""
    printed = run_example(pool2, "image_classifier.py", layout=REPLICAS)
    assert float(re.findall(r"test: loss .*, accuracy ([\d.]+)", printed)[0]) > 0.6


def test_bert_keeps_the_newest_files_and_resumes(alone: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    def run(pool: RankPool, folder: str, *words: str, layout: dict[str, Any] | None = None) -> str:
        common = ("--save-every", "1", "--output-dir", f"{tmp_path}/{folder}")
        return run_example(pool, "bert_pretrain.py", *common, *words, layout=layout)

    wanted = run(alone, "one", "--steps", "5")
    assert len(losses_of(wanted)) == 5
    assert names_in(tmp_path / "one") == {"ckpt_4.pt_0", "ckpt_4.pt_0_0", "ckpt_5.pt_0", "ckpt_5.pt_0_0", "bert_full.pt"}
    first = run(pool2, "two", "--steps", "3", layout=STAGES)
    assert names_in(tmp_path / "two") == {
        "bert_full.pt", *(f"ckpt_{step}.pt_{end}" for step in (2, 3) for end in ("0", "0_0", "1", "1_0")),
    }  # fmt: skip
    second = run(pool2, "two", "--steps", "5", "--resume", layout=STAGES)
    assert losses_of(first) | losses_of(second) == losses_of(wanted)
    assert min(losses_of(second)) == 4
    fulls = [torch.load(tmp_path / folder / "bert_full.pt")["model"] for folder in ("one", "two")]
    assert all(torch.equal(fulls[0][name], fulls[1][name]) for name in fulls[0])
    plain = BertForPreTraining(
        BertConfig(
            vocab_size=64, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
            max_position_embeddings=16,
        )
    )  # fmt: skip
    plain.load_state_dict(fulls[1])


@pytest.mark.heavy
def test_bert_over_stages_and_replicas(alone: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    words = ("--steps", "4", "--output-dir", str(tmp_path))
    wanted = run_example(alone, "bert_pretrain.py", *words)
    printed = run_example(pool4, "bert_pretrain.py", *words, layout={**STAGES, **REPLICAS})
    assert_close(printed, wanted, 1e-5)


# The script itself asks for data parallelism.
GPT2_SLICES = {"tensor_parallel_degree": 2}
GPT2_BOTH = {**STAGES, **GPT2_SLICES}


def gpt2(pool: RankPool, folder: Path, *words: str, layout: dict[str, Any] | None = None) -> str:
    common = ("--max_steps", "4", "--checkpoint_freq", "1", "--checkpoint_dir", str(folder))
    return run_example(pool, "gpt2_pretrain.py", *common, *words, layout=layout)


def test_gpt2_on_stages_by_hand(alone: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """Losses, files, resuming from a partial checkpoint, and the full one as a plain transformers model."""
    wanted = gpt2(alone, tmp_path / "one")
    assert len(losses_of(wanted)) == 4
    by_hand = ("--manual_partition", "1", "--activation_strategy", "group_2")
    stopped = gpt2(pool2, tmp_path / "two", *by_hand, "--max_steps", "3", "--save_final_full_model", "0", layout=STAGES)
    assert (tmp_path / "two/newest").read_text().strip() == "trained_gpt-3.pt_partial"
    for tag in ("trained_gpt-2.pt_partial", "trained_gpt-3.pt_partial"):
        assert names_in(tmp_path / "two" / tag) >= {
            "model_0_0.pt", "model_1_0.pt", "optimizer_0_0.pt", "optimizer_1_0.pt", "user_content.pt", "partition_info.pt",
        }  # fmt: skip
    assert not (tmp_path / "two/trained_gpt-1.pt_partial").exists()
    resumed = gpt2(pool2, tmp_path / "two", *by_hand, "--load_partial", "1", layout=STAGES)
    assert losses_of(stopped) | losses_of(resumed) == losses_of(wanted)
    assert min(losses_of(resumed)) == 4
    fulls = [torch.load(tmp_path / folder / "trained_gpt_full.pt") for folder in ("one", "two")]
    assert all(torch.equal(fulls[0][name], fulls[1][name]) for name in fulls[0])
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=24, n_embd=48, n_layer=5, n_head=4, bos_token_id=0, eos_token_id=0))
    plain.load_state_dict(fulls[1])


def test_gpt2_in_slices(alone: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """Slices sum in another order: losses differ in their last digits. The full file starts another layout."""
    wanted = gpt2(alone, tmp_path / "one")
    printed = gpt2(pool2, tmp_path / "two", layout=GPT2_SLICES)
    assert_close(printed, wanted, 1e-5)
    from_full = ("--load_full", "1", "--max_steps", "1", "--save_final_full_model", "0")
    of_slices = gpt2(pool2, tmp_path / "two", *from_full, layout=GPT2_SLICES)
    again = gpt2(alone, tmp_path / "two", *from_full)
    assert_close(of_slices, again, 1e-5)
    assert losses_of(again)[1][0] < losses_of(wanted)[1][0]


@pytest.mark.heavy
@pytest.mark.parametrize("words", [(), ("--fp16", "1"), ("--bf16", "1", "--shard_optimizer_state", "1")], ids=["fp32", "fp16", "bf16"])
def test_gpt2_on_four_ranks(alone: RankPool, pool4: RankPool, words: tuple[str, ...], tmp_path: Path) -> None:
    wanted = gpt2(alone, tmp_path / "one", *words)
    printed = gpt2(pool4, tmp_path / "four", *words, "--manual_partition", "1", layout=GPT2_BOTH)
    assert_close(printed, wanted, 2e-2 if words else 1e-5)  # half precision rounds every sum to 3 or 2 digits
    resumed = gpt2(pool4, tmp_path / "four", *words, "--max_steps", "5", "--load_partial", "1", layout=GPT2_BOTH)
    assert list(losses_of(resumed)) == [5]


def test_trainer_with_steps_in_its_class(alone: RankPool, pool2: RankPool) -> None:
    """43 sentences in batches of 16 and microbatches of 2: the last batch is uneven."""
    wanted = run_example(alone, "trainer_class.py")
    assert len(losses_of(wanted)) == 20
    assert int(re.findall(r"evaluation: (\d+) of 43 right", wanted)[0]) > 25
    assert run_example(pool2, "trainer_class.py", layout=STAGES) == wanted
    assert_close(run_example(pool2, "trainer_class.py", layout=SLICES), wanted, 1e-3)  # 20 steps of AdamW


def test_client_fp16_optimizer(alone: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """The same steps are skipped, norms are of the whole model, and masters and moments continue."""
    name = "fp16_optimizer.py"
    wanted = run_example(alone, name, "--steps", "6")
    assert "norm -1.0000" in wanted
    assert run_example(pool2, name, "--steps", "6", layout=STAGES) == wanted
    for layout in (STAGES, {**REPLICAS, "shard_optimizer_state": True}):
        folder = tmp_path / str(len(layout))
        whole = run_example(pool2, name, "--steps", "6", layout=layout)
        stopped = run_example(pool2, name, "--steps", "4", "--save", f"{folder}/half.pt", layout=layout)
        rest = run_example(pool2, name, "--first", "4", "--steps", "6", "--load", f"{folder}/half.pt", layout=layout)
        assert stopped + rest == whole
        second = "half.pt_1_0_0" if layout is STAGES else "half.pt_0_0_1"
        assert names_in(folder) == {"half.pt_0_0_0", second}


def test_client_fp16_optimizer_in_slices(alone: RankPool, pool2: RankPool) -> None:
    """Half precision keeps 3 digits, and sums are taken in another order."""
    wanted = run_example(alone, "fp16_optimizer.py", "--steps", "6")
    assert_close(run_example(pool2, "fp16_optimizer.py", "--steps", "6", layout=SLICES), wanted, 1e-2)


def test_detection_with_objects(alone: RankPool, pool2: RankPool) -> None:
    wanted = run_example(alone, "detection.py", "--steps", "20")
    assert len(losses_of(wanted)) == 4
    assert run_example(pool2, "detection.py", "--steps", "20", layout=STAGES) == wanted


@pytest.mark.heavy
def test_detection_learns(pool2: RankPool) -> None:
    printed = run_example(pool2, "detection.py", layout=REPLICAS)
    overlap, right = re.findall(r"test: overlap ([\d.]+), right kinds ([\d.]+)", printed)[0]
    assert float(overlap) > 0.5
    assert float(right) > 0.9


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "words"), [("image_classifier.py", ("--amp", "--steps", "20")), ("detection.py", ("--steps", "20"))])
def test_stages_of_replicas(pool2: RankPool, pool4: RankPool, name: str, words: tuple[str, ...]) -> None:
    """Replicas read samples of their own, so two replicas in stages are compared with two in one piece."""
    wanted = run_example(pool2, name, *words, layout=REPLICAS)
    assert losses_of(wanted)
    assert run_example(pool4, name, *words, layout={**STAGES, **REPLICAS}) == wanted


@pytest.mark.heavy
def test_trainer_class_on_four_ranks(alone: RankPool, pool4: RankPool) -> None:
    wanted = run_example(alone, "trainer_class.py")
    assert_close(run_example(pool4, "trainer_class.py", layout={**STAGES, **SLICES}), wanted, 1e-3)  # 20 steps of AdamW


@pytest.mark.heavy
@pytest.mark.parametrize("layout", [SLICES, {**REPLICAS, "shard_optimizer_state": True}], ids=["tp2", "sharded"])
def test_client_fp16_optimizer_on_four_ranks(
    alone: RankPool, pool4: RankPool, layout: dict[str, Any], tmp_path: Path
) -> None:
    name, both = "fp16_optimizer.py", {**STAGES, **layout}
    whole = run_example(pool4, name, "--steps", "6", layout=both)
    assert_close(whole, run_example(alone, name, "--steps", "6"), 1e-2)
    stopped = run_example(pool4, name, "--steps", "4", "--save", f"{tmp_path}/half.pt", layout=both)
    rest = run_example(pool4, name, "--first", "4", "--steps", "6", "--load", f"{tmp_path}/half.pt", layout=both)
    assert stopped + rest == whole
    assert len(names_in(tmp_path)) == 4


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_demo(tmp_path: Path) -> None:
    """It stops and resumes a run, and fails by its exit code if a loss differs."""
    printed = _output(str(ROOT / "examples/demo.py"), "--steps", "6", folder=tmp_path, timeout_s=800)
    assert "all 6 losses are equal, bit for bit" in printed


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
