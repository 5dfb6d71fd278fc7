"""Training in one process with plain PyTorch: the truth that every layout is compared with.

Microbatches and data-parallel replicas run one after another on one model; gradients are means over both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from models import Batch, LossOf

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Run:
    """What a training run showed.

    losses: [step][replica], each a tensor [microbatches].
    gradients: [step], by every name a parameter has; None where no microbatch of any replica reached it.
    weights, buffers: after the last step, by every name; buffers are those of replica 0.
    """

    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose epsilon is large enough that gradients which are zero but for rounding (the key bias of an
    attention layer, for example) don't become full-sized updates, so that runs can be compared at all."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def microbatch(batch: Batch, index: int, num_microbatches: int) -> Batch:
    """The equal part of every tensor that belongs to one microbatch."""
    return {name: value.chunk(num_microbatches)[index] for name, value in batch.items()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by every name that they have; a tied one has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def run_reference(
    model: nn.Module,
    loss_of: LossOf,
    data: Sequence[Sequence[Batch]],
    *,
    num_microbatches: int = 1,
    make_optimizer: MakeOptimizer = adamw,
) -> Run:
    """Train `model` in place, one optimizer step per entry of `data`.

    data: [step][replica] batches.
    Buffers: every replica starts a step with those of replica 0, as `broadcast_buffers` makes it.
    """
    run = Run()
    optimizer = make_optimizer(list(model.parameters()))
    for replicas in data:
        optimizer.zero_grad(set_to_none=True)
        losses, gradients = _gradients(model, loss_of, replicas, num_microbatches)
        run.losses.append(losses)
        for name, parameter in named_parameters(model).items():
            parameter.grad = gradients[name]
        run.gradients.append({name: None if g is None else g.clone() for name, g in gradients.items()})
        optimizer.step()
    run.weights = copies(named_parameters(model))
    run.buffers = copies(dict(model.named_buffers(remove_duplicate=False)))
    return run


def _gradients(
    model: nn.Module, loss_of: LossOf, replicas: Sequence[Batch], num_microbatches: int
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Losses of one step by replica, and mean gradients by name. Leaves `model` with replica 0's buffers."""
    start = copies(dict(model.named_buffers()))
    kept: dict[str, Tensor] = {}
    losses: list[Tensor] = []
    total: dict[str, Tensor | None] = dict.fromkeys(named_parameters(model))
    for rank, batch in enumerate(replicas):
        _set_buffers(model, start)
        step_losses = []
        for index in range(num_microbatches):
            loss = loss_of(model, microbatch(batch, index, num_microbatches))
            (loss / num_microbatches).backward()
            step_losses.append(loss.detach())
        losses.append(torch.stack(step_losses))
        kept = kept or copies(dict(model.named_buffers()))
        for name, parameter in named_parameters(model).items():
            if parameter.grad is not None:
                share = parameter.grad / len(replicas)
                previous = total[name]
                total[name] = share if previous is None else previous + share
        for parameter in model.parameters():
            parameter.grad = None
        if rank + 1 == len(replicas):
            _set_buffers(model, kept)
    return losses, total


def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])
