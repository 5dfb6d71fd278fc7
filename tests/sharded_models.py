"""Models and optimizers for tests of sharded optimizer state, with sizes that do not fill the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.torch as smp

DDP = {"ddp": True, "microbatches": 2, "log_level": "warning"}
SHARDED = {**DDP, "shard_optimizer_state": True}
SMALL_BUCKETS = 24 * 4 / 2**20
"""MiB; buckets of 24 fp32 elements."""

# torch's fused kernels on CPUs are left out: they round the last elements of a tensor, which don't fill a vector, otherwise
# than the rest, so that results depend on where a tensor ends.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Uneven(nn.Module):
    """Parameters of 6, 5, 1, 3 x 7 and other odd sizes, one without dims, one frozen, one never used, one channels last.

    empty: also one without elements, of a dtype of its own.
    """

    def __init__(self, empty: bool = False) -> None:
        super().__init__()
        self.six = nn.Parameter(torch.rand(6))
        self.five = nn.Parameter(torch.rand(5))
        self.one = nn.Parameter(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.linear = nn.Linear(7, 3)
        self.unused = nn.Linear(2, 2)
        self.image = nn.Parameter(torch.rand(2, 3, 2, 3).to(memory_format=torch.channels_last))
        self.number = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64)) if empty else None
        self.last = nn.Linear(3, 11)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x * self.frozen) * self.number + self.image.sum((0, 2, 3))
        hidden = hidden + (x[:, :6] * self.six).sum(-1, keepdim=True) * self.one
        if self.nothing is not None:
            hidden = hidden + self.nothing.sum()
        return self.last(torch.tanh(hidden)) + x[:, :5].square() @ self.five.expand(11, 5).T


def uneven(seed: int = 0, *, empty: bool = False) -> Uneven:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Uneven(empty)


def batch(step: int, replica: int, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.rand(size, 7, generator=generator) - 0.3


def two_groups(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Members alternate in the order of the model; the groups differ in their settings."""
    named = list(model.named_parameters())
    weights = [p for n, p in named if n.endswith(("weight", "six", "image"))]
    others = [p for n, p in named if not n.endswith(("weight", "six", "image"))]
    optimizer = make([{"params": weights}, {"params": others}])
    optimizer.param_groups[1]["lr"] = 2 * optimizer.param_groups[1]["lr"]
    return optimizer


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def tied_model(seed: int = 0) -> nn.Module:
    """Such a model with a buffer and a tie."""
    plain = uneven(seed)
    plain.register_buffer("mask", torch.arange(3) + seed)
    plain.again = nn.Linear(3, 11, bias=False)  # type: ignore[assignment]
    plain.again.weight = plain.last.weight  # type: ignore[union-attr, assignment]
    return plain


def wrapped(seed: int = 0) -> tuple[Any, Any]:
    """It and AdamW, wrapped."""
    model = smp.DistributedModel(tied_model(seed))
    return model, smp.DistributedOptimizer(two_groups(model, OPTIMIZERS["adamw"]))


def train_steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    """Every rank sees the same batch, so that any number of ranks makes the same run."""
    for step in range(first, last):
        optimizer.zero_grad()
        train_step(model, batch(step, 0))
        optimizer.step()
