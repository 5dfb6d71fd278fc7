"""Small models over two stages, and the step bodies that most tests of units use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
BATCH = 4


def vectors(step: int, *, width: int = WIDTH, batch: int = BATCH) -> Tensor:
    """A batch that depends on the step only."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(step))


def one_tensor(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a step: one batch of vectors."""
    return (vectors(step),), {}


def train(model: Any, x: Tensor) -> Any:
    """The plainest body: a number from the model's output, backward, both returned."""
    out = model(x)
    loss = out.square().mean()
    model.backward(loss)
    return loss, out


class Block(nn.Module):
    """Two layers around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.Tanh()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Chain(nn.Module):
    """The given modules one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def stages(*owners: int) -> dict[str, int]:
    """The stages of a chain's blocks."""
    return {f"blocks.{i}": owner for i, owner in enumerate(owners)}


class Body(nn.Module):
    """A linear layer on stage 0 (`first`), a module of the case on stage 1 (`inner`)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.first(x))


PLACE = {"inner": 1}
