"""A small model over stages, placed by hand, whose blocks can be told to misbehave; for tests of whole steps.

Everything here runs on the ranks. Modules are named as in transformers: 'transformer.h.2', 'head'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
BATCH = 8


class Block(nn.Module):
    """A linear layer with a residual; calls `act` on what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Transformer(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class Net(nn.Module):
    """Blocks and a head, and a buffer that only tests use. x: [batch, WIDTH]."""

    shift: Tensor

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer = Transformer(num_blocks)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(x))


def batch(seed: int = 0, size: int = BATCH) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def wrapped(num_blocks: int = 4, **kwargs: Any) -> nn.Module:
    """The net, its blocks dealt out evenly over the stages and its head on the last one, as a DistributedModel."""
    import shardwright.torch as smp

    net = Net(num_blocks)
    stages = smp.pp_size()
    for index, block in enumerate(net.transformer.h):
        smp.set_partition(block, index * stages // num_blocks)
    smp.set_partition(net.head, stages - 1)
    return smp.DistributedModel(net, **kwargs)


def make_step() -> Callable[..., Any]:
    """A plain training step: the mean square of the net's output."""
    import shardwright.torch as smp

    @smp.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return train_step


def gradients(model: Any) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.local_named_parameters()}


def reference_gradients(data: list[Tensor], num_microbatches: int, num_blocks: int = 4) -> dict[str, Tensor]:
    """What one process accumulates over the batches: the sum of their means over microbatches."""
    net = Net(num_blocks)
    for x in data:
        for part in x.chunk(num_microbatches):
            (net(part).square().mean() / num_microbatches).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@dataclass
class Ended:
    """How one scenario ended on one rank. error: its text with notes; kind: its class; None if it returned."""

    kind: str | None
    error: str
    seconds: float
    value: Any = None


def in_turn(scenarios: list[tuple[Callable[..., Any], tuple[Any, ...]]], config: dict[str, Any]) -> list[Ended]:
    """Run several scenarios that may fail, each in a world of its own, in the same processes."""
    from shardwright.topology import context, failure

    ended = []
    where = os.environ["SHARDWRIGHT_INIT_METHOD"]
    for number, (scenario, args) in enumerate(scenarios):
        os.environ["SHARDWRIGHT_INIT_METHOD"] = f"{where}-{number}"
        context.init(config)
        start = time.monotonic()
        try:
            value = scenario(*args)
            ended.append(Ended(None, "", time.monotonic() - start, value))
        except BaseException as error:
            seconds = time.monotonic() - start
            failure.board().report(error)
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            ended.append(Ended(type(error).__name__, text, seconds))
        context.shutdown()
    return ended
