"""Sharded optimizer state with stages and tensor parallelism: one process's gradients, norms and weights, and the very
weights of the same layout without sharding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_ranks as ranks
import parity
import reference
import shardwright.torch as smp
import tp_parity
from engine_ranks import TWO_BY_TWO, same
from harness import RankPool


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


def stages(model: str, **settings: Any) -> parity.Case:
    options = {"microbatches": 2, "schedule": "interleaved", "partition": "manual", "tied": "colocate", "dp": 2}
    return parity.Case(model=model, pp=2, **{**options, **settings})


STAGES = [
    stages("mlp"),
    stages("gpt2", tied="replicate"),
    stages("gpt2", schedule="simple", partition="auto", microbatches=4),
    stages("t5"),
]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.title, marks=[pytest.mark.heavy] if i > 1 else []) for i, c in enumerate(STAGES)]
)
def test_stages_and_replicas(pool4: RankPool, case: parity.Case) -> None:
    results = pool4.run(parity.train, case, config={**case.config(), "shard_optimizer_state": True}, timeout_s=180)
    parity.check(case, results, parity.expected(case))
    plain = pool4.run(parity.train, case, config=case.config(), timeout_s=180)
    for one, other in zip(plain, results, strict=True):
        assert one.weights.keys() == other.weights.keys()
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


TENSORS = [
    tp_parity.Case("mlp", rdp=2),
    tp_parity.Case("gpt2", rdp=2, optimize="memory", options=(("distribute_embedding", True),)),
    tp_parity.Case("llama", rdp=2, prescaled=True),
    tp_parity.Case("gpt2", pp=2, rdp=2, prescaled=True, tied="replicate"),
    tp_parity.Case("llama", tp=4),  # no replicas of slices, but of norms; fewer key-value heads than tp ranks
    tp_parity.Case("llama", tp=4, rdp=2, optimize="memory"),
]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.title, marks=[pytest.mark.heavy] if i > 1 else []) for i, c in enumerate(TENSORS)]
)
def test_tensor_parallelism_and_replicas(request: pytest.FixtureRequest, case: tp_parity.Case) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{case.num_ranks}")
    results = pool.run(tp_parity.train, case, config={**case.config(), "shard_optimizer_state": True}, timeout_s=180)
    tp_parity.check(case, results, tp_parity.expected(case))
    plain = pool.run(tp_parity.train, case, config=case.config(), timeout_s=180)
    for one, other in zip(plain, results, strict=True):
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


# -- state over stages and slices ------------------------------------------------------------------------------------------


def slices(name: str, path: str) -> Any:
    """State after two steps; what a shard, a checkpoint and the whole state make of the next two."""
    case = tp_parity.Case(name, rdp=2, optimize="memory")
    made = tp_parity.build(case)
    model = smp.DistributedModel(made.model)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def step(model: Any, batch: Any) -> torch.Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    def train(first: int) -> Any:
        losses = []
        for number in range(first, first + 2):
            optimizer.zero_grad()
            losses.append(step(model, made.make_batch(10 * number + smp.dp_rank(), 8)).stack())
            optimizer.step()
        return losses, {n: t.clone() for n, t in model.state_dict().items()}

    _, weights = train(0)
    own = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False))
    gathered, whole = copy.deepcopy((optimizer.local_state_dict(), optimizer.state_dict()))
    smp.save_checkpoint(path, "two", model=model, optimizer=optimizer)
    straight = train(2)
    for content in (own, gathered, whole):
        model.load_state_dict(weights)
        optimizer.load_state_dict(content)
        assert same(train(2), straight)
    smp.resume_from_checkpoint(path)
    assert same(train(2), straight)
    return straight, whole


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.heavy)])
def test_state_of_slices_in_pieces(pool4: RankPool, tmp_path: Path, name: str) -> None:
    config = tp_parity.Case(name, rdp=2, optimize="memory").config()
    plain = pool4.run(slices, name, str(tmp_path / "a"), config=config, timeout_s=180)
    sharded = pool4.run(
        slices, name, str(tmp_path / "b"), config={**config, "shard_optimizer_state": True}, timeout_s=180
    )
    assert all(same(one, other) for one, other in zip(plain, sharded, strict=True))


def loaded_early(content: Any) -> Any:
    """With stages: a whole state, loaded before the model is partitioned, on one replica only; then the model on the CPU."""
    model = smp.DistributedModel(ranks.net(3))
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    model.load_state_dict(ranks.reference(2, 2)[0].state_dict())
    if smp.rdp_rank() == 0:
        optimizer.load_state_dict(content)
    losses = ranks.train(model, optimizer, 2, first=2)
    state, weights = optimizer.state_dict(), dict(model.state_dict())
    model.cpu()
    assert same({n: p.detach() for n, p in model.get_module().named_parameters()}, {
        n: weights[n] for n, _ in model.get_module().named_parameters()
    })
    return losses, state


def test_whole_state_before_the_partition(pool4: RankPool) -> None:
    content = ranks.reference(2, 2)[1].state_dict()
    _, optimizer = ranks.reference(4, 2)
    results = pool4.run(loaded_early, content, config={**TWO_BY_TWO, "shard_optimizer_state": True})
    plain = pool4.run(loaded_early, content, config=TWO_BY_TWO)
    assert all(same(one, other) for one, other in zip(plain, results, strict=True))
    for _, state in results:
        for index, values in optimizer.state_dict()["state"].items():
            torch.testing.assert_close(state["state"][index], values, rtol=1e-4, atol=1e-7)
