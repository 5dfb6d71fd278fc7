"""`shardwright ckpt export` to every form but a Hugging Face folder, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from small_checkpoints import Small, groups_of

Run = Callable[..., tuple[int, str]]


def weights(saved: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(saved / "whole")
    return found


def moments(saved: Path) -> dict[str, dict[str, Any]]:
    content = torch.load(saved / "optimizer_whole")
    return {content["param_names"][index]: values for index, values in content["state"].items()}


def same(found: Any, expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Small()
    return model, torch.optim.AdamW(groups_of(model), lr=1.0)


@pytest.mark.parametrize("tag", ["two", "whole"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dcp_folder_loads_into_a_plain_model(saved: Path, tmp_path: Path, run: Run, precision: str, tag: str) -> None:
    code, text = run(
        "export", saved / precision, tmp_path / "out", "--tag", tag, "--format", "dcp", "--optimizer", "--json"
    )
    assert code == 0
    model, optimizer = fresh()
    expected = weights(saved / precision)
    assert json.loads(text)["tensors"] == len(expected)
    content = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
    same(content["model"], expected)
    if precision == "fp32":  # torch's own form of the optimizer's state
        model.load_state_dict(content["model"])
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        names = {p: name for name, p in model.named_parameters()}
        for parameter, values in optimizer.state.items():
            same(values, moments(saved / precision)[names[parameter]])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert get_model_state_dict(model).keys() == expected.keys()


def test_torch_file_with_the_optimizer(saved: Path, tmp_path: Path, run: Run) -> None:
    assert run("export", saved / "fp32", tmp_path / "out.pt", "--optimizer")[0] == 0
    content = torch.load(tmp_path / "out.pt")
    same(content["model"], weights(saved / "fp32"))
    model, optimizer = fresh()
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    names = {p: name for name, p in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        same(values, moments(saved / "fp32")[names[parameter]])


def test_files_without_the_optimizer(saved: Path, tmp_path: Path, run: Run) -> None:
    assert run("export", saved / "bf16", tmp_path / "out.safetensors")[0] == 0
    assert run("export", saved / "bf16", tmp_path / "out", "--format", "torch")[0] == 0
    same(load_file(tmp_path / "out.safetensors"), weights(saved / "bf16"))
    same(torch.load(tmp_path / "out"), weights(saved / "bf16"))


def test_refused(saved: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.safetensors"
    for arguments, words in (
        ((out, "--format", "zip"), "expected one of torch, safetensors, dcp"),
        ((out, "--optimizer"), "holds tensors only"),
        ((tmp_path / "none" / "out",), "is no folder"),
        ((tmp_path,), "exists"),
    ):
        code, text = run("export", saved / "fp32", *arguments)
        assert code == 2
        assert words in text
    assert not list(tmp_path.iterdir())
