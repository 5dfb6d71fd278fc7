"""FF-28, FF-29: schedules, loss scales and masters go on after a resume, from partial and from full checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_REPLICAS, TWO_STAGES, same
from harness import RankPool

STEPS, SAVED_AT, WARM_UP = 12, 6, 8
OVERFLOWS = (1, 2)
SCALE = {"init_scale": 2.0**16, "scale_window": 3, "delayed_shift": 1}


def build(seed: int, lr: float) -> tuple[Any, Any, Any]:
    model = smp.DistributedModel(ranks.net(seed))
    if smp.pp_size() > 1:
        ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model, lr), None, True, SCALE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / WARM_UP if step < WARM_UP else 0.8 ** (step - WARM_UP + 1)
    )
    return model, optimizer, schedule


@smp.step
def train_step(model: Any, x: Tensor, factor: float) -> Tensor:
    loss = ranks.loss_of(model, x) * factor
    model.backward(loss)
    return loss


def go(model: Any, optimizer: Any, schedule: Any, counts: dict[str, int], steps: range) -> list[Any]:
    """Losses, rates, loss scales, and how many steps were skipped."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        overflow = smp.state.cfg.fp16 and step in OVERFLOWS and smp.dp_rank() == smp.dp_size() - 1
        loss = train_step(model, ranks.data(step), float("inf") if overflow else 1.0).stack()
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        counts["skipped"] += optimizer.overflow
        schedule.step()
        seen.append((loss, rates, optimizer.loss_scale, dict(counts)))
    return seen


def ends(optimizer: Any) -> dict[str, Any]:
    content = optimizer.state_dict()
    masters = content["fp32_from_fp16"]
    assert masters
    assert all(m.dtype is torch.float32 for m in masters.values())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values()), "the interesting case"
    moments = [values[key] for values in content["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert moments
    assert all(moment.dtype is torch.float32 for moment in moments)
    return {"masters": masters, "state": content["state"], "scaler": content["loss_scaler"]}


def straight(path: str, partial: bool, lr: float) -> tuple[list[Any], dict[str, Any]]:
    model, optimizer, schedule = build(0, lr)
    counts = {"skipped": 0}
    go(model, optimizer, schedule, counts, range(SAVED_AT))
    assert counts["skipped"] == (len(OVERFLOWS) if smp.state.cfg.fp16 else 0)
    content = {"schedule": schedule.state_dict(), "counts": dict(counts)}
    smp.save_checkpoint(path, "six", partial=partial, model=model, optimizer=optimizer, user_content=content)
    return go(model, optimizer, schedule, counts, range(SAVED_AT, STEPS)), ends(optimizer)


def resumed(path: str, partial: bool, lr: float) -> tuple[list[Any], dict[str, Any]]:
    model, optimizer, schedule = build(1, lr)
    content = smp.resume_from_checkpoint(path, "six", partial=partial)
    schedule.load_state_dict(content["schedule"])
    return go(model, optimizer, schedule, content["counts"], range(SAVED_AT, STEPS)), ends(optimizer)


@pytest.mark.parametrize(
    ("kind", "config", "lr"),
    [
        ("fp16", TWO_STAGES, 0.01),
        ("bf16", {**TWO_REPLICAS, "shard_optimizer_state": True}, 1e-5),  # one update is below the spacing of bf16
        pytest.param("fp16", {**TWO_REPLICAS, "shard_optimizer_state": True}, 0.01, marks=pytest.mark.heavy),
        pytest.param("bf16", TWO_STAGES, 1e-5, marks=pytest.mark.heavy),
    ],
    ids=["fp16", "bf16-sharded", "fp16-sharded", "bf16"],
)
@pytest.mark.parametrize("partial", [True, False], ids=["partial", "full"])
def test_rates_scales_and_masters_go_on(
    pool2: RankPool, tmp_path: Path, kind: str, config: dict[str, Any], lr: float, partial: bool
) -> None:
    config = {**config, kind: True}
    whole = pool2.run(straight, str(tmp_path), partial, lr, config=config)
    again = pool2.run(resumed, str(tmp_path), partial, lr, config=config)
    for one, other in zip(whole, again, strict=True):
        assert same(one, other)
    rates = [rates[0] / lr for _, rates, *_ in whole[0][0]]
    assert rates == pytest.approx([7 / 8, 1, 0.8, 0.64, 0.512, 0.4096])
