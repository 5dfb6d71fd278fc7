"""GPT-J: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from torch import Tensor

from shardwright.integrations.huggingface import families, translation
from shardwright.integrations.huggingface.adapter import Hooks
from shardwright.integrations.huggingface.renaming import State

__all__ = [
    "get_hf_gptj_transformer_hooks",
    "get_hf_gptj_transformer_layer_hooks",
    "get_hf_gptj_transformer_lm_head_hooks",
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]


def translate_hf_state_dict_to_smdistributed_gptj(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """Weights of a GPT-J language model, or of a bare model, under the names of its distributed version.

    `sd` is emptied on the way. max_seq_len is accepted for old scripts; buffers of causal masks are dropped.
    """
    return translation.gptj_in(sd)


def translate_state_dict_to_hf_gptj(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """The inverse of `translate_hf_state_dict_to_smdistributed_gptj`; names that tied weights need are added.

    `sd` is emptied on the way. max_seq_len: length of the causal-mask buffers, for transformers before 4.30.
    """
    return translation.gptj_out(sd, max_seq_len)


def get_hf_gptj_transformer_lm_head_hooks() -> Hooks:
    """Init, forward and return hook of `GPTJForCausalLM` for `DistributedTransformerLMHead`."""
    return families.hooks_of("gptj", "GPTJForCausalLM")


def get_hf_gptj_transformer_hooks() -> Hooks:
    """Init, forward and return hook of `GPTJModel` for `DistributedTransformerLMHead` without a head."""
    return families.hooks_of("gptj", "GPTJModel")


def get_hf_gptj_transformer_layer_hooks() -> Hooks:
    """Init, forward and return hook of `GPTJBlock` for `DistributedTransformerLayer`."""
    return families.hooks_of("gptj", "GPTJBlock")


# Other spellings of the same function, in documents and scripts of the original.
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
