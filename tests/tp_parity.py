"""One case of tensor parallelism: its settings, what each rank does, and the comparison with one process.

`train` runs on every rank; `expected` and `check` run in the test's own process. Gradients and weights are gathered
to whole tensors and translated to the names of the plain model, so that they compare with plain PyTorch directly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import models
import reference
from covering import Row, covering_rows
from parity import held_gradients

STEPS = 3
BATCH = 8
LOSS_REL = 1e-5
REL = 2e-5
"""Sums over tp ranks are taken in another order than in one process."""
WEIGHT_REL = 1e-4
"""Three steps of Adam, which divides small gradients by small numbers, make more of a rounding."""


@dataclass(frozen=True)
class Case:
    """One layout of one model. rdp: copies of each (pp, tp) part."""

    model: str
    tp: int = 2
    pp: int = 1
    rdp: int = 1
    optimize: str = "speed"
    prescaled: bool = False
    microbatches: int = 2
    partition: str = "auto"
    tied: str = "colocate"
    placement: str = "cluster"
    options: tuple[tuple[str, Any], ...] = ()
    sdp: int = 1
    blocks: bool = False
    """Only the blocks are marked, and their class is registered by the script afterwards, as the GPT-2 script does."""

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.rdp

    @property
    def num_batches(self) -> int:
        """How many different batches a step sees."""
        return self.rdp if self.prescaled else self.rdp * self.tp

    @property
    def title(self) -> str:
        layout = f"pp{self.pp}-tp{self.tp}-rdp{self.rdp}-mb{self.microbatches}-{self.optimize}"
        extra = [
            "prescaled" if self.prescaled else "",
            self.partition if self.pp > 1 else "",
            "replicate" if self.tied == "replicate" else "",
            "" if self.placement == "cluster" else self.placement,
            "blocks" if self.blocks else "",
            f"sdp{self.sdp}" if self.sdp > 1 else "",
            *(name for name, _ in self.options),
        ]
        return "-".join([self.model, layout, *filter(None, extra)])

    def config(self) -> dict[str, Any]:
        """Settings for `smp.init`."""
        return {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "microbatches": self.microbatches,
            "optimize": self.optimize,
            "prescaled_batch": self.prescaled,
            "auto_partition": self.partition == "auto",
            "tied_weights": self.tied,
            "placement_strategy": self.placement,
            "ddp": True,
            "log_level": "warning",
            "sharded_data_parallel_degree": self.sdp,
            "sdp_gradient_clipping": 0,
        }


AXES: dict[str, Sequence[Any]] = {
    "model": ("gpt2", "gpt2_untied", "llama", "bert", "mlp"),
    "layout": ((1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)),
    "optimize": ("speed", "memory"),
    "prescaled": (False, True),
    "microbatches": (1, 2, 4),
    "partition": ("auto", "manual"),
    "tied": ("colocate", "replicate"),
    "placement": ("cluster", "spread", "PTD"),
}
"""layout: (pp, tp, rdp)."""


def _allowed(row: Row) -> bool:
    if row["tied"] == "replicate" and not models.MODELS[str(row["model"])].tied:
        return False
    alone = row["layout"][0] == 1  # type: ignore[index]
    return not alone or (row["partition"], row["tied"]) == ("auto", "colocate")


def _price(row: Row) -> float:
    pp, tp, rdp = row["layout"]  # type: ignore[misc]
    return {2: 1.0, 4: 1.2, 8: 30.0}[pp * tp * rdp]


@functools.cache
def matrix() -> tuple[Case, ...]:
    """The covering set: every pair of settings that can occur together occurs in some case."""
    cases = []
    for row in covering_rows(AXES, allowed=_allowed, cost=_price):
        settings: dict[str, Any] = dict(row)
        pp, tp, rdp = settings.pop("layout")
        cases.append(Case(pp=pp, tp=tp, rdp=rdp, **settings))
    return tuple(cases)


@dataclass
class RankRun:
    """What one rank saw. Gradients and weights are whole, in the plain model's names.

    replaced: names of distributed modules.   norms: global gradient norm of each step.
    """

    data_index: int
    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]
    replaced: list[str]


# ------------------------------------------------------------------ on the ranks


def build(case: Case) -> models.Made:
    """The plain model, marked."""
    import shardwright.torch as smp

    made = models.make(case.model)
    if not case.blocks:
        smp.set_tensor_parallelism(made.model, True, **dict(case.options))
        return made
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    smp.set_tensor_parallelism(made.model.transformer.h, True, **dict(case.options))
    hooks = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)
    return made


def place_by_hand(model: Any, case: Case) -> None:
    """Deal the layers of the replaced model out evenly."""
    import shardwright.torch as smp

    blocks = models.block_names(model.get_module())
    for name, stage in models.even_stages(blocks, case.pp).items():
        smp.set_partition(model.get_module().get_submodule(name), stage)


def train(case: Case) -> RankRun:
    """Train for three steps on this rank. Called on every rank after `smp.init`."""
    import shardwright.torch as smp

    plain, make_batch, loss_of = build(case)
    model = smp.DistributedModel(plain)
    if case.partition == "manual" and case.pp > 1:
        place_by_hand(model, case)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def train_step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    index = smp.rdp_rank() if case.prescaled else smp.dp_rank()
    run = RankRun(index, [], [], [], {}, [])
    for step in range(STEPS):
        batch = make_batch(batch_seed(step, index), BATCH)
        if smp.pp_rank() > 0:
            batch = {name: torch.zeros(BATCH, 0) for name in batch}
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(train_step(model, batch).stack())
        run.gradients.append(plain_names(whole_gradients(model)))
        run.norms.append(float(smp.clip_grad_norm(1e9)))
        optimizer.step()
    run.weights = plain_names(model.state_dict())
    run.replaced = [n for n, m in model.get_module().named_modules() if m in set(model.distributed_modules())]
    return run


def whole_gradients(model: Any) -> dict[str, Tensor]:
    """Every gradient of the model, whole, by the wrapped module's names; no gradient counts as zeros."""
    from shardwright.transport import objects

    distribution = model._part.distribution
    held = held_gradients(model)
    mine = {}
    for name, parameter in model.local_named_parameters():
        if model.is_copy(parameter):
            continue
        gradient = torch.zeros(parameter.shape) if held[name] is None else held[name]
        mine[name] = distribution.whole(name, gradient.detach().clone())
    found: dict[str, Tensor] = {}
    for part in objects.allgather_object(mine, "pp"):
        found.update(part)
    names: dict[int, list[str]] = {}
    for name, parameter in model.get_module().named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for several in names.values():
        gradient = next(found[name] for name in several if name in found)
        found.update(dict.fromkeys(several, gradient))
    return found


