"""GPT-NeoX: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from torch import Tensor

from shardwright.integrations.huggingface import families, translation
from shardwright.integrations.huggingface.adapter import Hooks
from shardwright.integrations.huggingface.renaming import State

__all__ = [
    "get_hf_gptneox_transformer_hooks",
    "get_hf_gptneox_transformer_layer_hooks",
    "get_hf_gptneox_transformer_lm_head_hooks",
    "translate_hf_gptneox_state_dict_to_smdistributed",
    "translate_hf_gptneox_state_dict_to_smdistributed_gptneox",
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf_gptneox",
]


def translate_hf_state_dict_to_smdistributed_gptneox(
    sd: State, max_seq_len: int | None = None, num_attention_heads: int | None = None
) -> dict[str, Tensor]:
    """Weights of a GPT-NeoX language model, or of a bare model, under the names of its distributed version.

    `sd` is emptied on the way. max_seq_len is accepted for old scripts; buffers of causal masks are dropped.
    num_attention_heads: by default that of the GPT-NeoX model that was replaced last.
    """
    return translation.gptneox_in(sd, num_attention_heads)


def translate_state_dict_to_hf_gptneox(
    sd: State, max_seq_len: int | None = None, num_attention_heads: int | None = None
) -> dict[str, Tensor]:
    """The inverse of `translate_hf_state_dict_to_smdistributed_gptneox`; names that tied weights need are added.

    `sd` is emptied on the way. max_seq_len: length of the causal-mask buffers, for transformers before 4.30.
    num_attention_heads: by default that of the GPT-NeoX model that was replaced last.
    """
    return translation.gptneox_out(sd, max_seq_len, num_attention_heads)


def get_hf_gptneox_transformer_lm_head_hooks() -> Hooks:
    """Init, forward and return hook of `GPTNeoXForCausalLM` for `DistributedTransformerLMHead`."""
    return families.hooks_of("gptneox", "GPTNeoXForCausalLM")


def get_hf_gptneox_transformer_hooks() -> Hooks:
    """Init, forward and return hook of `GPTNeoXModel` for `DistributedTransformerLMHead` without a head."""
    return families.hooks_of("gptneox", "GPTNeoXModel")


def get_hf_gptneox_transformer_layer_hooks() -> Hooks:
    """Init, forward and return hook of `GPTNeoXLayer` for `DistributedTransformerLayer`."""
    return families.hooks_of("gptneox", "GPTNeoXLayer")


# Other spellings of the same function, in documents and scripts of the original.
translate_hf_gptneox_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
translate_hf_gptneox_state_dict_to_smdistributed_gptneox = translate_hf_state_dict_to_smdistributed_gptneox
