"""What ranks do in tests of sharded data parallelism, and the comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import models
import parity
import reference
import shardwright.torch as smp

STEPS = 3
BATCH = 8


def config(degree: int, microbatches: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "ddp": True,
        "microbatches": microbatches,
        "sharded_data_parallel_degree": degree,
        "sdp_gradient_clipping": 0,
        "log_level": "warning",
        **more,
    }


@dataclass
class Run:
    """What one rank saw: whole gradients and weights, in the plain model's names.

    param_bytes, state_bytes: of the shards of parameters and optimizer state, at rest after the last step.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    param_bytes: int = 0
    state_bytes: int = 0


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return smp.optimizers.FusedLAMB(parameters, lr=1e-2)


def train(name: str, together_with: str = "") -> Run:
    """Three steps of a model of `models`; rank 0's weights are the true ones.

    together_with: "smp" or "transformers" for recomputed blocks, "lamb" for that optimizer.
    """
    plain, make_batch, loss_of = models.make(name, seed=0 if smp.rank() == 0 else 7)
    if together_with == "transformers":
        plain.gradient_checkpointing_enable()  # type: ignore[operator]
    model = smp.DistributedModel(plain)
    if together_with == "smp":
        smp.set_activation_checkpointing(model.get_module().transformer.h)  # type: ignore[union-attr, arg-type]
    make = lamb if together_with == "lamb" else reference.adamw
    optimizer = smp.DistributedOptimizer(make(list(model.parameters())))

    @smp.step
    def train_step(model: Any, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    run = Run()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(train_step(model, make_batch(parity.batch_seed(step, smp.dp_rank()), BATCH)).stack())
        run.gradients.append(parity.held_gradients(model))
        optimizer.step()
        run.norms.append(optimizer._global_grad_norm)
    run.param_bytes = held_bytes(dict(model.local_state_dict()).values())
    run.state_bytes = held_bytes(v for s in optimizer.state.values() for k, v in s.items() if k != "step")
    run.weights = model.state_dict()
    return run


def held_bytes(values: Any) -> int:
    """Bytes of what is really allocated."""
    storages = {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor) and v.numel()
    }
    return sum(storages.values())


def expected(
    name: str, num_replicas: int, microbatches: int, make_optimizer: reference.MakeOptimizer = reference.adamw
) -> reference.Run:
    """The same training in one process."""
    model, make_batch, loss_of = models.make(name)
    data = [[make_batch(parity.batch_seed(s, r), BATCH) for r in range(num_replicas)] for s in range(STEPS)]
    return reference.run_reference(
        model, loss_of, data, num_microbatches=microbatches, make_optimizer=make_optimizer
    )


def check(runs: list[Run], truth: reference.Run) -> None:
    """Compare every rank with one process, and ranks with each other, bit for bit."""
    # Sums over ranks and microbatches are taken in another order: of each rank's microbatches first.
    compare = parity._Comparison("ranks sum in another order")
    for rank, run in enumerate(runs):
        for step in range(STEPS):
            wanted = truth.gradients[step]
            largest = parity._largest(wanted)
            compare(f"loss of step {step}, rank {rank}", run.losses[step], truth.losses[step][rank])
            for name, gradient in run.gradients[step].items():
                compare(f"gradient of {name} in step {step}, rank {rank}", gradient, wanted[name], scale=largest)
            unique = [wanted[name] for name in run.gradients[step]]
            norm = torch.stack([g.double().norm() for g in unique if g is not None]).norm()
            compare(f"norm of step {step}, rank {rank}", torch.tensor(run.norms[step]).double(), norm)
        for name, weight in truth.weights.items():
            compare(f"weight {name}, rank {rank}", run.weights[name], weight, scale=parity._largest(truth.weights))
            assert torch.equal(run.weights[name], runs[0].weights[name]), f"{name} has come apart on rank {rank}"
    assert not compare.failures, f"{len(compare.failures)} differences:\n" + "\n".join(compare.failures[:20])


def whole_flat(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Every parameter put together from the flat groups of all ranks of a shard group, as the scripts' helpers do."""
    shapes = smp.sharded_data_parallel_checkpoint.get_param_shapes(model, optimizer)
    degree = smp.state.cfg.sharded_data_parallel_degree
    first = smp.rdp_rank() // degree * degree
    found: dict[str, Tensor] = {}
    everyone = smp.allgather([g.clone() for g in optimizer.fp32_partitioned_groups_flat], smp.RDP_GROUP)
    for number, group in enumerate(shapes):
        offset = 0
        for name, shape in group.items():
            block = -(-shape.numel() // degree)
            parts = [rank[number][offset : offset + block] for rank in everyone[first : first + degree]]
            found[name] = torch.cat(parts)[: shape.numel()].view(shape)
            offset += block
        assert all(len(rank[number]) == offset for rank in everyone)
    return found


class UsedElsewhere(nn.Module):
    """The root multiplies with a weight of its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.blocks[0].weight  # type: ignore[no-any-return]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
