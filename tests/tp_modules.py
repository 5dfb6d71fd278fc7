"""Small modules with a distributed version, for tests of marking, replacement and weights.

`FakeLinear` cuts its output features and communicates nothing: right for degree 1, and wherever no forward runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.tensor_parallel.module import DistributedModule, check_divisible, normal


class Dense(nn.Module):
    """A linear layer of a script's own."""

    def __init__(self, num_inputs: int, num_outputs: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.randn(num_outputs)) if bias else None

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * scale


class FakeLinear(DistributedModule):
    """Its distributed version, with the same names and arguments."""

    indivisible = True

    def __init__(self, num_inputs: int, num_outputs: int = 4, *, bias: bool = True, power: int = 1) -> None:
        super().__init__()
        check_divisible("num_outputs", num_outputs)
        self.power = power
        self.add_parameter("weight", (num_outputs, num_inputs), normal(0.02), dim=0)
        if bias:
            self.add_parameter("bias", (num_outputs,), normal(0.02), dim=0)
        else:
            self.bias = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * scale


class OtherNames(DistributedModule):
    """A distributed version whose weights have other names, called in another way."""

    def __init__(self, size: int, out: int, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.add_parameter("kernel", (out, size), normal(0.02), dim=0)

    def forward(self, inputs: tuple[Tensor, float]) -> dict[str, Tensor]:
        x, scale = inputs
        return {"y": x @ self.kernel.t() * scale}


class Net(nn.Module):
    """Two layers in a list, a head, and a plain module."""

    def __init__(self, width: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dense(width, width), Dense(width, num_outputs=width)])
        self.norm = nn.LayerNorm(width)
        self.head = Dense(width, width)
        if tied:
            self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(self.norm(x), scale=2.0)
        return out
