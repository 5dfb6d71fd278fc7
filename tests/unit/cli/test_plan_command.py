"""`shardwright plan`: from a Python file or a transformers config to table, JSON and picture."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwright.cli import partition as command
from shardwright.cli.main import main
from shardwright.cli.sizes import parse_size
from shardwright.config.parse import resolve
from shardwright.errors import ConfigError, UsageError
from shardwright.partition import PartitionPlan

SCRIPT = """
import torch
from torch import nn
from helper import WIDTH

def model():
    return nn.Sequential(nn.Embedding(32, WIDTH), *[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

def example_inputs():
    return torch.zeros(2, 4, dtype=torch.long)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 16\n")
    path = tmp_path / "net.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shape = {"n_positions": 16, "n_embd": 32, "n_layer": 6, "n_head": 4, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gpt2", **shape)))
    return tmp_path


def run(*arguments: object) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    app([str(argument) for argument in ("plan", *arguments)], standalone_mode=False)


def test_python_file(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, "--pp", 2, "--microbatches", 4, "--json", tmp_path / "p.json", "--svg", tmp_path / "p.svg")
    out = capsys.readouterr().out
    assert "Sequential (net.py) on 2 stages" in out
    assert "with 4 microbatches: bubble 20.0%" in out
    plan = PartitionPlan.from_json((tmp_path / "p.json").read_text())
    assert (plan.num_stages, plan.how) == (2, "fake")
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_python_file_without_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
    )
    run(path, "--pp", 2)
    assert "module order and parameter sizes" in capsys.readouterr().out


@pytest.mark.parametrize("as_folder", [True, False])
def test_transformers_config(config: Path, as_folder: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run(config if as_folder else config / "config.json", "--pp", 3, "--batch", 16, "--seq", 12)
    out = capsys.readouterr().out
    assert "GPT2LMHeadModel" in out
    assert "microbatches of 2" in out
    assert "transformer.h.0" in out
    assert "a forward on fake tensors" in out


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (
            {
                "model_type": "t5",
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
                "vocab_size": 96,
            },
            "T5",
        ),
        (
            {
                "model_type": "vit",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
            },
            "ViT",
        ),
        ({"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}, "Bert"),
    ],
)
def test_other_kinds_of_config(
    data: dict[str, object], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data))
    run(tmp_path, "--pp", 2, "--optimize", "speed", "--tied-weights", "replicate")
    assert name in capsys.readouterr().out


