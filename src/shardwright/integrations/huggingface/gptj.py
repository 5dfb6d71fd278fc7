"""GPT-J: rotary embeddings on neighbouring pairs, attention and feed-forward side by side behind one norm."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.gpt2 import masks
from shardwright.integrations.huggingface.renaming import Mask, Renaming, Rule, Tie, module, prefixed, same
from shardwright.integrations.huggingface.settings import NotDistributableError, activation

_MODELING = "transformers.models.gptj.modeling_gptj"

LAYER: tuple[Rule, ...] = (
    *module("ln_1", "attention.pre_layernorm"),
    *module("attn.q_proj", "attention.query"),
    *module("attn.k_proj", "attention.key"),
    *module("attn.v_proj", "attention.value"),
    *module("attn.out_proj", "attention.dense"),
    *module("mlp.fc_in", "output.dense1"),
    *module("mlp.fc_out", "output.dense2"),
)

MODEL: tuple[Rule, ...] = (
    same("wte.weight", "word_embedding.weight"),
    *prefixed(LAYER, "h.{layer}.", "transformer.seq_layers.{layer}."),
    *module("ln_f", "layernorm"),
)

LAYER_TABLE = Renaming(LAYER, masks=(*masks("attn", "ln_1.weight"), Mask("attn.embed_positions", "")))
MODEL_TABLE = Renaming(MODEL, masks=LAYER_TABLE.prefixed("h.{layer}.", "").masks)


def lm_table(*, tied: bool | None) -> Renaming:
    """The correspondence of a whole language model. tied: None to find out from the weights."""
    return Renaming(
        (*prefixed(MODEL, "transformer.", ""), *module("lm_head", "lm_head")),
        (Tie("lm_head.weight", "transformer.wte.weight", "lm_head.weight", tied),),
        MODEL_TABLE.prefixed("transformer.", "").masks,
    )


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer."""
    if config.rotary_dim is None:
        raise NotDistributableError("rotary_dim=None is not supported")
    rotary_dim = config.rotary_dim
    frequencies = 1.0 / (10000 ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64) / rotary_dim))
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
        "pre_layernorm": True,
        "post_layernorm": False,
        "qkv_bias": False,
        "dense_bias": False,
        "rotary_frequencies": tuple(frequencies.tolist()),
        "rotary_interleaved": True,
        "parallel_residual": "shared_norm",
        "attention_in_fp32": getattr(config, "_attn_implementation", None) == "eager",
    }


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model."""
    return {
        **layer_settings(config, None),
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "embedding_dropout_prob": config.embd_pdrop,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "lm_head_bias": True,
        "final_layernorm": True,
    }


ADAPTERS = (
    Adapter(
        "gptj",
        _MODELING,
        "GPTJForCausalLM",
        "lm_head",
        model_settings,
        lambda config: lm_table(tied=bool(config.tie_word_embeddings)),
        output="CausalLMOutputWithPast",
    ),
    Adapter(
        "gptj",
        _MODELING,
        "GPTJModel",
        "model",
        model_settings,
        lambda _: MODEL_TABLE,
        output="BaseModelOutputWithPast",
    ),
    Adapter(
        "gptj",
        _MODELING,
        "GPTJBlock",
        "layer",
        layer_settings,
        lambda _: LAYER_TABLE,
        config_at=("attn.config",),
        layer_extra=1,
        positions=True,
    ),
)
