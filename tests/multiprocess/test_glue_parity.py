"""Glue over pipeline stages equals glue in one process: loss, every gradient, buffers, whatever Python saw.

Many small cases run in one job; each is reported by name. The cases are in `glue_cases_*`.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import glue_cases
import glue_cases_inplace  # noqa: F401 - registers its cases
import glue_cases_model  # noqa: F401 - registers its cases
import glue_cases_values  # noqa: F401 - registers its cases
import glue_refusals
from glue_cases import CASES, Seen
from harness import RankPool

_PER_JOB = 30


@dataclass
class Stopped:
    """A case that raised on this rank; those after it didn't run."""

    case: str
    trace: str


def run_cases(names: list[str], num_microbatches: int) -> tuple[dict[str, Seen], Stopped | None]:
    """Run cases one after the other on one model, each twice, so that what was learned is used as well."""
    import shardwright.torch as smp

    module = glue_cases.make_model()
    for name, stage in module.stages(smp.pp_size()).items():
        smp.set_partition(module.get_submodule(name), stage)
    model = smp.DistributedModel(module)

    def make_step() -> Any:
        @smp.step
        def step(model: Any, name: str, x: Tensor, y: Tensor) -> Any:
            loss, rest = model(name, x, y)
            model.backward(loss)
            return loss, rest

        return step

    steps = {name: make_step() for name in names}  # what is learned of one says nothing about another
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    results: dict[str, Seen] = {}
    for name in names:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            module.notes = {}
            if model.partitioned:
                with torch.no_grad():
                    for key, buffer in model.local_named_buffers():
                        buffer.copy_(start[key])
            try:
                loss, rest = steps[name](model, name, *glue_cases.make_batch(num_microbatches))
            except Exception:
                return results, Stopped(name, traceback.format_exc())
        results[name] = Seen(
            loss.stack(),
            [_pick(rest, i) for i in range(num_microbatches)],
            {n: p.grad for n, p in model.local_named_parameters()},
            {n: b.clone() for n, b in model.local_named_buffers()},
        )
    return results, None


def _pick(collected: Any, index: int) -> Any:
    """One microbatch's part of a step's result."""
    if hasattr(collected, "outputs"):
        return collected.outputs[index]
    if isinstance(collected, dict):
        return {k: _pick(v, index) for k, v in collected.items()}
    if isinstance(collected, tuple):
        return tuple(_pick(v, index) for v in collected)
    return collected[index]


def faults(pool: RankPool, names: list[str], config: dict[str, Any]) -> dict[str, str]:
    """Words for each case that went wrong."""
    found: dict[str, str] = {}
    num_microbatches = config["microbatches"]
    while names:
        outcomes = pool.outcomes(run_cases, names[:_PER_JOB], num_microbatches, config=config, timeout_s=120)
        errors = [o.error for o in outcomes if o.error is not None]
        if errors:
            return {**found, "ranks": "\n".join(errors)}
        done = min((o.value[0] for o in outcomes), key=len)
        for name in done:
            want = glue_cases.run_plain(name, num_microbatches)
            different = [
                f"rank {rank}: {words}"
                for rank, outcome in enumerate(outcomes)
                for words in glue_cases.differences(CASES[name], want, outcome.value[0][name])
            ]
            held = {n for o in outcomes for n in o.value[0][name].gradients}
            different += [f"no rank holds {n}" for n in want.gradients.keys() - held]
            if different:
                found[name] = "\n  ".join(different)
        names = names[len(done) :]
        stopped = [o.value[1] for o in outcomes if o.value[1] is not None]
        if stopped:
            found[names[0]] = "\n".join(f"{s.case}: {s.trace}" for s in stopped)
            names = names[1:]
            pool.restart()
    return found


def report(found: dict[str, str]) -> None:
    assert not found, f"{len(found)} cases: {', '.join(found)}\n" + "\n".join(f"{k}:\n  {v}" for k, v in found.items())


def settings(num_stages: int, num_microbatches: int = 2) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": num_stages,
        "microbatches": num_microbatches,
        "auto_partition": False,
        "skip_tracing": True,
        "timeout_s": 30,
        "log_level": "error",
    }


def test_glue_over_two_stages(pool2: RankPool) -> None:
    report(faults(pool2, [c.name for c in CASES.values() if not c.slow], settings(2)))


@pytest.mark.heavy
def test_glue_over_four_stages(pool4: RankPool) -> None:
    report(faults(pool4, list(CASES), settings(4, 4)))


def try_refusals() -> list[dict[str, str]]:
    """What came of everything in `glue_refusals`, per microbatch, in steps that end well."""
    import shardwright.torch as smp

    module = glue_cases.make_model()
    for name, stage in module.stages(smp.pp_size()).items():
        smp.set_partition(module.get_submodule(name), stage)
    glue_cases.CASES["refusals"] = glue_cases.Case("refusals", _refusals)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Any:
        loss, found = model("refusals", x, y)
        model.backward(loss)
        return found

    found = step(model, *glue_cases.make_batch(2))
    return [_pick(found, i) for i in range(2)]


def _refusals(m: glue_cases.GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    found = glue_refusals.attempt(m, h, x)
    return glue_cases.finish(m, h, y), found


def test_what_cannot_be_exact_is_refused_by_name_on_all_ranks(pool2: RankPool) -> None:
    ranks = pool2.run(try_refusals, config=settings(2))
    assert ranks[0] == ranks[1]
    for code, word in glue_refusals.REFUSALS.items():
        for found in ranks[0]:
            assert "UnsupportedOperationError" in found[code], f"{code}: {found[code]}"
            assert word in found[code], f"{code}: {found[code]}"
