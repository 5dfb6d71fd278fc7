"""Models in the hands of a script: marked when they are made or later, from pretrained weights, wrapped, called."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_models
import shardwright.torch as smp
from hf_distributed import batch_of

pytestmark = pytest.mark.usefixtures("world_of_one")

WHOLE = ["gpt2", "gpt2_untied", "gptj", "gptneo", "gptneox", "llama", "mistral", "qwen2", "qwen3", "mixtral"]
PARTS = ["bert", "roberta", "vit", "t5"]


def logits(model: Any, case: str) -> Tensor:
    with torch.no_grad():
        output = model(**batch_of(case))
    assert output["loss"] is output.loss
    counting = batch_of(case).get("attention_mask")
    found = output["logits"]
    return found[counting.bool()] if counting is not None and found.shape[:2] == counting.shape else found


def saved(case: str, folder: Path) -> tuple[nn.Module, Tensor]:
    model = hf_models.make(case).eval()
    model.save_pretrained(folder)
    return model, logits(model, case)


@pytest.mark.parametrize("case", WHOLE + PARTS)
def test_pretrained_weights_keep_their_logits(case: str, tmp_path: Path) -> None:
    plain, expected = saved(case, tmp_path)
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
        model = type(plain).from_pretrained(tmp_path)
    wrapped = smp.DistributedModel(model).eval()
    distributed = [m for m in wrapped.modules() if isinstance(m, smp.nn.DistributedModule)]
    assert distributed
    torch.testing.assert_close(logits(wrapped, case), expected, rtol=1e-4, atol=1e-5)
    if case in WHOLE:
        root = wrapped.get_module()
        assert isinstance(root, smp.nn.DistributedTransformerLMHead)
        assert isinstance(root.transformer.seq_layers, nn.Sequential)
        assert root.config.model_type == plain.config.model_type


@pytest.mark.parametrize("case", WHOLE)
def test_marked_later(case: str) -> None:
    model = hf_models.make(case).eval()
    expected = logits(model, case)
    smp.set_tensor_parallelism(model, True)
    wrapped = smp.DistributedModel(model).eval()
    torch.testing.assert_close(logits(wrapped, case), expected, rtol=1e-4, atol=1e-5)


def test_options_of_the_script_reach_the_constructor() -> None:
    model = hf_models.make("gpt2").eval()
    expected = logits(model, "gpt2")
    smp.set_tensor_parallelism(
        model, True, attention_in_fp32=True, fused_bias_gelu=True, query_key_layer_scaling=True, no_such_option=1
    )
    wrapped = smp.DistributedModel(model).eval()
    assert wrapped.get_module().transformer.seq_layers[0].attention.attention_in_fp32
    torch.testing.assert_close(logits(wrapped, "gpt2"), expected, rtol=1e-4, atol=1e-5)


def test_blocks_registered_by_the_script() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = hf_models.make("gpt2").eval()
    expected = logits(model, "gpt2")
    smp.tp_register_with_module(
        GPT2Block,
        smp.nn.DistributedTransformerLayer,
        *smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks(),
    )
    try:
        smp.set_tensor_parallelism(model.transformer.h, True)
        wrapped = smp.DistributedModel(model).eval()
    finally:
        from shardwright.tensor_parallel import registry

        registry._registered.pop(GPT2Block)
    blocks = wrapped.get_module().transformer.h
    assert all(isinstance(block, smp.nn.DistributedTransformerLayer) for block in blocks)
    torch.testing.assert_close(logits(wrapped, "gpt2"), expected, rtol=1e-4, atol=1e-5)
    face = smp.nn.huggingface.gpt2
    plain = face.translate_layer_state_dict_to_hf_gpt2_block(wrapped.state_dict(), 16)
    again = hf_models.make("gpt2")
    again.load_state_dict(plain, strict=True)


@pytest.mark.parametrize("case", [*WHOLE, "bert", "roberta"])
def test_translate_functions_of_the_wrapped_model(case: str) -> None:
    plain = hf_models.make(case)
    smp.set_tensor_parallelism(model := copy.deepcopy(plain), True)
    wrapped = smp.DistributedModel(model)
    ((to_huggingface, to_distributed),) = smp.state.module_manager.translate_functions
    ours = wrapped.state_dict()
    to_plain = to_huggingface(dict(ours))
    expected = plain.state_dict()
    assert to_plain.keys() == expected.keys()
    assert all(torch.equal(to_plain[name], expected[name]) for name in expected)
    back = to_distributed(to_plain)
    assert all(torch.equal(back[name], ours[name]) for name in back)
    assert ours.keys() - back.keys() <= {"lm_head.weight"}  # where it is tied
