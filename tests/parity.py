"""One parity case: its settings, what each rank does, and the comparison with one process.

`train` runs on every rank; `expected` and `check` run in the test's own process.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import models
import reference
from covering import Row, covering_rows

STEPS = 3
BATCH = 8
REL = 1e-5


@dataclass(frozen=True)
class Case:
    """One row of the parity matrix. Field names are the axes."""

    model: str
    pp: int
    microbatches: int
    schedule: str
    partition: str
    tied: str
    dp: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp

    @property
    def title(self) -> str:
        """Short name, used as the test's id."""
        tied = f"-{self.tied}" if models.MODELS[self.model].tied else ""
        layout = f"pp{self.pp}-mb{self.microbatches}-{self.schedule}-{self.partition}{tied}-dp{self.dp}"
        return f"{self.model}-{layout}"

    @property
    def reordered(self) -> str:
        """Why sums may be taken in another order than in one process; "" asks for bitwise equality."""
        if self.tied == "replicate":
            return "each stage first adds up its own uses of the tied weight, over all microbatches"
        return models.MODELS[self.model].reordered

    def config(self) -> dict[str, Any]:
        """Settings for `smp.init`."""
        return {
            "pipeline_parallel_degree": self.pp,
            "microbatches": self.microbatches,
            "pipeline": self.schedule,
            "auto_partition": self.partition == "auto",
            "tied_weights": self.tied,
            "ddp": self.dp > 1,
        }


AXES: dict[str, Sequence[Any]] = {
    "model": list(models.MODELS),
    "pp": (2, 4),
    "microbatches": (1, 2, 4, 8),
    "schedule": ("interleaved", "simple"),
    "partition": ("auto", "manual"),
    "tied": ("colocate", "replicate"),
    "dp": (1, 2),
}


def _allowed(row: Row) -> bool:
    return row["tied"] == "colocate" or models.MODELS[str(row["model"])].tied


def _cost(row: Row) -> float:
    """Eight processes are allowed, but one row with them is enough on a small machine."""
    return {2: 1.0, 4: 1.2, 8: 30.0}[int(row["pp"]) * int(row["dp"])]  # type: ignore[call-overload]


@functools.cache
def matrix() -> tuple[Case, ...]:
    """The covering set: every pair of settings that can occur together occurs in some case."""
    return tuple(Case(**row) for row in covering_rows(AXES, allowed=_allowed, cost=_cost))  # type: ignore[arg-type]


assert list(AXES) == [f.name for f in fields(Case)]


# ------------------------------------------------------------------ on the ranks


@dataclass
class RankRun:
    """What one rank saw; the tensors of its own stage, by the names of the model that was wrapped."""

    pp_rank: int
    rdp_rank: int
    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def batch_seed(step: int, replica: int) -> int:
    return 10 * step + replica


def place_by_hand(model: nn.Module, case: Case) -> None:
    """Deal the blocks out evenly; modules of the last stage go there unless a tied weight holds them back."""
    import shardwright.torch as smp

    for name, stage in models.even_stages(models.block_names(model), case.pp).items():
        smp.set_partition(model.get_submodule(name), stage)
    spec = models.MODELS[case.model]
    if case.tied == "replicate" or not spec.tied:
        for name in spec.tail:
            smp.set_partition(model.get_submodule(name), case.pp - 1)


def train(case: Case) -> RankRun:
    """Train the case's model for three steps on this rank. Called on every rank after `smp.init`."""
    import shardwright.torch as smp

    model, make_batch, loss_of = models.make(case.model)
    if case.partition == "manual":
        place_by_hand(model, case)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def train_step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    run = RankRun(smp.pp_rank(), smp.rdp_rank(), [], [], {}, {})
    for step in range(STEPS):
        batch = make_batch(batch_seed(step, smp.dp_rank()), BATCH)
        if smp.pp_rank() > 0:  # the contract: only pipeline rank 0 has data, the others pass dummies
            batch = {name: torch.zeros(BATCH, 0) for name in batch}
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(train_step(model, batch).stack())
        run.gradients.append(held_gradients(model))
        optimizer.step()
    run.weights = reference.copies(dict(model.local_named_parameters()))
    run.buffers = reference.copies(dict(model.local_named_buffers()))
    return run


def held_gradients(model: Any) -> dict[str, Tensor | None]:
    """Copies of the gradients of this rank's parameters. Pieces of sharded state are gathered from their owners, shards
    of sharded parameters from their group."""
    import shardwright.torch as smp
    from shardwright.data_parallel import shards
    from shardwright.engine import piece_state

    found = {
        n: None if p.grad is None else shards.whole(p.grad).detach().clone() for n, p in model.local_named_parameters()
    }
    if not (smp.state.cfg.shard_optimizer_state and smp.dp_size() > 1):
        return found
    pieces = {n: model._sharding.piece(p) for n, p in model.local_named_parameters()}
    mine = {n: piece_state.part_of(p, p.tensor.grad) for n, p in pieces.items() if p is not None}
    everyone = smp.allgather((smp.tp_rank(), mine), smp.DP_GROUP)
    for name in mine:
        over_rdp = model.is_scaled_batch_parameter(pieces[name].parameter)
        parts = [told[name] for tp, told in everyone if tp == smp.tp_rank() or not over_rdp]
        assert found[name] is None, f"{name} has a whole gradient"
        found[name] = piece_state.joined(parts)
    return found


