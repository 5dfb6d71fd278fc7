"""Distributed modules under the partitioner's dry run, which one rank makes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tp_reference as ref
from harness import RankPool
from shardwright.partition.trace import trace
from shardwright.tensor_parallel.nn.lm_head import DistributedTransformerLMHead
from shardwright.topology import context

CASES: list[dict[str, Any]] = [
    {},
    {"distribute_embedding": True},
    {
        "distribute_embedding": True,
        "gather_logits": False,
        "num_key_value_heads": 1,
        "qk_norm": True,
        "norm": "rmsnorm",
    },
    {"num_experts": 4, "experts_per_token": 2},
    {"num_experts": 4, "experts_per_token": 2, "split_experts": "experts", "rotary_frequencies": [1.0]},
]


def run_trace(options: dict[str, Any]) -> tuple[str, str] | None:
    if context.world().rank:
        return None  # anything that rank 0 sent would hang
    with torch.device("meta"):  # building draws a seed together, except on the meta device
        model = DistributedTransformerLMHead(
            2, 4, 4, 16, 32, 51, 16, 0.5, 0.5, causal_mask_size=16, pre_layernorm=True, post_layernorm=False, **options
        )
    model = model.to_empty(device="cpu").train()
    ids = torch.zeros(2, 8, dtype=torch.long)
    found = trace(model, ((ids, torch.zeros(2, 8), None, None, ids),))
    return found.how, found.reason


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True])
def test_one_rank_traces_alone(pool2: RankPool, optimize: str, prescaled: bool) -> None:
    for options in CASES:
        (found, _) = pool2.run(run_trace, options, config=ref.config(2, optimize, prescaled))
        assert found == ("fake", ""), options
