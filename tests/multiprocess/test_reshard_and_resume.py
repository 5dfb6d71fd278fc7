"""`shardwright ckpt reshard`, then resume in that layout: the same values as resuming in it directly, and no resharding then."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import models
import reference
import shardwright.torch as smp
from any_layout import SAVED_AT, STEPS, Layout, config, layout_name, pool_of, train
from harness import RankPool
from shardwright.checkpoint import reshard
from shardwright.cli.main import main

SHARED = {"shard_optimizer_state": True}
SHARDED = {"sharded_data_parallel_degree": 2}


def wrap(name: str, seed: int = 0) -> tuple[Any, Any, Any]:
    """Tensor parallelism is marked with whatever degree, so that names are the same."""
    made = models.make(name, seed=seed)
    if name != "mlp":
        smp.set_tensor_parallelism(made.model)
    model = smp.DistributedModel(made.model)
    return made, model, smp.DistributedOptimizer(reference.adamw(list(model.parameters())))


def save(path: str, name: str) -> None:
    made, model, optimizer = wrap(name)
    torch.manual_seed(smp.rank())
    np.random.seed(smp.rdp_rank())
    train(made, model, optimizer, 0, SAVED_AT)
    smp.save_checkpoint(path, "whole", partial=False, model=model, optimizer=optimizer, user_content={"step": SAVED_AT})
    smp.save_checkpoint(path, "mid", model=model, optimizer=optimizer, user_content={"step": SAVED_AT})


def go_on(path: str, name: str, fast: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses and random numbers, and the whole model and optimizer after them. fast: each rank must get by with its own files."""
    made, model, optimizer = wrap(name, seed=1)
    plan_load = reshard.plan_load

    def watched(*args: Any, **options: Any) -> Any:
        assert not fast, "state is to be put together for another layout"
        return plan_load(*args, **options)

    reshard.plan_load = watched
    try:
        content = smp.resume_from_checkpoint(path)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        losses = drawn + train(made, model, optimizer, content["step"], STEPS)
    finally:
        reshard.plan_load = plan_load
    return losses, {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main(["ckpt", *map(str, arguments)])
    assert not end.value.code


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return all(map(equal, one, other))
    return bool(one == other)


def options(layout: Layout, more: dict[str, Any]) -> list[object]:
    found: list[object] = []
    for key, value in zip(("--pp", "--tp", "--rdp"), layout, strict=True):
        found += [key, value]
    found.append("--shard-optimizer-state" if more.get("shard_optimizer_state") else "--whole-optimizer-state")
    return [*found, "--sharded-data-parallel-degree", more.get("sharded_data_parallel_degree", 1)]


Case = tuple[str, Layout, dict[str, Any], Layout, dict[str, Any]]
CASES: list[Case] = [
    ("mlp", (2, 1, 1), {}, (1, 1, 2), SHARED),
    ("mlp", (1, 1, 2), {**SHARED, "bf16": True}, (2, 1, 1), {"bf16": True}),
    ("mlp", (2, 1, 1), {}, (1, 1, 2), SHARDED),
    ("qwen3", (1, 1, 2), SHARED, (1, 2, 1), {}),
]
HEAVY: list[Case] = [
    ("qwen3", (1, 2, 1), {}, (1, 1, 2), SHARED),
    ("qwen3", (1, 2, 1), {}, (1, 4, 1), SHARED),
    ("qwen3", (2, 1, 1), {}, (2, 2, 1), SHARED),
    ("gpt2", (2, 2, 1), SHARED, (2, 1, 2), SHARED),
    ("mlp", (1, 1, 4), SHARDED, (2, 1, 2), SHARED),
    ("gpt2", (1, 4, 1), {}, (2, 2, 1), {}),
    ("gpt2", (1, 2, 2), {}, (1, 2, 2), SHARDED),
]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else layout_name(value) if isinstance(value, tuple) else "-".join(value) or "plain"


@pytest.mark.parametrize(
    ("name", "before", "saved_with", "after", "resumed_with"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.heavy) for case in HEAVY)],
    ids=_name,
)
def test_resuming_after_the_command_equals_resuming_without(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    before: Layout,
    saved_with: dict[str, Any],
    after: Layout,
    resumed_with: dict[str, Any],
) -> None:
    pool: RankPool = pool_of(request, before)
    pool.run(save, str(tmp_path / "saved"), name, config=config(before, **saved_with), timeout_s=120)
    command("reshard", tmp_path / "saved" / "mid", tmp_path / "new", *options(after, resumed_with))
    command("diff", tmp_path / "saved" / "mid", tmp_path / "new" / "mid")
    pool = pool_of(request, after)
    how = config(after, **resumed_with)
    direct = pool.run(go_on, str(tmp_path / "saved"), name, False, config=how, timeout_s=120)
    own_files = "sharded_data_parallel_degree" not in resumed_with  # what flat groups have goes by the manifest, see `flat_groups`
    converted = pool.run(go_on, str(tmp_path / "new"), name, own_files, config=how, timeout_s=120)
    for one, other in zip(direct, converted, strict=True):
        assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    command("reshard", tmp_path / "new" / "mid", tmp_path / "back", *options(before, saved_with))
    compare_folders(tmp_path / "saved" / "mid_partial", tmp_path / "back" / "mid_partial")
    command("reshard", tmp_path / "saved" / "whole", tmp_path / "full", *options(after, resumed_with))
    compare_folders(tmp_path / "new" / "mid_partial", tmp_path / "full" / "whole_partial")


def compare_folders(one: Path, other: Path) -> None:
    """Every file of tensors has the same content, random state included; but for what is kept for the way back."""
    names = [sorted(p.name for p in folder.iterdir() if not p.name.startswith("origin_rng_")) for folder in (one, other)]
    assert names[0] == names[1]
    for file in (one / name for name in names[0] if name.endswith(".pt")):
        contents = [torch.load(folder / file.name, weights_only=False) for folder in (one, other)]
        assert equal(*contents), file.name
