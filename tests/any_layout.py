"""Training that gives the same losses in every layout: each step's global batch is the same, and cut in its own way."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import models
import reference
import shardwright.torch as smp
from harness import RankPool

BATCH = 8
STEPS = 10
SAVED_AT = 5
Layout = tuple[int, int, int]
"""pp, tp, rdp."""


def layout_name(layout: Layout) -> str:
    return "pp{}-tp{}-rdp{}".format(*layout)


def config(layout: Layout, **more: Any) -> dict[str, Any]:
    pp, tp, _ = layout
    return {
        "pipeline_parallel_degree": pp,
        "tensor_parallel_degree": tp,
        "microbatches": 2,
        "ddp": True,
        "log_level": "warning",
        **more,
    }


def pool_of(request: pytest.FixtureRequest, layout: Layout) -> RankPool:
    size = layout[0] * layout[1] * layout[2]
    pool: RankPool = request.getfixturevalue(f"pool{size}")
    return pool


def wrap(name: str = "gpt2", seed: int = 0) -> tuple[Any, Any, Any]:
    made = models.make(name, seed=seed)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(made.model)
    model = smp.DistributedModel(made.model)
    return made, model, smp.DistributedOptimizer(reference.adamw(list(model.parameters())))


def train(made: Any, model: Any, optimizer: Any, first: int, last: int, update: bool = True) -> list[float]:
    """The loss over the global batch, which every layout cuts in its own way."""

    @smp.step
    def train_step(model: Any, batch: models.Batch) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    losses = []
    share = BATCH // smp.dp_size()
    for step in range(first, last):
        batch = made.make_batch(step, BATCH)
        mine = {n: t[smp.dp_rank() * share : (smp.dp_rank() + 1) * share] for n, t in batch.items()}
        optimizer.zero_grad()
        loss = train_step(model, mine).reduce_mean().detach()
        losses.append(sum(smp.allgather(float(loss), smp.DP_GROUP)) / smp.dp_size())
        if update:
            optimizer.step()
    return losses


def whole_masters(optimizer: Any) -> dict[str, tuple[Tensor, Tensor]]:
    content = optimizer.state_dict()
    names = [name for group in optimizer._full_group_names() for name in group]
    return {names[i]: (m.clone(), content["state"][i]["exp_avg"].clone()) for i, m in content["fp32_from_fp16"].items()}


def expected(name: str = "gpt2") -> list[float]:
    """Losses of plain PyTorch in one process."""
    model, make_batch, loss_of = models.make(name)
    optimizer = reference.adamw(list(model.parameters()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(step, BATCH))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses
