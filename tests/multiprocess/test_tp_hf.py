"""Replaced models on tensor parallel ranks compute what transformers computes in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_models
from harness import RankPool
from hf_distributed import Outcome, assert_close, batch_of, distribute, plain_step, step
from shardwright.topology import context

WHOLE = ("lm_head", "model", "encoder")
Job = tuple[str, tuple[str, ...]]

# Case and what is replaced in it. Families that share all code paths of another one are left to the tests at degree 1.
JOBS: list[Job] = [
    ("gpt2", WHOLE),
    ("gpt2_untied", ("layer",)),
    ("gpt2_cross", WHOLE),
    ("gptj", WHOLE),
    ("gptneo", WHOLE),
    ("gptneox", WHOLE),
    ("gptneox_serial", ("layer",)),
    ("llama", WHOLE),
    ("llama_tied", ("layer",)),
    ("mistral_bare", WHOLE),
    ("qwen2", WHOLE),
    ("qwen3", WHOLE),
    ("mixtral", WHOLE),
    ("bert", WHOLE),
    ("bert_decoder", WHOLE),
    ("roberta", ("layer",)),
    ("vit", WHOLE + ("layer",)),
    ("t5", ("layer",)),
    ("t5_gated", ("layer",)),
]
MODES = [(optimize, prescaled) for optimize in ("speed", "memory") for prescaled in (False, True)]


def _config(tp: int, optimize: str, prescaled: bool) -> dict[str, Any]:
    return {
        "tensor_parallel_degree": tp,
        "ddp": True,
        "optimize": optimize,
        "prescaled_batch": prescaled,
        "log_level": "warning",
    }


def run_jobs(jobs: list[Job], options: dict[str, Any]) -> list[Outcome]:
    """What one rank sees of every job, with its own samples unless they are prescaled."""
    here = context.world()
    seed = 0 if here.config.prescaled_batch else here.coordinates.tp
    outcomes = []
    for case, kinds in jobs:
        torch.manual_seed(5 + here.rank)
        distributed = distribute(hf_models.make(case).eval(), kinds, options)
        outcome = step(distributed.model, batch_of(case, seed), distributed.gradients)
        before = dict(hf_models.make(case).named_parameters(remove_duplicate=False))
        after = distributed.weights()
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == [], case
        outcomes.append(outcome)
    return outcomes


def expected(case: str, num_samples: int) -> list[Outcome]:
    """What each rank should see: its own loss and results, gradients summed over all ranks' samples."""
    model = hf_models.make(case).eval()
    outcomes = [plain_step(model, batch_of(case, seed)) for seed in range(num_samples)]
    return [Outcome(outcome.loss, outcome.result, outcomes[-1].gradients) for outcome in outcomes]


def _tolerance(case: str) -> float:
    """T5 doesn't scale its scores, and its one embedding serves three times: rounding weighs more."""
    return 5e-5 if case.startswith("t5") else 2e-5


def check(pool: RankPool, tp: int, mode: tuple[str, bool], jobs: list[Job], options: dict[str, Any]) -> None:
    results = pool.run(run_jobs, jobs, options, config=_config(tp, *mode), timeout_s=240)
    for number, (case, kinds) in enumerate(jobs):
        wanted = expected(case, 1 if mode[1] else tp)
        for rank, result in enumerate(results):
            try:
                assert_close(result[number], wanted[0 if mode[1] else rank], rel=_tolerance(case))
            except AssertionError as error:
                raise AssertionError(f"{case} {kinds} at tp rank {rank}: {error}") from error


@pytest.mark.parametrize("mode", [("speed", False), ("memory", True)])
def test_families_on_two_ranks(pool2: RankPool, mode: tuple[str, bool]) -> None:
    check(pool2, 2, mode, JOBS, {})


@pytest.mark.heavy
@pytest.mark.parametrize("mode", [("speed", True), ("memory", False)])
def test_families_on_two_ranks_in_other_modes(pool2: RankPool, mode: tuple[str, bool]) -> None:
    check(pool2, 2, mode, JOBS, {})


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
def test_families_on_four_ranks(pool4: RankPool, mode: tuple[str, bool]) -> None:
    check(pool4, 4, mode, JOBS, {})


LANGUAGE_MODELS: list[Job] = [
    (case, WHOLE) for case in ("gpt2", "gptj", "gptneo", "gptneox", "llama", "llama_tied", "qwen3", "mixtral_bare")
]


@pytest.mark.parametrize("mode", [("speed", True), ("memory", False)])
def test_vocabulary_split_over_two_ranks(pool2: RankPool, mode: tuple[str, bool]) -> None:
    check(pool2, 2, mode, LANGUAGE_MODELS, {"distribute_embedding": True})


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
def test_vocabulary_split_over_four_ranks(pool4: RankPool, mode: tuple[str, bool]) -> None:
    check(pool4, 4, mode, LANGUAGE_MODELS, {"distribute_embedding": True})
