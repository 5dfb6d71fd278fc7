"""Tiny transformers models, one or more of each family that has an adapter, with weights that depend on the name only.

Sizes are odd where they may be: a vocabulary that two ranks can't halve, fewer key than query heads, a head size
that isn't hidden size over heads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 101
POSITIONS = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}


def _gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config

    sizes = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**{**sizes, **quiet, **_TOKENS, **changes})


def _gptj(**changes: Any) -> Any:
    from transformers import GPTJConfig

    sizes = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "rotary_dim": 4}
    return GPTJConfig(**{**sizes, **quiet, **_TOKENS, "tie_word_embeddings": False, **changes})


def _gptneo(**changes: Any) -> Any:
    from transformers import GPTNeoConfig

    sizes = {
        "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "hidden_size": 32, "num_layers": 2,
        "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 3,
    }  # fmt: skip
    quiet = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}
    return GPTNeoConfig(**{**sizes, **quiet, **_TOKENS, **changes})


def _gptneox(**changes: Any) -> Any:
    from transformers import GPTNeoXConfig

    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False}
    return GPTNeoXConfig(**{**_SIZES, **quiet, **changes})


def _encoder(name: str) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        import transformers

        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return getattr(transformers, f"{name}Config")(**{**_SIZES, **quiet, **changes})

    return make


def _vit(**changes: Any) -> Any:
    from transformers import ViTConfig

    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": 8, "patch_size": 2, "num_labels": 3,
    }  # fmt: skip
    return ViTConfig(**{**sizes, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **changes})


def _t5(**changes: Any) -> Any:
    from transformers import T5Config

    sizes = {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    }  # fmt: skip
    return T5Config(**{**sizes, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0, **changes})


def _llama_like(name: str, **own: Any) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        import transformers

        return getattr(transformers, f"{name}Config")(
            **{**_SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, **own, **changes}
        )

    return make


# Name of a case: class of the model, its configuration, and changes to it.
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _gpt2, {}),
    "gpt2_untied": ("GPT2LMHeadModel", _gpt2, {"tie_word_embeddings": False, "n_inner": 40}),
    "gpt2_scaled": ("GPT2LMHeadModel", _gpt2, {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "gpt2_cross": ("GPT2LMHeadModel", _gpt2, {"add_cross_attention": True}),
    "gpt2_bare": ("GPT2Model", _gpt2, {}),
    "gptj": ("GPTJForCausalLM", _gptj, {}),
    "gptj_bare": ("GPTJModel", _gptj, {}),
    "gptneo": ("GPTNeoForCausalLM", _gptneo, {}),
    "gptneo_bare": ("GPTNeoModel", _gptneo, {}),
    "gptneox": ("GPTNeoXForCausalLM", _gptneox, {}),
    "gptneox_serial": ("GPTNeoXForCausalLM", _gptneox, {"use_parallel_residual": False}),
    "gptneox_bare": ("GPTNeoXModel", _gptneox, {}),
    "llama": ("LlamaForCausalLM", _llama_like("Llama"), {}),
    "llama_tied": ("LlamaForCausalLM", _llama_like("Llama"), {"tie_word_embeddings": True, "attention_bias": True}),
    "gpt2_classifier": ("GPT2ForSequenceClassification", _gpt2, {"num_labels": 3}),
    "llama_classifier": ("LlamaForSequenceClassification", _llama_like("Llama"), {"num_labels": 3}),
    "llama_bare": ("LlamaModel", _llama_like("Llama"), {}),
    "mistral": ("MistralForCausalLM", _llama_like("Mistral", sliding_window=3), {}),
    "mistral_bare": ("MistralModel", _llama_like("Mistral", sliding_window=3), {}),
    "qwen2": ("Qwen2ForCausalLM", _llama_like("Qwen2"), {}),
    "qwen2_bare": ("Qwen2Model", _llama_like("Qwen2"), {}),
    "qwen3": ("Qwen3ForCausalLM", _llama_like("Qwen3", head_dim=10), {"tie_word_embeddings": True}),
    "qwen3_bare": ("Qwen3Model", _llama_like("Qwen3", head_dim=10), {}),
    "mixtral": ("MixtralForCausalLM", _llama_like("Mixtral", num_local_experts=3), {}),
    "mixtral_bare": ("MixtralModel", _llama_like("Mixtral", num_local_experts=3), {}),
    "bert": ("BertForMaskedLM", _encoder("Bert"), {}),
    "bert_decoder": ("BertLMHeadModel", _encoder("Bert"), {"is_decoder": True, "add_cross_attention": True}),
    "roberta": ("RobertaForMaskedLM", _encoder("Roberta"), {}),
    "vit": ("ViTForImageClassification", _vit, {}),
    "t5": ("T5ForConditionalGeneration", _t5, {}),
    "t5_gated": ("T5ForConditionalGeneration", _t5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip


def make(case: str, **changes: Any) -> nn.Module:
    """Build the model of a case. Every weight, norms and biases included, gets random values from its name."""
    import transformers

    cls, config, own = CASES[case]
    model: nn.Module = getattr(transformers, cls)(config(**{**own, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1)
            parameter.copy_(drawn + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0))
    return model
