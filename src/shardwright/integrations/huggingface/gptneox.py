"""GPT-NeoX: projections fused head by head, partly rotary, attention and feed-forward side by side."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.gpt2 import masks
from shardwright.integrations.huggingface.renaming import (
    Mask,
    Renaming,
    Rule,
    Tie,
    fused,
    module,
    prefixed,
    same,
)
from shardwright.integrations.huggingface.settings import activation, rotary

_MODELING = "transformers.models.gpt_neox.modeling_gpt_neox"


def _layer(heads: int) -> tuple[Rule, ...]:
    return (
        *module("input_layernorm", "attention.pre_layernorm"),
        *fused("attention.query_key_value", ["attention.query", "attention.key", "attention.value"], heads=heads),
        *module("attention.dense", "attention.dense"),
        *module("post_attention_layernorm", "output.pre_layernorm"),
        *module("mlp.dense_h_to_4h", "output.dense1"),
        *module("mlp.dense_4h_to_h", "output.dense2"),
    )


@cache
def layer_table(heads: int) -> Renaming:
    """The correspondence of one layer with so many attention heads."""
    positions = Mask("attention.rotary_emb.inv_freq", "")
    return Renaming(_layer(heads), masks=(*masks("attention", "input_layernorm.weight"), positions))


@cache
def model_table(heads: int) -> Renaming:
    """The correspondence of the bare model."""
    rules = (
        same("embed_in.weight", "word_embedding.weight"),
        *prefixed(_layer(heads), "layers.{layer}.", "transformer.seq_layers.{layer}."),
        *module("final_layer_norm", "layernorm"),
    )
    return Renaming(rules, masks=layer_table(heads).prefixed("layers.{layer}.", "").masks)


def lm_table(heads: int, *, tied: bool | None) -> Renaming:
    """The correspondence of a whole language model. tied: None to find out from the weights."""
    model = model_table(heads).prefixed("gpt_neox.", "")
    written = _head()
    names = (written, "lm_head" if written == "embed_out" else "embed_out")
    return Renaming(
        (*model.rules, *(same(f"{name}.weight", "lm_head.weight") for name in names)),
        (Tie(f"{written}.weight", "gpt_neox.embed_in.weight", "lm_head.weight", tied),),
        model.masks,
    )


@cache
def _head() -> str:
    """What the installed version calls the head: `embed_out` in transformers 4, `lm_head` later."""
    try:
        keys = importlib.import_module(_MODELING).GPTNeoXForCausalLM._tied_weights_keys
    except ImportError:
        return "lm_head"
    return "embed_out" if "embed_out.weight" in keys else "lm_head"


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer."""
    frequencies, scale = rotary(_MODELING, "GPTNeoX", config)
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "qkv_bias": bool(config.attention_bias),
        "dense_bias": bool(config.attention_bias),
        "rotary_frequencies": frequencies,
        "rotary_scale": scale,
        "parallel_residual": "two_norms" if config.use_parallel_residual else None,
    }


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model."""
    return {
        **layer_settings(config, None),
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "embedding_dropout_prob": config.hidden_dropout,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "final_layernorm": True,
    }


ADAPTERS = (
    Adapter(
        "gptneox",
        _MODELING,
        "GPTNeoXForCausalLM",
        "lm_head",
        model_settings,
        lambda config: lm_table(config.num_attention_heads, tied=bool(config.tie_word_embeddings)),
        output="CausalLMOutputWithPast",
    ),
    Adapter(
        "gptneox",
        _MODELING,
        "GPTNeoXModel",
        "model",
        model_settings,
        lambda config: model_table(config.num_attention_heads),
        output="BaseModelOutputWithPast",
    ),
    Adapter(
        "gptneox",
        _MODELING,
        "GPTNeoXLayer",
        "layer",
        layer_settings,
        lambda config: layer_table(config.num_attention_heads),
        config_at=("attention.config",),
        positions=True,
    ),
)
