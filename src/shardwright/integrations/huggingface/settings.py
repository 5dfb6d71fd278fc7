"""Small questions that the families ask a transformers configuration, and how they say no."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

# What `activation` of the distributed modules may be; names as in transformers.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}


class NotDistributableError(NotImplementedError):
    """This instance can't be replaced; the message is the reason, for the log."""


def activation(name: Any) -> str:
    """The name of an activation in our modules."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise NotDistributableError(f"activation {name!r} is none of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def refuse_settings(config: Any, **unsupported: Any) -> None:
    """Say no if a setting of the configuration has one of the values that can't be served."""
    for key, bad in unsupported.items():
        value = getattr(config, key, None)
        if value in bad if isinstance(bad, tuple) else value == bad:
            raise NotDistributableError(f"{key}={value!r} is not supported")


def refuse_outputs(config: Any) -> None:
    """Say no to configurations that ask for outputs which distributed modules don't have."""
    refuse_settings(config, output_attentions=True, output_hidden_states=True, return_dict=False)


def rotary(modeling: str, prefix: str, config: Any) -> tuple[Sequence[float], float]:
    """Inverse frequencies and scale of a rotary embedding, computed by transformers' own class.

    modeling: the dotted name of the modeling module.   prefix: of its class names, as in "Llama".
    """
    cls = getattr(importlib.import_module(modeling), f"{prefix}RotaryEmbedding")
    kind = rope_kind(config)
    if kind in ("dynamic", "longrope"):
        raise NotDistributableError(f"rotary embeddings of kind {kind!r} change with the length of the sequence")
    with torch.device("cpu"):
        embedding = cls(config)
    frequencies = getattr(embedding, "inv_freq", None)
    if frequencies is None:
        raise NotDistributableError("rotary embeddings that differ between layers are not supported")
    return tuple(frequencies.float().tolist()), float(getattr(embedding, "attention_scaling", 1.0))


def rope_kind(config: Any) -> str:
    """The kind of rotary embedding: transformers 5 keeps it in `rope_parameters`, older ones in `rope_scaling`."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(found.get("rope_type", found.get("type", "default")))
