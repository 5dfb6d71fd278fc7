"""GPT-Neo: scores that aren't scaled, and layers that see a window only, in turns with layers that see everything."""

from __future__ import annotations

from typing import Any

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.gpt2 import masks
from shardwright.integrations.huggingface.renaming import Renaming, Rule, Tie, module, prefixed, same
from shardwright.integrations.huggingface.settings import activation

_MODELING = "transformers.models.gpt_neo.modeling_gpt_neo"

LAYER: tuple[Rule, ...] = (
    *module("ln_1", "attention.pre_layernorm"),
    *module("attn.attention.q_proj", "attention.query"),
    *module("attn.attention.k_proj", "attention.key"),
    *module("attn.attention.v_proj", "attention.value"),
    *module("attn.attention.out_proj", "attention.dense"),
    *module("ln_2", "output.pre_layernorm"),
    *module("mlp.c_fc", "output.dense1"),
    *module("mlp.c_proj", "output.dense2"),
)

MODEL: tuple[Rule, ...] = (
    same("wte.weight", "word_embedding.weight"),
    same("wpe.weight", "position_embedding.weight"),
    *prefixed(LAYER, "h.{layer}.", "transformer.seq_layers.{layer}."),
    *module("ln_f", "layernorm"),
)

LAYER_TABLE = Renaming(LAYER, masks=masks("attn.attention", "ln_1.weight"))
MODEL_TABLE = Renaming(MODEL, masks=LAYER_TABLE.prefixed("h.{layer}.", "").masks)


def lm_table(*, tied: bool | None) -> Renaming:
    """The correspondence of a whole language model. tied: None to find out from the weights."""
    return Renaming(
        (*prefixed(MODEL, "transformer.", ""), same("lm_head.weight", "lm_head.weight")),
        (Tie("lm_head.weight", "transformer.wte.weight", "lm_head.weight", tied),),
        MODEL_TABLE.prefixed("transformer.", "").masks,
    )


def _window(config: Any, index: int) -> int | None:
    return config.window_size if config.attention_layers[index] == "local" else None


def _settings(config: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.hidden_size // config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "qkv_bias": False,
        "scale_attention_scores": False,
        "attention_in_fp32": True,
    }


def layer_settings(config: Any, index: int | None) -> dict[str, Any]:
    """Arguments of the layer at an index."""
    return {**_settings(config), "window_size": _window(config, index or 0)}


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model."""
    return {
        **_settings(config),
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "embedding_dropout_prob": float(config.embed_dropout),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "final_layernorm": True,
        "attention_windows": [_window(config, index) for index in range(config.num_layers)],
    }


ADAPTERS = (
    Adapter(
        "gptneo",
        _MODELING,
        "GPTNeoForCausalLM",
        "lm_head",
        model_settings,
        lambda config: lm_table(tied=bool(config.tie_word_embeddings)),
        output="CausalLMOutputWithPast",
    ),
    Adapter(
        "gptneo",
        _MODELING,
        "GPTNeoModel",
        "model",
        model_settings,
        lambda _: MODEL_TABLE,
        output="BaseModelOutputWithPast",
    ),
    Adapter(
        "gptneo",
        _MODELING,
        "GPTNeoBlock",
        "layer",
        layer_settings,
        lambda _: LAYER_TABLE,
        config_at=("attn.attention.config",),
        index_at="attn.layer_id",
        layer_extra=1,
    ),
)