# ------------------------------------------------------------------ in the test's process


def expected(case: Case) -> reference.Run:
    """The same training in one process; shared by all cases with the same data."""
    return _expected(case.model, case.microbatches, case.dp)


@functools.cache
def _expected(name: str, num_microbatches: int, dp: int) -> reference.Run:
    model, make_batch, loss_of = models.make(name)
    data = [[make_batch(batch_seed(step, replica), BATCH) for replica in range(dp)] for step in range(STEPS)]
    return reference.run_reference(model, loss_of, data, num_microbatches=num_microbatches)


def check(case: Case, ranks: Sequence[RankRun], truth: reference.Run) -> None:
    """Compare every rank's losses, gradients, weights and buffers with one process.

    Raises: AssertionError naming what differs, where, and by how much.
    """
    _check_complete(case, ranks)
    compare = _Comparison(case.reordered)
    for run in ranks:
        where = f"stage {run.pp_rank}, replica {run.rdp_rank}"
        for step in range(STEPS):
            wanted = truth.gradients[step]
            compare(f"loss of step {step}, {where}", run.losses[step], truth.losses[step][run.rdp_rank])
            for name, gradient in run.gradients[step].items():
                if gradient is None and _summed_elsewhere(case, name, run, ranks):
                    continue
                what = f"gradient of {name} in step {step}, {where}"
                compare(what, gradient, wanted[name], scale=_largest(wanted))
        for name, weight in run.weights.items():
            compare(f"weight {name}, {where}", weight, truth.weights[name], scale=_largest(truth.weights))
        if run.rdp_rank == 0:
            for name, buffer in run.buffers.items():
                compare(f"buffer {name}, {where}", buffer, truth.buffers[name])
    assert not compare.failures, f"{len(compare.failures)} differences:\n" + "\n".join(compare.failures[:20])


def _largest(tensors: Mapping[str, Tensor | None]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors.values() if tensor is not None)


class _Comparison:
    """Collects differences; exact unless there is a reason for another order of sums.

    With a reason: |difference| <= 1e-5 of the tensor's largest value. A tensor that is zero but for rounding
    (the key bias of an attention layer) has no meaningful largest value; `scale`, that of the whole model, times
    1e-3 stands in for it.
    """

    def __init__(self, reordered: str) -> None:
        self.reordered = reordered
        self.failures: list[str] = []

    def __call__(self, what: str, got: Tensor | None, want: Tensor | None, scale: float = 0.0) -> None:
        if got is None or want is None:
            if got is not want:
                self.failures.append(f"{what}: {_show(got)}, expected {_show(want)}")
            return
        if got.shape != want.shape or got.dtype != want.dtype:
            self.failures.append(f"{what}: {_show(got)}, expected {_show(want)}")
        elif not torch.equal(got, want):
            difference = float((got.double() - want.double()).abs().max())
            size = max(float(want.double().abs().max()), 1e-3 * scale)
            if not self.reordered or not difference <= REL * size:
                self.failures.append(f"{what}: differs by {difference:.3e} of {size:.3e}")


def _show(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _tied_names(case: Case) -> dict[str, frozenset[str]]:
    """For each name of a parameter, all names of it."""
    parameters = reference.named_parameters(models.make(case.model).model)
    return {name: frozenset(other for other, q in parameters.items() if q is p) for name, p in parameters.items()}


def _summed_elsewhere(case: Case, name: str, run: RankRun, ranks: Sequence[RankRun]) -> bool:
    """True for a copy of a replicated weight: its gradients are summed, and its update made, on one stage."""
    if case.tied != "replicate":
        return False
    names = _tied_names(case)[name]
    others = [r for r in ranks if r.rdp_rank == run.rdp_rank and r.pp_rank != run.pp_rank]
    return any(r.gradients[0].get(n) is not None for r in others for n in names)


def _check_complete(case: Case, ranks: Sequence[RankRun]) -> None:
    """Every parameter lives on one stage, a replicated tied one on several; all copies are equal bit for bit."""
    for name, names in _tied_names(case).items():
        for replica in range(case.dp):
            homes = {r.pp_rank for r in ranks if r.rdp_rank == replica and names & r.weights.keys()}
            assert homes, f"{name} lives on no stage of replica {replica}"
            several = case.tied == "replicate" and len(names) > 1
            assert several or len(homes) == 1, f"{name} lives on stages {sorted(homes)}"
        copies = [run.weights[n] for run in ranks for n in sorted(names & run.weights.keys())]
        assert all(torch.equal(copies[0], c) for c in copies), f"copies of {name} have come apart"
