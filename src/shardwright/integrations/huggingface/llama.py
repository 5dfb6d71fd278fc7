"""Llama, and what its descendants share: RMS norms, rotary embeddings, grouped heads, a gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.renaming import Mask, Renaming, Rule, Tie, module, same
from shardwright.integrations.huggingface.settings import activation, rotary

_MODELING = "transformers.models.llama.modeling_llama"

ATTENTION: tuple[Rule, ...] = (
    *module("input_layernorm", "attention.pre_layernorm"),
    *module("self_attn.q_proj", "attention.query"),
    *module("self_attn.k_proj", "attention.key"),
    *module("self_attn.v_proj", "attention.value"),
    *module("self_attn.q_norm", "attention.query_norm"),
    *module("self_attn.k_norm", "attention.key_norm"),
    *module("self_attn.o_proj", "attention.dense"),
    *module("post_attention_layernorm", "output.pre_layernorm"),
)

LAYER: tuple[Rule, ...] = (
    *ATTENTION,
    *module("mlp.gate_proj", "output.dense1_gate"),
    *module("mlp.up_proj", "output.dense1"),
    *module("mlp.down_proj", "output.dense2"),
)

# Frequencies that old versions kept in the state dict.
_POSITIONS = Mask("self_attn.rotary_emb.inv_freq", "")


def layer_table(layer: tuple[Rule, ...]) -> Renaming:
    """The correspondence of one layer."""
    return Renaming(layer, masks=(_POSITIONS,))


def model_table(layer: tuple[Rule, ...]) -> Renaming:
    """The correspondence of a bare model with such layers."""
    inner = layer_table(layer).prefixed("layers.{layer}.", "transformer.seq_layers.{layer}.")
    rules = (same("embed_tokens.weight", "word_embedding.weight"), *inner.rules, *module("norm", "layernorm"))
    return Renaming(rules, masks=inner.masks)


def lm_table(layer: tuple[Rule, ...], *, tied: bool | None) -> Renaming:
    """The correspondence of a whole language model with such layers. tied: None to find out from the weights."""
    model = model_table(layer).prefixed("model.", "")
    return Renaming(
        (*model.rules, *module("lm_head", "lm_head")),
        (Tie("lm_head.weight", "model.embed_tokens.weight", "lm_head.weight", tied),),
        model.masks,
    )


def attention_settings(modeling: str, prefix: str, config: Any) -> dict[str, Any]:
    """Arguments of one layer without its feed-forward half. prefix: of the classes in the modeling module."""
    frequencies, scale = rotary(modeling, prefix, config)
    heads = config.num_attention_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "attention_head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": 0.0,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "norm": "rmsnorm",
        "qkv_bias": False,
        "dense_bias": False,
        "rotary_frequencies": frequencies,
        "rotary_scale": scale,
        "mlp_bias": False,
    }


def around(config: Any) -> dict[str, Any]:
    """Arguments of a whole model beside those of its layers."""
    return {
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "padding_idx": config.pad_token_id,
        "embedding_dropout_prob": 0.0,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "final_layernorm": True,
    }


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer of Llama."""
    return {
        **attention_settings(_MODELING, "Llama", config),
        "qkv_bias": bool(config.attention_bias),
        "dense_bias": bool(config.attention_bias),
        "gated": True,
        "mlp_bias": bool(config.mlp_bias),
    }


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model of Llama."""
    return {**layer_settings(config, None), **around(config)}


Settings = Callable[[Any, int | None], dict[str, Any]]


def decoder_adapters(
    name: str,
    modeling: str,
    prefix: str,
    layer: tuple[Rule, ...],
    *,
    model: Settings,
    one: Settings,
    outputs: tuple[str, str] = ("CausalLMOutputWithPast", "BaseModelOutputWithPast"),
) -> tuple[Adapter, ...]:
    """Adapters of a family that is built like Llama.

    prefix: of its class names.   model, one: arguments of whole models and of one layer.
    outputs: the output classes of its language model and its bare model.
    """
    return (
        Adapter(
            name,
            modeling,
            f"{prefix}ForCausalLM",
            "lm_head",
            model,
            lambda config: lm_table(layer, tied=bool(config.tie_word_embeddings)),
            output=outputs[0],
        ),
        Adapter(name, modeling, f"{prefix}Model", "model", model, lambda _: model_table(layer), output=outputs[1]),
        Adapter(
            name,
            modeling,
            f"{prefix}DecoderLayer",
            "layer",
            one,
            lambda _: layer_table(layer),
            config_at=("self_attn.config",),
            index_at="self_attn.layer_idx",
            positions=True,
        ),
    )


ADAPTERS = decoder_adapters("llama", _MODELING, "Llama", LAYER, model=model_settings, one=layer_settings)
