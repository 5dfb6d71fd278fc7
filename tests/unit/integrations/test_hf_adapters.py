"""Adapters: arguments from configurations, calls and results in transformers' manner, and what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models
import shardwright.torch as smp
from shardwright.errors import UsageError
from shardwright.integrations.huggingface import families, hooks
from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.settings import NotDistributableError

BATCH, LENGTH = 2, 5


def adapter_of(name: str) -> Adapter:
    return next(adapter for adapter in families.ADAPTERS.values() if adapter.original == name)


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("case", hf_models.CASES)
def test_arguments_fit_the_constructor(case: str) -> None:
    model = hf_models.make(case)
    found = [(module, adapter) for module in model.modules() if (adapter := families.find(module)) is not None]
    assert found
    for module, adapter in found:
        arguments = adapter.arguments(module)
        constructor = inspect.signature(adapter.dist_class().__init__)
        known = set(constructor.parameters)
        assert set(arguments) <= known, set(arguments) - known
        constructor.bind(None, **arguments)


def test_subclasses_are_not_taken_for_their_parents() -> None:
    from transformers import GPT2LMHeadModel

    class Own(GPT2LMHeadModel):
        pass

    assert families.find(Own(hf_models.make("gpt2").config)) is None


def test_windows_and_frequencies() -> None:
    neo = hf_models.make("gptneo")
    assert families.find(neo).arguments(neo)["attention_windows"] == [None, 3]
    blocks = [families.find(block).arguments(block)["window_size"] for block in neo.transformer.h]
    assert blocks == [None, 3]
    for case in ("gptneox", "llama", "qwen3"):
        model = hf_models.make(case)
        found = families.find(model).arguments(model)["rotary_frequencies"]
        rotary = next(m for name, m in model.named_modules() if name.endswith("rotary_emb"))
        assert torch.equal(torch.tensor(found), rotary.inv_freq)
    gptj = hf_models.make("gptj")
    found = families.find(gptj).arguments(gptj)["rotary_frequencies"]
    assert torch.equal(torch.tensor(found), 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("gpt2", {"activation_function": "mish"}, "activation 'mish' is none of"),
        ("gpt2", {"output_hidden_states": True}, "output_hidden_states=True"),
        ("gpt2", {"return_dict": False}, "return_dict=False"),
        ("gptj", {"rotary_dim": None}, "rotary_dim=None"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "'dynamic'"),
    ],
)
def test_settings_that_can_not_be_served(case: str, changes: dict[str, Any], reason: str) -> None:
    model = hf_models.make(case)
    for key, value in changes.items():
        target = "rope_parameters" if key == "rope_scaling" and hasattr(model.config, "rope_parameters") else key
        vars(model.config)[target] = value  # past the checks of transformers
    with pytest.raises(NotDistributableError, match=reason):
        families.find(model).arguments(model)
    assert families.find(model).init_hook(model.config) is None


def test_init_hooks_take_the_original_arguments() -> None:
    config = hf_models.make("gptneo").config
    init, _, _ = smp.nn.huggingface.gptneo.get_hf_gptneo_transformer_layer_hooks()
    args, kwargs = init(config, layer_id=1)
    assert args == ()
    assert kwargs["window_size"] == 3
    init, _, _ = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()
    assert init(hf_models.make("gpt2").config, 1)[1]["layer_idx"] == 1
    init, _, _ = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_hooks()
    assert init(hf_models.make("gpt2").config)[1]["add_lm_head"] is False
    init, _, _ = smp.nn.huggingface.bert.get_hf_bert_transformer_lm_head_hooks()
    bert = hf_models.make("bert").config
    assert init(bert, True) is None
    assert init(bert, add_pooling_layer=False)[1]["num_token_types"] == 2


# ------------------------------------------------------------------ calls


def ids() -> Tensor:
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)


def test_lm_head_call_inverts_the_mask() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    labels = ids()
    args, kwargs = adapter_of("GPT2LMHeadModel").forward_hook(
        ids(), None, attention_mask=mask, labels=labels, return_dict=True, use_cache=False, output_attentions=None
    )
    assert kwargs == {}
    input_ids, attention_mask, types, positions, given = args[0]
    assert torch.equal(input_ids, ids())
    assert torch.equal(attention_mask, 1 - mask)
    assert (types, positions) == (None, None)
    assert given is labels


def test_lm_head_call_with_cross_attention() -> None:
    states, mask = torch.randn(BATCH, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    args, _ = adapter_of("GPT2LMHeadModel").forward_hook(
        input_ids=ids(), encoder_hidden_states=states, encoder_attention_mask=mask
    )
    assert len(args[0]) == 7
    assert args[0][4] is states
    assert torch.equal(args[0][5], 1 - mask)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("inputs_embeds", torch.ones(1)),
        ("past_key_values", object()),
        ("logits_to_keep", 1),
        ("use_cache", True),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("num_items_in_batch", 3),
        ("no_such_argument", 1),
    ],
)
def test_arguments_that_can_not_be_served_are_named(argument: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"does not support the argument '{argument}'"):
        adapter_of("LlamaForCausalLM").forward_hook(input_ids=ids(), **{argument: value})


def test_token_types_are_refused_where_they_would_mean_something() -> None:
    with pytest.raises(UsageError, match="does not support the argument 'token_type_ids'"):
        adapter_of("GPT2LMHeadModel").forward_hook(ids(), token_type_ids=ids())
    # transformers takes no note of them here
    ((_, _, types, _, _),), _ = adapter_of("LlamaForCausalLM").forward_hook(ids(), token_type_ids=ids())
    assert types is None
    _, forward, _ = smp.nn.huggingface.bert.get_hf_bert_transformer_lm_head_hooks()
    ((_, _, types, _, _),), _ = forward(ids(), token_type_ids=ids())
    assert torch.equal(types, ids())


def test_embeddings_instead_of_ids_are_refused() -> None:
    with pytest.raises(UsageError, match="needs 'input_ids'"):
        adapter_of("LlamaForCausalLM").forward_hook()


def test_mask_of_four_dims_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'attention_mask' is \[2, 1, 5, 5\]"):
        adapter_of("LlamaForCausalLM").forward_hook(ids(), torch.ones(2, 1, 5, 5))


def test_layer_call_makes_masks_additive() -> None:
    hidden = torch.randn(BATCH, LENGTH, 4)
    kept = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.5
    least = torch.finfo(torch.float32).min
    hook = adapter_of("GPT2Block").forward_hook
    assert hook(hidden) == (((hidden, None),), {})
    (inputs,), _ = hook(hidden, attention_mask=kept)
    assert torch.equal(inputs[1], torch.where(kept, 0.0, least))
    (inputs,), _ = hook(hidden, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))
    assert inputs[1].shape == (1, 1, 1, LENGTH)
    assert torch.equal(inputs[1].flatten(), torch.tensor([0.0, 0.0, 0.0, 0.0, least]))
    floats = torch.randn(BATCH, 1, 1, LENGTH)
    (inputs,), _ = hook(hidden, attention_mask=floats)
    assert torch.equal(inputs[1], floats)
    with pytest.raises(UsageError, match="'attention_mask' is a list"):
        hook(hidden, attention_mask=[1])


def test_layers_that_rotate_get_positions() -> None:
    hidden, positions = torch.randn(BATCH, LENGTH, 4), torch.arange(LENGTH)[None]
    inner = {"position_embeddings": (1, 2), "use_cache": True, "num_items_in_batch": 7}
    assert adapter_of("LlamaDecoderLayer").forward_hook(hidden, position_ids=positions, **inner) == (
        ((hidden, None),),
        {"position_ids": positions},
    )
    assert adapter_of("GPT2Block").forward_hook(hidden, position_ids=positions)[1] == {}


def test_position_bias_of_t5_takes_the_place_of_the_mask() -> None:
    hidden, mask, bias = torch.randn(BATCH, LENGTH, 4), torch.zeros(BATCH, 1, 1, LENGTH), torch.randn(1, 2, 5, 5)
    hook = adapter_of("T5Block").forward_hook
    (inputs,), kwargs = hook(hidden, mask)
    assert torch.equal(inputs[1], mask)
    assert kwargs == {}
    (inputs,), kwargs = hook(hidden, mask, bias)
    assert inputs[1] is None
    assert kwargs["position_bias"] is bias
    states, cross = torch.randn(BATCH, 3, 4), torch.zeros(BATCH, 1, 1, 3)
    (inputs,), kwargs = hook(hidden, mask, bias, states, cross, None)
    assert inputs[1] is states
    assert inputs[2] is None
    assert torch.equal(inputs[3], cross)
    assert kwargs["position_bias"] is bias
    after = adapter_of("T5Block").return_hook()
    assert after((hidden, bias)) == (hidden, bias, None)
    assert after((hidden, states, bias, cross)) == (hidden, bias, None)


def test_caches_are_closed() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    hidden = torch.randn(BATCH, LENGTH, 4)
    name = "cache" if "cache" in hooks.signature(adapter_of("GPT2Block").original_class().forward).parameters else (
        "past_key_values"
    )  # fmt: skip
    for _ in range(2):
        adapter_of("GPT2Block").forward_hook(hidden, **{name: cache})
    with pytest.raises(UsageError, match="do not keep a key-value cache"):
        cache.get_seq_length()
    full = DynamicCache()
    full.update(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4), 0)
    with pytest.raises(UsageError, match="do not keep a key-value cache"):
        adapter_of("GPT2Block").forward_hook(hidden, **{name: full})


# ------------------------------------------------------------------ results


def test_results_have_the_original_classes() -> None:
    from transformers import modeling_outputs

    loss, logits, hidden = torch.tensor(1.0), torch.ones(2), torch.zeros(2)
    lm = adapter_of("GPT2LMHeadModel").return_hook()
    output = lm((loss, logits))
    assert isinstance(output, modeling_outputs.CausalLMOutputWithCrossAttentions)
    assert output["loss"] is loss
    assert output["logits"] is logits
    assert lm(logits).loss is None
    mixture = adapter_of("MixtralForCausalLM").return_hook()(logits)
    assert isinstance(mixture, modeling_outputs.MoeCausalLMOutputWithPast)
    encoder = adapter_of("BertEncoder").return_hook()((hidden, None))
    assert isinstance(encoder, modeling_outputs.BaseModelOutputWithPastAndCrossAttentions)
    assert encoder.last_hidden_state is hidden
    assert adapter_of("LlamaDecoderLayer").return_hook()((hidden, None)) is hidden
    assert adapter_of("GPTNeoBlock").return_hook()((hidden, None)) == (hidden, None)


def test_bare_bert_fills_types_and_roberta_positions() -> None:
    _, forward, _ = smp.nn.huggingface.bert.get_hf_bert_transformer_lm_head_hooks()
    ((_, _, types, positions, labels),), _ = forward(ids())
    assert torch.equal(types, torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    assert (positions, labels) == (None, None)
    _, forward, _ = smp.nn.huggingface.roberta.get_hf_roberta_transformer_lm_head_hooks()
    ((_, _, _, positions, _),), _ = forward(torch.tensor([[1, 1, 7, 8, 9], [5, 6, 7, 1, 1]]))
    assert positions.tolist() == [[1, 1, 2, 3, 4], [2, 3, 4, 1, 1]]


@pytest.mark.usefixtures("world_of_one")
def test_intermediate_dropout_of_t5() -> None:
    model = hf_models.make("t5", dropout_rate=0.3)
    block = model.encoder.block[0]
    assert families.find(block).arguments(block)["intermediate_dropout_prob"] == 0.3
    layer = smp.nn.DistributedTransformerOutputLayer(
        8, 12, 0.0, "relu", pre_layernorm=True, post_layernorm=False, mlp_bias=False, intermediate_dropout_prob=1.0
    )
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(layer(hidden), hidden)  # everything in between is dropped
    assert not torch.equal(layer.eval()(hidden), hidden)
