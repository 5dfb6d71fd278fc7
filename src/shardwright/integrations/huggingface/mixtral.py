"""Mixtral: Mistral's attention with a mixture of gated experts behind it.

transformers 5 keeps all experts of a layer in two tensors, 4.57 each expert as modules of its own. Both are read;
written is the layout of the installed version.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.llama import (
    ATTENTION,
    around,
    attention_settings,
    decoder_adapters,
    layer_table,
    lm_table,
    model_table,
)
from shardwright.integrations.huggingface.renaming import Fused, Rule, Stacked, same
from shardwright.integrations.huggingface.settings import refuse_settings

_MODELING = "transformers.models.mixtral.modeling_mixtral"

PACKED: tuple[Rule, ...] = (
    same("mlp.gate.weight", "output.router.weight"),
    Fused(("mlp.experts.gate_up_proj",), ("output.experts_gate", "output.experts_up"), dim=1),
    same("mlp.experts.down_proj", "output.experts_down"),
)

SINGLE: tuple[Rule, ...] = (
    same("block_sparse_moe.gate.weight", "output.router.weight"),
    Stacked(("block_sparse_moe.experts.{expert}.w1.weight",), ("output.experts_gate",)),
    Stacked(("block_sparse_moe.experts.{expert}.w3.weight",), ("output.experts_up",)),
    Stacked(("block_sparse_moe.experts.{expert}.w2.weight",), ("output.experts_down",)),
)


def layer_rules(*, packed: bool) -> tuple[Rule, ...]:
    """The rules of one layer. packed: which layout is written."""
    return (*ATTENTION, *(PACKED + SINGLE if packed else SINGLE + PACKED))


@cache
def installed_rules() -> tuple[Rule, ...]:
    """The rules of one layer that write the layout of the installed version of transformers."""
    return layer_rules(packed=hasattr(importlib.import_module(_MODELING), "MixtralExperts"))


def layer_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of one layer."""
    refuse_settings(config, output_router_logits=True)
    if config.router_jitter_noise:
        refuse_settings(config, router_jitter_noise=config.router_jitter_noise)
    return {
        **attention_settings(_MODELING, "Mixtral", config),
        "window_size": config.sliding_window,
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
    }


def model_settings(config: Any, _: int | None) -> dict[str, Any]:
    """Arguments of the whole model."""
    return {**layer_settings(config, None), **around(config)}


def _adapters() -> tuple[Adapter, ...]:
    from dataclasses import replace

    tables = {
        "lm_head": lambda config: lm_table(installed_rules(), tied=bool(config.tie_word_embeddings)),
        "model": lambda _: model_table(installed_rules()),
        "layer": lambda _: layer_table(installed_rules()),
    }
    made = decoder_adapters(
        "mixtral",
        _MODELING,
        "Mixtral",
        layer_rules(packed=True),
        model=model_settings,
        one=layer_settings,
        outputs=("MoeCausalLMOutputWithPast", "MoeModelOutputWithPast"),
    )
    return tuple(replace(adapter, table=tables[adapter.kind]) for adapter in made)


ADAPTERS = _adapters()
