"""Which modules get a border."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.unit import units_of


class Tower(nn.Module):
    """Reads a layer that hangs in several places."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


class Towers(nn.Module):
    """Like T5 of transformers 4: one embedding, and both stacks hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2)
        self.first = Tower(self.shared)
        self.second = Tower(self.shared)


def names(stage_of: dict[str, int]) -> list[str]:
    wire: Any = None
    runtime = Runtime(0, 2, torch.device("cpu"), wire)
    return [unit.name for unit in units_of(runtime, Towers(), stage_of)]


def test_a_module_is_a_unit_only_where_all_it_holds_is_on_one_stage() -> None:
    first = {"first": 0, "first.own": 0, "first.own.0": 0, "first.own.1": 0}
    second = {"second": 1, "second.own": 1, "second.own.0": 1, "second.own.1": 1}
    found = names({"": 0, "shared": 0, **first, **second})
    assert "first" in found
    assert "second" not in found, "the layer that it shares lives on the other stage"
    assert {"shared", "first.own", "second.own", "second.own.0"} <= set(found)
