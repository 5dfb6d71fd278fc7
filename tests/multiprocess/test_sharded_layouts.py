"""Sharded optimizer state with stages and tensor parallelism: one process's gradients, norms and weights, and the very
weights of the same layout without sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import parity
import tp_parity
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
