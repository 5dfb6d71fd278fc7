"""The comparison used by the parity matrix notices what it should."""

from __future__ import annotations

import copy

import pytest
import torch

import parity


def _case(model: str) -> parity.Case:
    return parity.Case(model, 2, 2, "simple", "auto", "colocate", 1)


def _ranks(case: parity.Case) -> list[parity.RankRun]:
    """What two perfect ranks would report: every second parameter each."""
    truth = copy.deepcopy(parity.expected(case))
    names = [name for name, _ in parity.models.make(case.model).model.named_parameters()]

    def share(rank: int) -> parity.RankRun:
        mine = names[rank::2]
        gradients = [{name: step[name] for name in mine} for step in truth.gradients]
        weights = {name: truth.weights[name] for name in mine}
        buffers = truth.buffers if rank == 0 else {}
        return parity.RankRun(rank, 0, [step[0] for step in truth.losses], gradients, weights, buffers)

    return [share(0), share(1)]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "buffered", "branching"])
def test_equal_runs_pass(name):
    case = _case(name)
    parity.check(case, _ranks(case), parity.expected(case))


def _fails(name: str, change, match: str) -> None:
    case = _case(name)
    ranks = _ranks(case)
    change(ranks)
    with pytest.raises(AssertionError, match=match):
        parity.check(case, ranks, parity.expected(case))


def test_a_parameter_on_no_stage_fails():
    def change(ranks):
        for rank in ranks:
            rank.weights.pop("head.weight", None)

    _fails("mlp", change, "head.weight lives on no stage")


def test_a_parameter_on_two_stages_fails():
    def change(ranks):
        ranks[0].weights.update(ranks[1].weights)

    _fails("mlp", change, "lives on stages")


def test_one_bit_in_an_exact_model_fails():
    def change(ranks):
        gradient = ranks[0].gradients[1]["blocks.0.0.weight"]
        gradient[0, 0] = torch.nextafter(gradient[0, 0], torch.tensor(9.0))

    _fails("mlp", change, "gradient of blocks.0.0.weight in step 1, stage 0")


def test_rounding_passes_but_more_fails_where_sums_are_reordered():
    case = _case("long_residual")
    ranks = _ranks(case)
    gradient = ranks[0].gradients[2]["bias.weight"]
    gradient *= 1 + 1e-6
    parity.check(case, ranks, parity.expected(case))
    gradient *= 1 + 1e-4
    with pytest.raises(AssertionError, match=r"gradient of bias\.weight in step 2"):
        parity.check(case, ranks, parity.expected(case))


def test_a_missing_gradient_fails():
    def change(ranks):
        ranks[0].gradients[0]["blocks.0.0.weight"] = None

    _fails("mlp", change, r"None, expected torch.float32 \[16, 16\]")


def test_other_buffers_and_losses_fail():
    _fails("buffered", lambda ranks: ranks[0].buffers["blocks.1.size"].add_(1e-3), "buffer blocks.1.size")
    _fails("mlp", lambda ranks: ranks[1].losses[2].add_(1e-3), "loss of step 2, stage 1")
