"""GPT-2: fused projections, matrices kept as [in, out], learned positions, a norm before each half layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.renaming import (
    Mask,
    Renaming,
    Rule,
    Tie,
    conv1d,
    fused,
    module,
    prefixed,
    same,
)
from shardwright.integrations.huggingface.settings import activation

_MODELING = "transformers.models.gpt2.modeling_gpt2"

LAYER: tuple[Rule, ...] = (
    *module("ln_1", "attention.pre_layernorm"),
    *fused("attn.c_attn", ["attention.query", "attention.key", "attention.value"], transposed=True),
    *conv1d("attn.c_proj", "attention.dense"),
    *module("ln_cross_attn", "cross_attention.pre_layernorm"),
    *conv1d("crossattention.q_attn", "cross_attention.query"),
    *fused("crossattention.c_attn", ["cross_attention.key", "cross_attention.value"], transposed=True),
    *conv1d("crossattention.c_proj", "cross_attention.dense"),
    *module("ln_2", "output.pre_layernorm"),
    *conv1d("mlp.c_fc", "output.dense1"),
    *conv1d("mlp.c_proj", "output.dense2"),
)

MODEL: tuple[Rule, ...] = (
    same("wte.weight", "word_embedding.weight"),
    same("wpe.weight", "position_embedding.weight"),
    *prefixed(LAYER, "h.{layer}.", "transformer.seq_layers.{layer}."),
    *module("ln_f", "layernorm"),
)


def causal_mask(length: int, _: dict[str, str]) -> Tensor:
    """The buffer `attn.bias` of old versions: a lower triangle [1, 1, length, length]."""
    return torch.tril(torch.ones(length, length, dtype=torch.bool)).view(1, 1, length, length)


def masked_value(_: int, __: dict[str, str]) -> Tensor:
    """The buffer `attn.masked_bias` of old versions."""
    return torch.tensor(-1e4)


def masks(attention: str, beside: str) -> tuple[Mask, ...]:
    """Buffers of old versions inside the attention module of each layer."""
    return (
        Mask(f"{attention}.bias", beside, causal_mask),
        Mask(f"{attention}.masked_bias", beside, masked_value),
    )


_CROSS_MASKS = (Mask("crossattention.bias", ""), Mask("crossattention.masked_bias", ""))
LAYER_TABLE = Renaming(LAYER, masks=(*masks("attn", "ln_1.weight"), *_CROSS_MASKS))
MODEL_TABLE = Renaming(MODEL, masks=LAYER_TABLE.prefixed("h.{layer}.", "").masks)
BLOCKS_TABLE = LAYER_TABLE.prefixed("{prefix}h.{layer}.", "{prefix}h.{layer}.").passing()


def lm_table(*, tied: bool | None) -> Renaming:
    """The correspondence of a whole language model. tied: None to find out from the weights."""
    return Renaming(
        (*prefixed(MODEL, "transformer.", ""), same("lm_head.weight", "lm_head.weight")),
        (Tie("lm_head.weight", "transformer.wte.weight", "lm_head.weight", tied),),
        MODEL_TABLE.prefixed("transformer.", "").masks,
    )


def layer_settings(config: Any, index: int | None) -> dict[str, Any]:
    """Arguments of one layer. index: needed only when scores are scaled by it."""
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "add_cross_attention": bool(config.add_cross_attention),
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": bool(config.scale_attn_weights),
        "scale_attn_by_layer_idx": bool(config.scale_attn_by_inverse_layer_idx),
        "attention_in_fp32": bool(config.reorder_and_upcast_attn),
        "layer_idx": index,
    }


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model."""
    return {
        **{name: value for name, value in layer_settings(config, None).items() if name != "layer_idx"},
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "embedding_dropout_prob": config.embd_pdrop,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "final_layernorm": True,
    }


ADAPTERS = (
    Adapter(
        "gpt2",
        _MODELING,
        "GPT2LMHeadModel",
        "lm_head",
        model_settings,
        lambda config: lm_table(tied=bool(config.tie_word_embeddings)),
        output="CausalLMOutputWithCrossAttentions",
    ),
    Adapter(
        "gpt2",
        _MODELING,
        "GPT2Model",
        "model",
        model_settings,
        lambda _: MODEL_TABLE,
        output="BaseModelOutputWithPastAndCrossAttentions",
    ),
    Adapter(
        "gpt2",
        _MODELING,
        "GPT2Block",
        "layer",
        layer_settings,
        lambda _: LAYER_TABLE,
        config_at=("attn.config",),
        index_at="attn.layer_idx",
    ),
)
