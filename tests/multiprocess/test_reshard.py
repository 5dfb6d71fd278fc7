"""Partial checkpoints, loaded into other layouts than they were saved with: training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright.torch as smp
from any_layout import SAVED_AT, STEPS, Layout, config, expected, layout_name, pool_of, train, whole_masters, wrap
from harness import RankPool
from shardwright.errors import CheckpointError

SHARDED = {"shard_optimizer_state": True}


@pytest.fixture(scope="module")
def pool1() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def save_in_the_middle(path: str, name: str = "gpt2") -> list[float]:
    made, model, optimizer = wrap(name)
    train(made, model, optimizer, 0, SAVED_AT)
    smp.save_checkpoint(path, "mid", model=model, optimizer=optimizer, user_content={"step": SAVED_AT})
    return train(made, model, optimizer, SAVED_AT, STEPS)


def go_on(path: str, name: str = "gpt2") -> list[float]:
    made, model, optimizer = wrap(name, seed=1)
    content = smp.resume_from_checkpoint(path)
    return train(made, model, optimizer, content["step"], STEPS)


Case = tuple[Layout, dict[str, Any], Layout, dict[str, Any]]
QUICK: list[Case] = [
    ((2, 1, 2), {}, (1, 1, 1), {}),
    ((2, 1, 2), SHARDED, (1, 1, 2), {}),
    ((1, 1, 1), {}, (2, 1, 2), SHARDED),
]
HEAVY: list[Case] = [
    ((2, 1, 2), {}, (1, 1, 4), {}),
    ((2, 1, 2), {}, (4, 1, 1), {}),
    ((4, 1, 1), {}, (1, 1, 4), SHARDED),
    ((1, 1, 4), SHARDED, (1, 1, 2), SHARDED),
    ((1, 1, 2), SHARDED, (1, 1, 4), SHARDED),
    ((2, 1, 2), SHARDED, (2, 1, 1), {}),
    ((2, 1, 1), {"tied_weights": "replicate"}, (1, 1, 2), SHARDED),
    ((1, 1, 2), SHARDED, (2, 1, 2), {**SHARDED, "tied_weights": "replicate"}),
]
TENSOR: list[Case] = [
    ((1, 2, 1), {}, (2, 2, 1), {}),
    ((2, 2, 1), SHARDED, (1, 2, 2), SHARDED),
    ((1, 2, 2), SHARDED, (1, 4, 1), {}),
    ((1, 4, 1), {"optimize": "memory"}, (1, 2, 1), {}),
    ((1, 2, 1), {"optimize": "memory"}, (1, 4, 1), {"optimize": "memory", **SHARDED}),
]


def _name(value: Any) -> str:
    return layout_name(value) if isinstance(value, tuple) else "-".join(map(str, value)) or "plain"


@pytest.mark.parametrize(
    ("before", "saved_with", "after", "resumed_with"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.heavy) for case in HEAVY)],
    ids=_name,
)
def test_training_goes_on_in_another_layout(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    before: Layout,
    saved_with: dict[str, Any],
    after: Layout,
    resumed_with: dict[str, Any],
) -> None:
    """FF-17, partial files."""
    truth = expected()[SAVED_AT:]
    saved = pool_of(request, before).run(
        save_in_the_middle, str(tmp_path), config=config(before, **saved_with), timeout_s=120
    )
    assert all(losses == pytest.approx(truth, rel=1e-5) for losses in saved)
    resumed = pool_of(request, after).run(go_on, str(tmp_path), config=config(after, **resumed_with), timeout_s=120)
    assert all(losses == pytest.approx(truth, rel=1e-5) for losses in resumed)


@pytest.mark.parametrize(
    ("before", "saved_with", "after", "resumed_with"),
    [TENSOR[0], *(pytest.param(*case, marks=pytest.mark.heavy) for case in TENSOR[1:])],
    ids=_name,
)
def test_tensor_parallel_slices_are_cut_again(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    before: Layout,
    saved_with: dict[str, Any],
    after: Layout,
    resumed_with: dict[str, Any],
) -> None:
    """Qwen3: grouped key-value heads, fewer than four tp ranks."""
    truth = expected("qwen3")[SAVED_AT:]
    saved = pool_of(request, before).run(
        save_in_the_middle, str(tmp_path), "qwen3", config=config(before, **saved_with), timeout_s=180
    )
    assert all(losses == pytest.approx(truth, rel=1e-4) for losses in saved)
    resumed = pool_of(request, after).run(
        go_on, str(tmp_path), "qwen3", config=config(after, **resumed_with), timeout_s=180
    )
    assert all(losses == pytest.approx(truth, rel=1e-4) for losses in resumed)


# ------------------------------------------------------------------ masters


def save_masters(path: str) -> dict[str, tuple[Tensor, Tensor]]:
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, SAVED_AT)
    smp.save_checkpoint(path, "mid", model=model, optimizer=optimizer)
    return whole_masters(optimizer)


def load_masters(path: str) -> dict[str, tuple[Tensor, Tensor]]:
    made, model, optimizer = wrap("mlp", seed=1)
    smp.resume_from_checkpoint(path)
    train(made, model, optimizer, SAVED_AT, SAVED_AT + 1, update=False)
    return whole_masters(optimizer)


def weights(path: str) -> dict[str, Tensor]:
    made, model, optimizer = wrap("mlp", seed=1)
    smp.resume_from_checkpoint(path)
    train(made, model, optimizer, SAVED_AT, SAVED_AT + 1, update=False)
    whole: dict[str, Tensor] = model.state_dict()
    return {name: tensor.clone() for name, tensor in whole.items()}


@pytest.mark.parametrize(
    ("before", "saved_with", "after", "resumed_with"),
    [
        ((2, 1, 1), {}, (1, 1, 2), SHARDED),
        pytest.param((1, 1, 2), SHARDED, (2, 1, 1), {}, marks=pytest.mark.heavy),
        pytest.param((2, 1, 2), SHARDED, (1, 1, 4), SHARDED, marks=pytest.mark.heavy),
    ],
    ids=_name,
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_and_moments_are_the_saved_ones(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    before: Layout,
    saved_with: dict[str, Any],
    after: Layout,
    resumed_with: dict[str, Any],
    precision: str,
) -> None:
    """FF-29 over layouts: bit for bit."""
    path, half = str(tmp_path), {precision: True}
    saved = pool_of(request, before).run(save_masters, path, config=config(before, **saved_with, **half))[0]
    for found in pool_of(request, after).run(load_masters, path, config=config(after, **resumed_with, **half)):
        assert found.keys() == saved.keys()
        for name, (master, moment) in found.items():
            assert torch.equal(master, saved[name][0]), name
            assert torch.equal(moment, saved[name][1]), name


def test_a_change_of_precision(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """bf16 to fp32: the masters are the weights. fp32 to bf16: the weights are the masters."""
    saved = pool2.run(save_masters, str(tmp_path / "half"), config=config((2, 1, 1), bf16=True))[0]
    (full,) = pool1.run(weights, str(tmp_path / "half"), config=config((1, 1, 1)))
    assert all(torch.equal(full[name], master) for name, (master, _) in saved.items())
    pool2.run(save_in_the_middle, str(tmp_path / "full"), "mlp", config=config((2, 1, 1)))
    (full,) = pool1.run(weights, str(tmp_path / "full"), config=config((1, 1, 1)))
    (half,) = pool1.run(load_masters, str(tmp_path / "full"), config=config((1, 1, 1), bf16=True))
    assert all(torch.equal(full[name], master) for name, (master, _) in half.items())


# ------------------------------------------------------------------ damage


def refused(path: str) -> str:
    wrap("mlp")
    with pytest.raises(CheckpointError) as caught:
        smp.resume_from_checkpoint(path, "mid")
    return str(caught.value)


def test_damage_is_found_whichever_rank_would_read_it(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(save_early, str(tmp_path), config=config((2, 1, 1)))
    file = tmp_path / "mid_partial" / "optimizer_1_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for pool, layout in ((pool1, (1, 1, 1)), (pool2, (1, 1, 2))):
        for reason in pool.run(refused, str(tmp_path), config=config(layout)):
            assert "optimizer_1_0.pt is flipped" in reason


def save_early(path: str) -> None:
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 1)
    smp.save_checkpoint(path, "mid", model=model, optimizer=optimizer)