def test_architecture_and_dtype_of_the_config_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    data = dict(model_type="bert", architectures=["BertForSequenceClassification"], dtype="bfloat16", **shape)
    (tmp_path / "config.json").write_text(json.dumps(data))
    run(tmp_path, "--pp", 2, "--json", tmp_path / "p.json")
    assert "BertForSequenceClassification" in capsys.readouterr().out
    plan = PartitionPlan.from_json((tmp_path / "p.json").read_text())
    assert all(stage.parameter_bytes == 2 * stage.num_parameters for stage in plan.stages)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "gone", "neither a file nor a folder"),
        ("x = 1", "a.py", r"does not define a function model\(\)"),
        ("import sys\nsys.exit(2)", "a.py", r"ended the process while it was read"),
        ("def model(): return 3", "a.py", "returned a int"),
        ("{}", "config.json", "not a transformers config"),
        ("{", "config.json", "not a transformers config"),
        ("", "a.txt", "expected .py or .json"),
    ],
)
def test_bad_sources_are_named(content: str | None, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        run(path, "--pp", 2)


def test_bad_options_are_named(script: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--batch is 9, expected a multiple of --microbatches"):
        run(script, "--pp", 2, "--batch", 9)
    with pytest.raises(UsageError, match="--tied-weights is 'apart'"):
        run(script, "--pp", 2, "--tied-weights", "apart")
    with pytest.raises(UsageError, match="can't write"):
        run(script, "--pp", 2, "--json", tmp_path / "no" / "where.json")


def memory_of(path: Path) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = json.loads(path.read_text())["memory"]["ranks"]
    return ranks


def test_memory_of_a_rank(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, "--pp", 2, "--gpus", 4, "--optimizer", "sgd,momentum=0.9", "--json", tmp_path / "p.json")
    out = capsys.readouterr().out
    assert "memory of a rank, on 4 in all (pp 2, tp 1, rdp 2, 8 microbatches)" in out
    assert "interpreter and libraries come on top: 1.00 GiB" in out
    ranks = memory_of(tmp_path / "p.json")
    assert sum(rank["parameters"] for rank in ranks) == 4 * (32 * 16 + 6 * (16 * 16 + 16))
    for rank in ranks:
        assert rank["optimizer"] == rank["gradients"] == rank["communication"] == rank["parameters"]
        assert rank["peak"] > 4 * rank["parameters"]


def test_switches_change_memory(config: Path, tmp_path: Path) -> None:
    def peak(*options: object) -> dict[str, Any]:
        run(config, "--device", "cpu", "--json", tmp_path / "p.json", *options)
        return memory_of(tmp_path / "p.json")[0]

    plain, recomputed = peak(), peak("--activation-checkpointing")
    assert recomputed["activations"] < plain["activations"]
    assert peak("-o", "bf16=true")["parameters"] * 2 == plain["parameters"]
    assert peak("--tp", 2)["parameters"] < plain["parameters"]
    sharded = peak("--gpus", 4, "-o", "shard_optimizer_state=true")
    assert sharded["optimizer"] == pytest.approx(plain["optimizer"] / 4, abs=4)


def test_loss_of_a_script_counts(script: Path, tmp_path: Path) -> None:
    run(script, "--json", tmp_path / "p.json")
    without = memory_of(tmp_path / "p.json")[0]["activations"]
    script.write_text(SCRIPT + "\ndef loss(output):\n    return (output.repeat(100, 1, 1) ** 2).sum()\n")
    run(script, "--json", tmp_path / "p.json")
    assert memory_of(tmp_path / "p.json")[0]["activations"] > without + 2 * 4 * 16 * 4 * 100


def test_fit_proposes(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config, "--gpus", 2, "--fit", "64MiB", "--base", "0", "--json", tmp_path / "f.json")
    out = capsys.readouterr().out
    assert "GPT2LMHeadModel" in out
    assert "first: smp.init({" in out
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["fits"]
    for proposal in found["proposals"]:
        assert proposal["pp"] * proposal["tp"] * proposal["rdp"] == 2
        assert proposal["headroom_bytes"] == 64 * 1024**2 - proposal["peak_bytes"] >= 0
        assert proposal["peak_bytes"] == max(rank["peak"] for rank in proposal["ranks"])
        assert resolve(proposal["config"], {}).config.microbatches * proposal["samples_per_microbatch"] > 0


def test_fit_says_by_how_much_it_misses(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(config), "--gpus", "2", "--fit", "100KiB", "--base", "0", "--json", str(tmp_path / "f.json")])
    assert ended.value.code == 1
    assert "nothing fits. Closest, " in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    assert not found["fits"]
    assert found["proposals"][0]["headroom_bytes"] < 0


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * 1024**3), ("80 GB", 80 * 1000**3), ("512MiB", 512 * 1024**2), ("1.5kib", 1536), ("7", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size("fit", text) == nbytes


@pytest.mark.parametrize("text", ["much", "24GX", "-1GiB", "", "GiB"])
def test_bad_sizes_are_named(script: Path, text: str) -> None:
    with pytest.raises(UsageError, match=f"--fit is '{text}', expected a number with a unit"):
        run(script, "--fit", text)


def test_bad_degrees_and_optimizers_are_named(script: Path) -> None:
    with pytest.raises(ConfigError, match="world size 3 is not divisible"):
        run(script, "--pp", 2, "--gpus", 3)
    with pytest.raises(UsageError, match="the optimizer is 'adamx'"):
        run(script, "--optimizer", "adamx")
    with pytest.raises(UsageError, match="AdamW can't be made so"):
        run(script, "--optimizer", "adamw,speed=3")
    with pytest.raises(UsageError, match="--global-batch is 3, expected a multiple"):
        run(script, "--fit", "1GiB", "--global-batch", 3)


def test_png_without_the_package_says_so(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--png needs the package cairosvg"):
        run(script, "--pp", 2, "--png", tmp_path / "p.png")


def test_command_line_starts_without_torch() -> None:
    code = "import sys, shardwright.cli.partition as p, shardwright.cli.model_source; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
