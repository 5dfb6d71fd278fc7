"""Mistral: Llama's layers with a sliding window."""

from __future__ import annotations

from typing import Any

from shardwright.integrations.huggingface.llama import LAYER, around, attention_settings, decoder_adapters

_MODELING = "transformers.models.mistral.modeling_mistral"


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer."""
    return {
        **attention_settings(_MODELING, "Mistral", config),
        "gated": True,
        "window_size": config.sliding_window,
    }


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model."""
    return {**layer_settings(config, None), **around(config)}


ADAPTERS = decoder_adapters("mistral", _MODELING, "Mistral", LAYER, model=model_settings, one=layer_settings)