def plain_names(content: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate a whole state dict to the names of the model before it was wrapped."""
    import shardwright.torch as smp

    content = {name: tensor.detach().clone() for name, tensor in content.items()}
    for to_plain, _ in smp.state.module_manager.translate_functions:
        content = to_plain(content)
    return content


def batch_seed(step: int, index: int) -> int:
    return 10 * step + index


# ------------------------------------------------------------------ in the test's process


def expected(case: Case) -> reference.Run:
    """The same training in one process; shared by all cases with the same data."""
    return _expected(case.model, case.microbatches, case.num_batches)


@functools.cache
def _expected(name: str, num_microbatches: int, num_batches: int) -> reference.Run:
    model, make_batch, loss_of = models.make(name)
    data = [[make_batch(batch_seed(step, i), BATCH) for i in range(num_batches)] for step in range(STEPS)]
    return reference.run_reference(model, loss_of, data, num_microbatches=num_microbatches)


def check(case: Case, ranks: Sequence[RankRun], truth: reference.Run) -> None:
    """Compare every rank's losses, whole gradients, norms and weights with one process, and ranks with each other.

    Raises: AssertionError naming what differs, where, and by how much.
    """
    failures: list[str] = []
    for number, run in enumerate(ranks):
        assert run.replaced, f"rank {number}: nothing was distributed"
        for step in range(STEPS):
            wanted = {n: g for n, g in truth.gradients[step].items() if g is not None}
            where = f"step {step}, rank {number}"
            failures += _differences(
                f"loss of {where}", run.losses[step], truth.losses[step][run.data_index], 0.0, LOSS_REL
            )
            missing = wanted.keys() - run.gradients[step].keys()
            if missing:
                failures.append(f"{where}: no gradient of {sorted(missing)}")
            largest = max(float(g.abs().max()) for g in wanted.values())
            for name, gradient in run.gradients[step].items():
                want = truth.gradients[step].get(name)
                want = torch.zeros_like(gradient) if want is None else want
                failures += _differences(f"gradient of {name} in {where}", gradient, want, largest)
            unique = {id(p): n for n, p in reversed(list(_plain(case.model).items()))}
            norm = torch.stack([g.double().norm() for n, g in wanted.items() if n in unique.values()]).norm()
            failures += _differences(f"norm of {where}", torch.tensor(run.norms[step]).double(), norm, 0.0, 1e-5)
        largest = max(float(w.abs().max()) for w in truth.weights.values())
        for name, weight in truth.weights.items():
            if name not in run.weights:
                failures.append(f"rank {number}: no weight {name}")
            else:
                failures += _differences(
                    f"weight {name}, rank {number}", run.weights[name], weight, largest, WEIGHT_REL
                )
        if not all(torch.equal(ranks[0].weights[n], w) for n, w in run.weights.items()):
            failures.append(f"rank {number}: whole weights differ from rank 0's")
    assert not failures, f"{len(failures)} differences:\n" + "\n".join(failures[:20])


@functools.cache
def _plain(name: str) -> dict[str, nn.Parameter]:
    return reference.named_parameters(models.make(name).model)


def _differences(what: str, got: Tensor, want: Tensor, scale: float, rel: float = REL) -> list[str]:
    """Nothing, or one line. A tensor that is zero but for rounding is measured against the model's largest."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{what}: {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"]
    difference = float((got.double() - want.double()).abs().max())
    size = max(float(want.double().abs().max()), 1e-3 * scale)
    return [] if difference <= rel * size else [f"{what}: differs by {difference:.3e} of {size:.3e}"]
