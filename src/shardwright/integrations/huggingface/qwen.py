"""Qwen2 and Qwen3: Llama's layers with biases on the projections (2) or norms on queries and keys (3)."""

from __future__ import annotations

from typing import Any

from shardwright.integrations.huggingface.llama import LAYER, Settings, around, attention_settings, decoder_adapters

_QWEN2 = "transformers.models.qwen2.modeling_qwen2"
_QWEN3 = "transformers.models.qwen3.modeling_qwen3"


def _window(config: Any, index: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    return config.sliding_window if kinds and kinds[index] == "sliding_attention" else None


def _qwen2(config: Any) -> dict[str, Any]:
    return {**attention_settings(_QWEN2, "Qwen2", config), "gated": True, "qkv_bias": True}


def _qwen3(config: Any) -> dict[str, Any]:
    return {
        **attention_settings(_QWEN3, "Qwen3", config),
        "gated": True,
        "qkv_bias": bool(config.attention_bias),
        "dense_bias": bool(config.attention_bias),
        "qk_norm": True,
    }


def _settings(common: Any) -> tuple[Settings, Settings]:
    def model(config: Any, _: int | None) -> dict[str, Any]:
        windows = [_window(config, index) for index in range(config.num_hidden_layers)]
        return {**common(config), **around(config), "attention_windows": windows if any(windows) else None}

    def one(config: Any, index: int | None) -> dict[str, Any]:
        return {**common(config), "window_size": _window(config, index or 0)}

    return model, one


_MODEL2, _LAYER2 = _settings(_qwen2)
_MODEL3, _LAYER3 = _settings(_qwen3)

ADAPTERS = (
    *decoder_adapters("qwen2", _QWEN2, "Qwen2", LAYER, model=_MODEL2, one=_LAYER2),
    *decoder_adapters("qwen3", _QWEN3, "Qwen3", LAYER, model=_MODEL3, one=_LAYER3),
)
