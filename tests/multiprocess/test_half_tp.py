"""Half precision with tensor parallelism: transformers models, their masters, and norms, beside one process."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import half_reference
import models
import shardwright.torch as smp
import tp_parity
from engine_ranks import same
from harness import RankPool
from shardwright.engine.half_precision import FP16_Module
from tp_parity import BATCH, Case

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Sums over tp ranks and over slices are taken, and rounded, in another order.
TOLERANCE = {"fp16": 0.01, "bf16": 0.08}
STEPS = 3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(case: Case) -> dict[str, Any]:
    plain, make_batch, loss_of = tp_parity.build(case)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=64.0)

    @smp.step
    def body(model: Any, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    index = smp.rdp_rank() if case.prescaled else smp.dp_rank()
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(body(model, make_batch(tp_parity.batch_seed(step, index), BATCH)).stack())
        norms.append(optimizer.clip_master_grads(1e9))
        optimizer.step()
        assert not optimizer.overflow
    assert list(model.distributed_modules())
    names = [name for group in optimizer._full_group_names() for name in group]
    masters = optimizer.state_dict()["fp32_from_fp16"]
    whole = tp_parity.plain_names({names[i]: master for i, master in masters.items()})
    return {"index": index, "losses": losses, "norms": norms, "masters": whole}


def created(dtype: torch.dtype) -> list[str]:
    """GPT-2 built in half precision from the start, as the GPT-2 script does; three steps."""
    with smp.model_creation(tensor_parallelism=True, dtype=dtype):
        made = models.make("gpt2")
    assert torch.get_default_dtype() is torch.float32
    assert all(p.dtype is dtype for p in made.model.parameters())
    model = smp.DistributedModel(made.model)
    assert list(model.distributed_modules())
    assert all(p.dtype is dtype for p in model.parameters())
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()), dynamic_loss_scale=True, init_scale=2.0**8)

    @smp.step
    def body(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(body(model, made.make_batch(0, BATCH)).reduce_mean()))
        optimizer.step()
        assert not optimizer.overflow
    assert losses == sorted(losses, reverse=True)
    return [n for n, _ in model.local_named_parameters()]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_models_built_in_half_precision(pool2: RankPool, kind: str) -> None:
    names = pool2.run(created, HALF[kind], config={**Case("gpt2").config(), kind: True})
    assert names[0] == names[1]


def go(model: Any, optimizer: Any, made: models.Made, numbers: range) -> list[Tensor]:
    @smp.step
    def body(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for step in numbers:
        optimizer.zero_grad()
        losses.append(body(model, made.make_batch(10 * step + smp.dp_rank(), BATCH)).stack())
        optimizer.step()
    return losses


IN_BF16 = {**Case("llama").config(), "bf16": True}


def resumed(path: str) -> None:
    """Two steps, everything saved, two more; then the same two in a model that was made anew."""

    def build() -> tuple[Any, Any, models.Made]:
        made = tp_parity.build(Case("llama"))
        model = smp.DistributedModel(made.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # less than a step of bfloat16
        return model, smp.DistributedOptimizer(optimizer), made

    model, optimizer, made = build()
    go(model, optimizer, made, range(2))
    smp.save_checkpoint(path, "two", True, model, optimizer)
    full, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    losses = go(model, optimizer, made, range(2, 4))
    wanted = copy.deepcopy(optimizer.state_dict())
    for form in ("checkpoint", "full"):
        smp.shutdown()
        smp.init(IN_BF16)
        model, optimizer, made = build()
        if form == "checkpoint":
            smp.resume_from_checkpoint(path)
        else:
            optimizer.load_state_dict(full)
            model.load_state_dict(weights)
        assert same(go(model, optimizer, made, range(2, 4)), losses), form
        assert same(optimizer.state_dict(), wanted), form


def test_slices_are_resumed(pool2: RankPool, tmp_path: Path) -> None:
    """FF-29 with tensor parallelism: masters of slices, from a checkpoint and from a whole state dict."""
    pool2.run(resumed, str(tmp_path), config=IN_BF16)


CASES = [
    (Case("gpt2"), "fp16"),
    (Case("llama", optimize="memory"), "bf16"),
    (Case("bert", optimize="memory"), "fp16"),
    (Case("t5"), "bf16"),
    (Case("gpt2", pp=2, prescaled=True), "bf16"),
    (Case("llama", pp=2), "fp16"),
    (Case("gpt2", rdp=2, optimize="memory"), "fp16"),
    (Case("mixtral"), "bf16"),
    (Case("qwen3", prescaled=True), "fp16"),
]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, id=f"{case.title}-{kind}", marks=() if number < 2 else pytest.mark.heavy)
        for number, (case, kind) in enumerate(CASES)
    ],
)
def test_training_equals_one_process(request: pytest.FixtureRequest, case: Case, kind: str) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{case.num_ranks}")
    results = pool.run(trained, case, config={**case.config(), kind: True})
    made = models.make(case.model)
    start = {n: p.detach().to(HALF[kind]).float() for n, p in made.model.named_parameters()}
    losses: dict[tuple[int, int, int], Tensor] = {}

    def losses_of(step: int) -> list[Any]:
        def loss_of(forward: Any, index: int, number: int) -> Tensor:
            batch = made.make_batch(tp_parity.batch_seed(step, index), BATCH)
            part = {n: v.chunk(case.microbatches)[number] for n, v in batch.items()}
            loss = made.loss_of(forward, part)
            losses[step, index, number] = loss.detach()
            return loss

        numbers = [(i, m) for i in range(case.num_batches) for m in range(case.microbatches)]
        return [functools.partial(loss_of, index=i, number=m) for i, m in numbers]

    truth = half_reference.train_in_half(
        made.model,
        HALF[kind],
        lambda named: sgd([p for _, p in named]),
        losses_of,
        STEPS,
        scale=64.0 if kind == "fp16" else 1.0,
        max_norm=1e9,
        forward=FP16_Module(made.model, HALF[kind]),
    )
    tolerance = TOLERANCE[kind]
    for result in results:
        for step in range(STEPS):
            want = torch.stack([losses[step, result["index"], m] for m in range(case.microbatches)])
            torch.testing.assert_close(result["losses"][step], want, rtol=tolerance, atol=0.0)
        assert result["norms"] == pytest.approx(truth.norms, rel=tolerance)
        moved = {n: result["masters"][n] - start[n] for n in start}
        wanted = {n: truth.masters[-1][n] - start[n] for n in start}
        size = torch.stack([w.norm() for w in wanted.values()]).norm()
        error = torch.stack([(moved[n] - wanted[n]).norm() for n in start]).norm()
        assert error <= tolerance * size, float(error / size)
        assert all(torch.equal(result["masters"][n], results[0]["masters"][n]) for n in start)
