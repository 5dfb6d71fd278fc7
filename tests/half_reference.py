"""Half precision training in one process with plain PyTorch: the truth for masters, weights and the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import models


@dataclass
class HalfRun:
    """After each step: masters and weights by name, the loss scale to come, the norm before clipping, was it skipped."""

    masters: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


Poison = Callable[[int, dict[str, nn.Parameter]], None]


def train_in_half(
    model: nn.Module,
    dtype: torch.dtype,
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    losses_of: Callable[[int], Sequence[Callable[[Any], Tensor]]],
    steps: int,
    *,
    forward: Callable[..., Any] | None = None,
    scale: float = 1.0,
    window: int = 1000,
    dynamic: bool = False,
    max_norm: float | None = None,
    poison: Poison | None = None,
    full_sums: bool = False,
) -> HalfRun:
    """Train with fp32 masters made by hand.

    losses_of(step): one function per microbatch (of all replicas) from `forward` to its loss.   forward: the model with
    fp32 outside; by default a function of one tensor.   full_sums: add up microbatches in fp32.   dynamic: halve the scale after an overflow, double it after `window` clean steps since the last one.
    """
    model.to(dtype)
    named = dict(model.named_parameters())
    masters = {n: nn.Parameter(p.detach().float()) for n, p in named.items()}
    optimizer = make_optimizer(list(masters.items()))
    run, clean = HalfRun(), 0
    check = dtype is torch.float16

    def one_tensor(x: Tensor) -> Tensor:
        result: Tensor = model(x.to(dtype)).float()
        return result

    for step in range(steps):
        functions = losses_of(step)
        model.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for function in functions:
            loss = function(forward or one_tensor)
            loss.backward(torch.full_like(loss, scale / len(functions)))
            if full_sums:
                for name, parameter in named.items():
                    if parameter.grad is not None:
                        sums[name] = sums.get(name, 0) + parameter.grad.float()
                        parameter.grad = None
        if poison is not None:
            poison(step, named)
        sums = sums or {n: p.grad.float() for n, p in named.items() if p.grad is not None}
        grads = {n: g / scale for n, g in sums.items()}
        overflow = check and not all(bool(torch.isfinite(g).all()) for g in grads.values())
        if not overflow:
            for name, master in masters.items():
                master.grad = grads.get(name)
            if max_norm is not None:
                run.norms.append(float(nn.utils.clip_grad_norm_(list(masters.values()), max_norm)))
            optimizer.step()
            with torch.no_grad():
                for name, master in masters.items():
                    named[name].copy_(master)
        elif max_norm is not None:
            run.norms.append(-1.0)
        clean = 0 if overflow else clean + 1
        if dynamic and overflow:
            scale /= 2
        elif dynamic and clean % window == 0:
            scale *= 2
        run.masters.append({n: m.detach().clone() for n, m in masters.items()})
        run.weights.append({n: p.detach().clone() for n, p in named.items()})
        run.scales.append(scale)
        run.skipped.append(overflow)
    return run


# -- a small model and its data ------------------------------------------------------------------------------

WIDTH = 16


class Chain(nn.Module):
    """Linear layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in ((WIDTH, 6), (6, 10), (10, 7)))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def chain() -> Chain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Chain()


def adam(named: Any) -> torch.optim.Optimizer:
    """Two groups whose members alternate in the order of the model."""
    members = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in members if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in members if not n.endswith("weight")], "weight_decay": 0.0},
        ],
        lr=0.01,
        eps=1e-4,
    )


def batches(step: int, num_replicas: int) -> list[Tensor]:
    """Microbatches of all replicas, in the order in which one process adds them up."""
    return [x for replica in range(num_replicas) for x in models.vector_batch(10 * step + replica, 8)["x"].chunk(2)]
