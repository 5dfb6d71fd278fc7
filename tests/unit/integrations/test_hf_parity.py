"""At a tp degree of one, replaced models compute what transformers computes: results, loss and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import hf_models
from hf_distributed import assert_close, batch_of, distribute, plain_step, step

WHOLE = ("lm_head", "model", "encoder")
DECODERS = [case for case in hf_models.CASES if not case.startswith(("bert", "roberta", "vit", "t5"))]
ENCODERS = ["bert", "bert_decoder", "roberta"]

pytestmark = pytest.mark.usefixtures("world_of_one")


def has_attention(case: str, attention: str) -> bool:
    """Whether transformers computes a case with this implementation of attention, and right."""
    if attention == "eager":
        return True
    if case == "gpt2_scaled":  # version 4 leaves the scale by layer out
        return int(transformers.__version__.split(".")[0]) > 4
    return not case.startswith("gptneo") or case.startswith("gptneox")


def check(case: str, kinds: tuple[str, ...], attention: str, training: bool = True, **changes: Any) -> None:
    model = hf_models.make(case, **changes)
    model.set_attn_implementation(attention)
    model.train(training)
    batch = batch_of(case)
    expected = plain_step(model, batch)
    model.zero_grad()
    distributed = distribute(copy.deepcopy(model), kinds)
    assert_close(step(distributed.model, batch, distributed.gradients), expected)
    before = dict(model.named_parameters(remove_duplicate=False))
    after = distributed.weights()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", [*DECODERS, *ENCODERS])
def test_outermost_modules(case: str, attention: str) -> None:
    if not has_attention(case, attention):
        pytest.skip("transformers has no such attention for this family")
    check(case, WHOLE, attention)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", hf_models.CASES)
def test_single_layers(case: str, attention: str) -> None:
    if not has_attention(case, attention):
        pytest.skip("transformers has no such attention for this family")
    check(case, ("layer",), attention)
