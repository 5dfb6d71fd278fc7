"""A small GPT-2 that is planned for, and trained to see what it really holds."""

from __future__ import annotations

from typing import Any

import torch

import measured_memory
import shardwright.torch as smp
from shardwright.config.parse import resolve
from shardwright.engine.planning.layout import Layout, work_out
from shardwright.engine.planning.memory import Habits
from shardwright.engine.planning.model import Subject, look
from shardwright.engine.planning.optimizer import optimizer_class, probe
from shardwright.topology import context

SHAPE = {"n_embd": 256, "n_layer": 8, "n_head": 4, "vocab_size": 2048, "n_positions": 128}
SAMPLES, TOKENS = 2, 128
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.01, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}


def build() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SHAPE))


def tokens(samples: int) -> torch.Tensor:
    return torch.arange(samples * TOKENS).view(samples, TOKENS) % SHAPE["vocab_size"]


def estimate(config: dict[str, Any], world_size: int, optimizer: str, **habits: Any) -> Layout:
    """What the plan says of `train`."""
    with torch.device("meta"):
        module = build()
    ids = tokens(SAMPLES)
    subject = Subject(module, kwargs={"input_ids": ids, "labels": ids, "use_cache": False})
    needs = probe(optimizer_class(optimizer), {k: v for k, v in OPTIONS[optimizer].items() if k != "lr"})
    resolved = resolve(config, {}).config
    return work_out(look(subject, resolved, world_size), resolved, world_size, Habits(needs, device="cpu", **habits))


def train(optimizer: str, checkpointing: bool = False, as_view: bool = False) -> tuple[int, int]:
    """(pp rank, peak bytes of tensors) of some steps."""
    measured_memory.map_tensors()
    module = build()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module, gradient_as_bucket_view=as_view)
    del module  # what was replaced in it would stay
    if checkpointing:
        transformer: Any = model.module.transformer
        smp.set_activation_checkpointing(transformer.h if hasattr(transformer, "h") else transformer.seq_layers)
    made = optimizer_class(optimizer)(model.parameters(), **OPTIONS[optimizer])
    wrapped = smp.DistributedOptimizer(made)
    ids = tokens(SAMPLES * context.world().config.microbatches)

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.backward(loss)

    def run() -> None:
        wrapped.zero_grad(set_to_none=True)
        step(model, ids)
        wrapped.step()

    peak = measured_memory.peak_of(run)
    return smp.pp_rank(), peak
