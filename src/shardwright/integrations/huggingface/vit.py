"""ViT: a norm before each half layer, and no mask.

transformers 4.57 has a class for the stack of layers (`ViTEncoder`) and other names inside a layer than 5.x, where
layers are a plain list of the model. Both layouts are read; written is that of the installed version.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.renaming import Renaming, Rule, module
from shardwright.integrations.huggingface.settings import activation

_MODELING = "transformers.models.vit.modeling_vit"

_NORMS: tuple[Rule, ...] = (
    *module("layernorm_before", "attention.pre_layernorm"),
    *module("layernorm_after", "output.pre_layernorm"),
)

FLAT: tuple[Rule, ...] = (
    *module("attention.q_proj", "attention.query"),
    *module("attention.k_proj", "attention.key"),
    *module("attention.v_proj", "attention.value"),
    *module("attention.o_proj", "attention.dense"),
    *module("mlp.fc1", "output.dense1"),
    *module("mlp.fc2", "output.dense2"),
)

NESTED: tuple[Rule, ...] = (
    *module("attention.attention.query", "attention.query"),
    *module("attention.attention.key", "attention.key"),
    *module("attention.attention.value", "attention.value"),
    *module("attention.output.dense", "attention.dense"),
    *module("intermediate.dense", "output.dense1"),
    *module("output.dense", "output.dense2"),
)


def layer_table(*, flat: bool) -> Renaming:
    """The correspondence of one layer. flat: which layout is written."""
    return Renaming((*_NORMS, *(FLAT + NESTED if flat else NESTED + FLAT)))


@cache
def installed_table() -> Renaming:
    """The correspondence of one layer that writes the layout of the installed version of transformers."""
    return layer_table(flat=not hasattr(importlib.import_module(_MODELING), "ViTSelfAttention"))


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer."""
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "qkv_bias": bool(config.qkv_bias),
    }


def encoder_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of a stack of layers."""
    return {**layer_settings(config, None), "num_layers": config.num_hidden_layers}


ADAPTERS = (
    Adapter(
        "vit",
        _MODELING,
        "ViTEncoder",
        "encoder",
        encoder_settings,
        lambda _: installed_table().prefixed("layer.{layer}.", "seq_layers.{layer}."),
        output="BaseModelOutput",
    ),
    Adapter(
        "vit",
        _MODELING,
        "ViTLayer",
        "layer",
        layer_settings,
        lambda _: installed_table(),
        config_at=("attention.config", "attention.attention.config"),
    ),
)
