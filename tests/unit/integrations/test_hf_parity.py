"""At a tp degree of one, replaced models compute what transformers computes: results, loss and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import hf_models
import shardwright.torch as smp
from hf_distributed import assert_close, batch_of, distribute, plain_step, step
from shardwright.integrations.huggingface import bert
from shardwright.tensor_parallel.module import load_full

WHOLE = ("lm_head", "model", "encoder")
DECODERS = [case for case in hf_models.CASES if not case.startswith(("bert", "roberta", "vit", "t5"))]
ENCODERS = ["bert", "bert_decoder", "roberta"]

# Run always; the other combinations are variations of these and belong to the long matrix.
QUICK = {"gpt2", "gptj", "gptneo", "gptneox", "llama", "mistral", "qwen3", "mixtral", "bert", "vit", "t5"}


def combinations(cases: list[str]) -> list[object]:
    """Every case with every attention implementation: eager masks for the long matrix, except where only they exist."""
    return [
        pytest.param(
            case,
            attention,
            id=f"{case}-{attention}",
            marks=() if case in QUICK and (attention == "sdpa" or case in ("gptneo", "t5")) else pytest.mark.heavy,
        )
        for case in cases
        for attention in ("eager", "sdpa")
    ]


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


@pytest.mark.parametrize(("case", "attention"), combinations([*DECODERS, *ENCODERS]))
def test_outermost_modules(case: str, attention: str) -> None:
    if not has_attention(case, attention):
        pytest.skip("transformers has no such attention for this family")
    check(case, WHOLE, attention)


@pytest.mark.parametrize(("case", "attention"), combinations(list(hf_models.CASES)))
def test_single_layers(case: str, attention: str) -> None:
    if not has_attention(case, attention):
        pytest.skip("transformers has no such attention for this family")
    check(case, ("layer",), attention)


@pytest.mark.heavy
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", [*DECODERS, *ENCODERS, "vit", "t5_gated"])
def test_bfloat16(case: str, autocast: bool) -> None:
    model = hf_models.make(case)
    if not autocast:
        model = model.bfloat16()
    batch = batch_of(case)
    if not autocast:
        batch = {name: v.bfloat16() if v.is_floating_point() else v for name, v in batch.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(model.parameters()).dtype)
    try:
        distributed = distribute(copy.deepcopy(model), (*WHOLE, "layer"))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = step(distributed.model, batch, distributed.gradients)
            expected = plain_step(model, batch)
    finally:
        torch.set_default_dtype(before)
    if int(transformers.__version__.split(".")[0]) > 4:  # version 4 casts the logits of some families
        assert found.result.dtype == expected.result.dtype
    scale = float(expected.result.abs().max())
    off = (found.result - expected.result).flatten(0, -2).abs().amax(-1) > 0.05 * scale
    # A token whose experts are nearly equally good may go to others after rounding.
    assert float(off.float().mean()) <= (0.1 if case.startswith("mixtral") else 0.0)
    assert abs(float(found.loss) - float(expected.loss)) < 0.02 * abs(float(expected.loss))
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].dtype == gradient.dtype, name
        assert bool(found.gradients[name].isfinite().all()), name


@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_bare_encoder_models_through_their_hooks(case: str) -> None:
    face = getattr(smp.nn.huggingface, case)
    init, forward, after = getattr(face, f"get_hf_{case}_transformer_lm_head_hooks")()
    whole = hf_models.make(case).eval()
    plain = type(getattr(whole, case))(whole.config, add_pooling_layer=False).eval()
    plain.load_state_dict(getattr(whole, case).state_dict())
    args, kwargs = init(plain.config, add_pooling_layer=False)
    distributed = smp.nn.DistributedTransformerLMHead(*args, **kwargs).eval()
    load_full(distributed, bert.MODEL_TABLE.to_distributed(dict(plain.state_dict())))
    batch = batch_of(f"{case}_bare")
    args, kwargs = forward(**batch)
    found, expected = after(distributed(*args, **kwargs)), plain(**batch)
    assert type(found) is type(expected)
    counting = batch["attention_mask"].bool()
    torch.testing.assert_close(
        found.last_hidden_state[counting], expected.last_hidden_state[counting], rtol=1e-4, atol=1e-5
    )
