"""Tiny transformers models that are none of our families, but carry a tensor parallel plan.

Weights depend on their names only. Sizes are odd where they may be: a vocabulary and a feed-forward width that two
ranks can't halve, fewer key than query heads.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 101
SEQUENCE = 9

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 49,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

# Name of a case: prefix of the classes, changes to the configuration. Tied: gemma, cohere, starcoder2.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("Olmo", {"tie_word_embeddings": False}),
    "granite": ("Granite", {"tie_word_embeddings": False, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "gemma": ("Gemma", {"head_dim": 10}),
    "cohere": ("Cohere", {}),
    "cohere_norms": ("Cohere", {"use_qk_norm": True}),
    "starcoder2": ("Starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "exaone4": ("Exaone4", {"tie_word_embeddings": False}),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False, "intermediate_size": 48}),
    "phi": ("Phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {"intermediate_size": 48, "tie_word_embeddings": False}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
}

# transformers 4 doesn't name the norms between columns and rows in its plans, so such models are refused.
NORMS_BETWEEN = ("exaone4",)


def skip_unless_served(case: str) -> None:
    """Skip a test of a model whose plan the installed transformers leaves incomplete."""
    import transformers

    if case in NORMS_BETWEEN and int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("needs transformers 5: the plans of version 4 don't name norms")


def make(case: str, **changes: Any) -> Any:
    """Build the model of a case. Every weight, norms and biases included, gets random values from its name."""
    import transformers

    name, own = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **own, **changes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(parameter_name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1)
            parameter.copy_(drawn + (1.0 if "norm" in parameter_name and parameter_name.endswith("weight") else 0.0))
    return model


def batch_of(seed: int, size: int = 4) -> dict[str, Tensor]:
    """Token ids, padded on the right, with labels."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(3, VOCABULARY, (size, SEQUENCE), generator=generator)
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (size, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    ids = ids.masked_fill(mask == 0, 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes itself."""
    return model(**batch).loss
