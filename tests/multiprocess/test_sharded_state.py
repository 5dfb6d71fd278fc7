"""Sharded optimizer state on real processes: the very numbers of the same layout without, and of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright.torch as smp
from engine_ranks import same
from harness import RankPool
from sharded_models import DDP, OPTIMIZERS, SHARDED, SMALL_BUCKETS, batch, train_step, two_groups, uneven

STEPS = 4


def trained(name: str, max_norm: float | None = None, **options: Any) -> dict[str, Any]:
    """A few steps, with a scheduler; what is left of it."""
    model = smp.DistributedModel(uneven(empty=True), bucket_cap_mb=SMALL_BUCKETS, **options)
    optimizer = smp.DistributedOptimizer(two_groups(model, OPTIMIZERS[name]))
    groups = list(optimizer.param_groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, batch(step, smp.dp_rank())).stack())
        if max_norm is not None:
            norms.append(float(smp.clip_grad_norm(max_norm)))
        optimizer.step()
        scheduler.step()
    sharded = smp.state.cfg.shard_optimizer_state
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert optimizer.redefined_params is sharded
    assert all(p.grad is None for p in model.parameters() if p.requires_grad) is sharded
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: p.detach().clone() for n, p in model.local_named_parameters()},
        "strides": [p.stride() for p in model.parameters()],
        "state": optimizer.state_dict(),
        "held": sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k != "step" and v.dim()),
        "pieces": [(n, p.numel()) for n, p in model.virtual_named_parameters()],
    }


def reference(name: str, num_replicas: int, max_norm: float | None = None) -> dict[str, Tensor]:
    """The same in one process; weights."""
    model = uneven(empty=True)
    optimizer = two_groups(model, OPTIMIZERS[name])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(num_replicas):
            for x in batch(step, replica).chunk(2):
                (model(x).square().mean() / 2 / num_replicas).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return dict(model.state_dict())


def check_equal(plain: list[dict[str, Any]], sharded: list[dict[str, Any]], truth: dict[str, Tensor]) -> None:
    """Bit for bit what the same layout gives without sharding; close to one process."""
    for one, other in zip(plain, sharded, strict=True):
        for key in ("losses", "weights", "strides", "state"):
            assert same(one[key], other[key]), key
        assert one["state"]["state"]
        for name, value in other["weights"].items():
            torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["adamw", "sgd", *(pytest.param(n, marks=pytest.mark.heavy) for n in OPTIMIZERS if n not in ("adamw", "sgd"))],
)
@pytest.mark.parametrize("dp", [2, 4])
def test_numbers_equal_those_without_sharding(request: pytest.FixtureRequest, dp: int, name: str) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{dp}")
    plain = pool.run(trained, name, config=DDP)
    sharded = pool.run(trained, name, config=SHARDED)
    check_equal(plain, sharded, reference(name, dp))
    total = plain[0]["held"]
    assert all(other["held"] <= total / dp + 4 * 5 * dp for other in sharded)
