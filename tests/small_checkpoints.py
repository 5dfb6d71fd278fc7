"""Checkpoints of a small model with odd sizes, a tied weight, buffers and two parameter groups, from a world of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.torch as smp


class Small(nn.Module):
    """Embedding, blocks, a head that shares the embedding's weight."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 7), nn.BatchNorm1d(7)) for _ in range(blocks)
        )
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).mean(1)
        for block in self.blocks:
            h = h + block(h)
        found: Tensor = self.head(h)
        return found


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups: what decays, and the rest."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def wrapped(seed: int = 0) -> tuple[Any, Any]:
    """The model and AdamW, wrapped."""
    torch.manual_seed(seed)
    model = smp.DistributedModel(Small())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model), lr=1e-2))


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Steps with data that depend on the step alone; returns losses."""

    @smp.step
    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), x[:, 0])
        model.backward(loss)
        return loss

    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 11, (8, 3), generator=generator)
        optimizer.zero_grad()
        losses.append(float(train_step(model, x).reduce_mean()))
        optimizer.step()
    return losses


def save(path: Path | str) -> list[float]:
    """Two steps, then a full checkpoint "whole" and a partial one "two", then two more steps, whose losses are returned.

    Called by: every rank of a job.
    """
    model, optimizer = wrapped()
    train(model, optimizer, 0, 2)
    for tag, partial in (("whole", False), ("two", True)):
        smp.save_checkpoint(path, tag, partial=partial, model=model, optimizer=optimizer, user_content={"step": 2})
    return train(model, optimizer, 2, 4)
