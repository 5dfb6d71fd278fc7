"""What tests of the wrappers run on every rank: a small model, its stages, its data, its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import models
import shardwright.torch as smp
from plain_modules import WIDTH, RunningScale

TWO_STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "log_level": "warning"}
TWO_REPLICAS = {"ddp": True, "microbatches": 2, "log_level": "warning"}
TWO_BY_TWO = {**TWO_STAGES, "ddp": True}


class Net(nn.Module):
    """Four blocks with buffers, a parameter and a buffer of the root's own, a state that is no tensor."""

    positions: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.register_buffer("positions", torch.arange(WIDTH) % 3, persistent=False)
        self.blocks = nn.ModuleList(RunningScale() for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(x) + block(x) * self.positions
        return self.head(x * self.scale)


class Head(nn.Linear):
    """The last layer, with a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 5)
        self.note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def net(seed: int = 0, **options: Any) -> Net:
    """The same model on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(**options)


def cut(model: nn.Module, first_of_stage_1: int = 2) -> None:
    """Blocks from this number on, and the head, go to stage 1."""
    module = model.get_module() if isinstance(model, smp.DistributedModel) else model
    for block in list(module.blocks)[first_of_stage_1:]:
        smp.set_partition(block, 1)
    smp.set_partition(module.head, 1)


def data(step: int = 0, replica: int | None = None, size: int = 8) -> Tensor:
    """This replica's inputs of one step."""
    replica = smp.dp_rank() if replica is None else replica
    return models.vector_batch(10 * step + replica, size)["x"]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, x: Tensor) -> Tensor:
    return model(x)


def adam(model: nn.Module, lr: float = 0.01, *, frozen_too: bool = True) -> torch.optim.Optimizer:
    """Two groups whose members alternate in the order of the model."""
    named = [(n, p) for n, p in model.named_parameters() if frozen_too or p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1, "lr": lr},
            {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0, "lr": 2 * lr},
        ]
    )


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> list[Tensor]:
    """Losses of some steps, by microbatch."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(train_step(model, data(step)).stack())
        optimizer.step()
    return losses


def reference(steps: int, num_replicas: int = 1, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training in one process."""
    model = net(seed)
    optimizer = adam(model)
    for step in range(steps):
        reference_step(model, optimizer, step, range(num_replicas))
    return model, optimizer


def reference_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, replicas: Sequence[int], divisor: int = 0
) -> None:
    """One step in one process over the data of some replicas; divisor: how many count, if not all of these."""
    optimizer.zero_grad()
    add_gradients(model, step, replicas, 2 * (divisor or len(replicas)))
    optimizer.step()


def add_gradients(model: nn.Module, step: int, replicas: Sequence[int], divisor: int, size: int = 8) -> None:
    """Gradients of the data of some replicas. Each starts with the present buffers; those of the first are kept."""
    start = {n: b.clone() for n, b in model.named_buffers()}
    kept: dict[str, Tensor] = {}
    for replica in replicas:
        _set_buffers(model, start)
        for x in data(step, replica, size).chunk(2):
            (loss_of(model, x) / divisor).backward()
        kept = kept or {n: b.clone() for n, b in model.named_buffers()}
    _set_buffers(model, kept)


def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def tensors(content: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from tensors(value)


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, tensors in nested containers included."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def held_bytes(model: nn.Module) -> int:
    """Memory of all parameters and buffers, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _all(model)}
    return sum(storages.values())


def plain_bytes(named: Any) -> int:
    """Memory that named tensors need."""
    return sum(t.numel() * t.element_size() for _, t in named)


def _all(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
