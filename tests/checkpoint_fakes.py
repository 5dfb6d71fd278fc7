"""A small model and optimizer that fulfil the checkpoint protocols without the engine.

The model is a plain module of blocks; block i belongs to stage i * stages // blocks. Before partitioning it
knows only names and shapes, as the real wrapper does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.state import PARTIAL_MARK, TensorRow, dtype_name
from shardwright.errors import CheckpointError, PartitionError
from shardwright.topology.context import world

BLOCKS = 4


class Net(nn.Module):
    """Blocks of a linear layer, a counter buffer each, and a weight shared by the first two blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(BLOCKS))
        self.blocks[1].weight = self.blocks[0].weight
        for block in self.blocks:
            block.register_buffer("count", torch.zeros((), dtype=torch.int64))
            block.register_buffer("scratch", torch.zeros(3), persistent=False)


class FakeModel:
    """Fulfils `CheckpointModel`. lazy: partitioned by the first `partition()` call instead of here."""

    def __init__(self, width: int = 5, *, seed: int = 0, lazy: bool = False) -> None:
        torch.manual_seed(seed)
        self.net = Net(width)
        self.stages = world().table.degrees.pp
        self.stage = world().coordinates.pp
        self.restored: Mapping[str, Any] | None = None
        self.step = 0
        self.half_loaded: set[StateRole] = set()
        self._partitioned = False
        self._waiting: list[Callable[[], None]] = []
        if not lazy:
            self.partition()

    def partition(self) -> None:
        self._partitioned = True
        for callback in self._waiting:
            callback()
        self._waiting.clear()

    @property
    def partitioned(self) -> bool:
        return self._partitioned

    def is_local(self, name: str) -> bool:
        return int(name.split(".")[1]) * self.stages // BLOCKS == self.stage

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.net.named_parameters() if self.is_local(name))

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.net.state_dict().items()}

    def tied_names(self) -> list[list[str]]:
        return [["blocks.0.weight", "blocks.1.weight"]]

    def local_state_dict(self) -> dict[str, Any]:
        local = {name: value for name, value in self.net.state_dict().items() if self.is_local(name)}
        return {**local, PARTIAL_MARK: True}

    def parameter_table(self) -> list[TensorRow]:
        return self.tensor_table()

    def tensor_table(self) -> list[TensorRow]:
        return [
            TensorRow(name, tuple(t.shape), dtype_name(t), (0,) * t.dim(), tuple(t.shape))
            for name, t in self.net.state_dict().items()
            if self.is_local(name)
        ]

    def partition_record(self) -> dict[str, Any] | None:
        if self.stages == 1:
            return None
        return {"stage_of": {f"blocks.{i}": i * self.stages // BLOCKS for i in range(BLOCKS)}, "how": "fake"}

    def origin_record(self) -> None:
        return None

    def structure_record(self) -> None:
        return None

    def restore_partition(self, record: Mapping[str, Any]) -> None:
        if record != self.partition_record():
            raise PartitionError(f"partition {record} isn't mine")
        self.restored = record

    def run_when_partitioned(self, callback: Callable[[], None]) -> None:
        if self._partitioned:
            callback()
        else:
            self._waiting.append(callback)

    def level_replicas(self) -> None:
        pass

    def load_begins(self, parts: Collection[StateRole]) -> set[StateRole]:
        before = set(self.half_loaded)
        self.half_loaded |= set(parts)
        return before

    def load_ends(self, parts: Collection[StateRole]) -> None:
        self.half_loaded -= set(parts)

    def load_local(self, state: Mapping[str, Any], *, strict: bool) -> None:
        mine = self.net.state_dict()
        wanted = {name for name in mine if self.is_local(name)}
        if strict and set(state) != wanted:
            raise CheckpointError(f"names differ: {sorted(set(state) ^ wanted)}")
        for name in wanted & set(state):
            mine[name].copy_(state[name])

    def random_position(self) -> dict[str, int]:
        return {"step": self.step}

    def restore_random_position(self, position: Mapping[str, int]) -> None:
        self.step = position["step"]


class FakeOptimizer:
    """Fulfils `CheckpointOptimizer`: AdamW over weights and biases, in a group each.

    frozen_stage: parameters of this stage take no part.   without_gradient: names that never get a gradient.
    """

    def __init__(
        self, model: FakeModel, *, frozen_stage: int | None = None, without_gradient: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.without_gradient = set(without_gradient)
        self.names: list[list[str]] = [[], []]
        groups: list[dict[str, Any]] = [
            {"params": [], "lr": 1e-2, "weight_decay": 0.1},
            {"params": [], "lr": 1e-3, "weight_decay": 0.0},
        ]
        for name, parameter in model.named_parameters():
            if model.stage != frozen_stage:
                index = 0 if name.endswith("weight") else 1
                self.names[index].append(name)
                groups[index]["params"].append(parameter)
        self.inner = torch.optim.AdamW(groups)

    def full_group_names(self) -> list[list[str]]:
        names = [name for name, _ in self.model.net.named_parameters()]
        return [[n for n in names if n.endswith("weight")], [n for n in names if n.endswith("bias")]]

    def group_names(self) -> list[list[str]]:
        return self.names

    def parameter_table(self) -> list[TensorRow]:
        return self.model.parameter_table()

    def flat_groups(self, model: Any) -> None:
        return None

    def local_state_dict(self, *, gather_if_shard: bool = True) -> dict[str, Any]:
        return {**self.inner.state_dict(), PARTIAL_MARK: True}

    def load_local(self, state: dict[str, Any]) -> None:
        assert state.pop(PARTIAL_MARK)
        self.inner.load_state_dict(state)

    def half_precision_state(self) -> dict[str, Any] | None:
        return None

    def train(self, num_steps: int = 1) -> None:
        """Step with gradients drawn from the random state of this rank."""
        for _ in range(num_steps):
            for name, parameter in self.model.named_parameters():
                if name not in self.without_gradient:
                    parameter.grad = torch.randn_like(parameter)
            self.inner.step()
            self.model.step += 1
            for name, buffer in self.model.net.named_buffers():
                if self.model.is_local(name) and name.endswith("count"):
                    buffer += 1


def fingerprint(model: FakeModel, optimizer: FakeOptimizer) -> dict[str, Any]:
    """Everything that a resumed run must have bit for bit, in a form that travels between processes."""
    state = optimizer.local_state_dict()
    names = [name for group in optimizer.group_names() for name in group]
    return {
        "model": {k: v.tolist() for k, v in model.local_state_dict().items() if k != PARTIAL_MARK},
        "optimizer": {names[i]: {k: v.tolist() for k, v in s.items()} for i, s in state["state"].items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
        "random": torch.rand(3).tolist(),
        "step": model.step,
    }
