"""BERT and what is built like it: biases everywhere and a norm behind each half layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.integrations.huggingface import hooks
from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.renaming import Renaming, Rule, module
from shardwright.integrations.huggingface.settings import NotDistributableError, activation

_MODELING = "transformers.models.bert.modeling_bert"


def _attention(plain: str, distributed: str) -> tuple[Rule, ...]:
    return (
        *module(f"{plain}.self.query", f"{distributed}.query"),
        *module(f"{plain}.self.key", f"{distributed}.key"),
        *module(f"{plain}.self.value", f"{distributed}.value"),
        *module(f"{plain}.output.dense", f"{distributed}.dense"),
        *module(f"{plain}.output.LayerNorm", f"{distributed}.layernorm"),
    )


LAYER: tuple[Rule, ...] = (
    *_attention("attention", "attention"),
    *_attention("crossattention", "cross_attention"),
    *module("intermediate.dense", "output.dense1"),
    *module("output.dense", "output.dense2"),
    *module("output.LayerNorm", "output.layernorm"),
)

LAYER_TABLE = Renaming(LAYER)
ENCODER_TABLE = LAYER_TABLE.prefixed("layer.{layer}.", "seq_layers.{layer}.")
# A whole model in which the encoder is replaced: everything beside its layers keeps its name.
MODEL_WITH_ENCODER = LAYER_TABLE.prefixed(
    "{prefix}encoder.layer.{layer}.", "{prefix}encoder.seq_layers.{layer}."
).passing()
# A bare model without a pooler as one distributed module.
MODEL_TABLE = Renaming(
    (
        *module("embeddings.word_embeddings", "word_embedding"),
        *module("embeddings.position_embeddings", "position_embedding"),
        *module("embeddings.token_type_embeddings", "token_type_embedding"),
        *module("embeddings.LayerNorm", "embedding_layernorm"),
        *LAYER_TABLE.prefixed("encoder.layer.{layer}.", "transformer.seq_layers.{layer}.").rules,
    )
)


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer."""
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise NotDistributableError(f"position_embedding_type={kind!r} is not supported")
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
        "add_cross_attention": bool(config.add_cross_attention),
        "pre_layernorm": False,
        "post_layernorm": True,
    }


def encoder_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of a stack of layers."""
    return {**layer_settings(config, None), "num_layers": config.num_hidden_layers}


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of a bare model without a pooler."""
    return {
        **encoder_settings(config, None),
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "padding_idx": config.pad_token_id,
        "num_token_types": config.type_vocab_size,
        "embedding_dropout_prob": config.hidden_dropout_prob,
        "embedding_layernorm": True,
        "final_layernorm": False,
    }


def encoder_adapters(name: str, modeling: str, prefix: str) -> tuple[Adapter, ...]:
    """Adapters of a family that is built like BERT. prefix: of its class names."""
    return (
        Adapter(
            name,
            modeling,
            f"{prefix}Encoder",
            "encoder",
            encoder_settings,
            lambda _: ENCODER_TABLE,
            output="BaseModelOutputWithPastAndCrossAttentions",
        ),
        Adapter(
            name,
            modeling,
            f"{prefix}Layer",
            "layer",
            layer_settings,
            lambda _: LAYER_TABLE,
            config_at=("attention.self.config",),
        ),
    )


class BareAdapter(Adapter):
    """Bare models without a pooler: for `get_hf_bert_transformer_lm_head_hooks` and its like only.

    Their embeddings are usually tied to a head outside of them, so replacing a model means replacing its encoder.
    """

    def forward_hook(self, *args: Any, **kwargs: Any) -> hooks.Arguments:
        """A call of the bare model: tokens are of type 0 unless said otherwise."""
        ((input_ids, mask, types, positions, *rest),), _ = super().forward_hook(*args, **kwargs)
        types = torch.zeros_like(input_ids) if types is None else types
        positions = self.positions_of(input_ids) if positions is None else positions
        return ((input_ids, mask, types, positions, *rest),), {}

    def positions_of(self, input_ids: Tensor) -> Tensor | None:
        """Position ids; None: they count from zero."""
        return None


ADAPTERS = encoder_adapters("bert", _MODELING, "Bert")
MODEL_ADAPTER = BareAdapter(
    "bert",
    _MODELING,
    "BertModel",
    "model",
    model_settings,
    lambda _: MODEL_TABLE,
    output="BaseModelOutputWithPoolingAndCrossAttentions",
    token_types=True,
)
