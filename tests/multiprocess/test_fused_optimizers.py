"""LAMB and NovoGrad on a model that is cut: norms are those of whole parameters and of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_STAGES
from harness import RankPool

TWO_SLICES = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2, "log_level": "warning"}
STEPS = 4


def make(kind: str, parameters: Any) -> Any:
    options = {"lr": 0.05, "weight_decay": 0.1}
    if kind == "lamb":
        return smp.optimizers.FusedLAMB(parameters, max_grad_norm=0.05, **options)  # below the norm
    return smp.optimizers.FusedNovoGrad(parameters, norm_type=0 if kind == "novograd-inf" else 2, **options)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
    ]


def trained(kind: str) -> dict[str, Tensor]:
    """Over stages, and over replicas."""
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(make(kind, two_groups(model)))
    ranks.train(model, optimizer, STEPS)
    assert not any(g["step"] != STEPS for g in optimizer.param_groups)
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["lamb", "novograd"])
@pytest.mark.parametrize("dp", [1, 2])
def test_over_stages(request: pytest.FixtureRequest, kind: str, dp: int) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{2 * dp}")
    results = pool.run(trained, kind, config=TWO_BY_TWO if dp == 2 else TWO_STAGES)
    truth = ranks.net()
    optimizer = make(kind, two_groups(truth))
    for step in range(STEPS):
        ranks.reference_step(truth, optimizer, step, range(dp))
    for weights in results:
        for name, value in truth.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=2e-5, atol=1e-6)


class Mixed(nn.Module):
    """A linear layer that is cut over its inputs, and one that is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Linear(12, 6)
        self.whole = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(torch.tanh(self.cut(x)))


def mixed() -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Mixed()


def batch(step: int, index: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + index))


def sliced(kind: str) -> dict[str, Tensor]:
    module = mixed()
    smp.set_tensor_parallelism(module.cut)
    model = smp.DistributedModel(module)
    assert model.is_distributed_parameter(module.cut.weight)
    optimizer = smp.DistributedOptimizer(make(kind, two_groups(model)))
    for step in range(STEPS):
        optimizer.zero_grad()
        ranks.train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["lamb", "novograd", "novograd-inf"])
def test_over_slices(pool2: RankPool, kind: str) -> None:
    results = pool2.run(sliced, kind, config=TWO_SLICES)
    truth = mixed()
    optimizer = make(kind, two_groups(truth))
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(2):
            for part in batch(step, index).chunk(2):
                (ranks.loss_of(truth, part) / 4).backward()
        optimizer.step()
    for weights in results:
        for name, value in truth.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=2e-5, atol=1e-6)
