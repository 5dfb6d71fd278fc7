"""GPT-2: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from torch import Tensor

from shardwright.integrations.huggingface import families, translation
from shardwright.integrations.huggingface.adapter import Hooks
from shardwright.integrations.huggingface.renaming import State

__all__ = [
    "get_hf_gpt2_transformer_hooks",
    "get_hf_gpt2_transformer_layer_hooks",
    "get_hf_gpt2_transformer_lm_head_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_gpt2_state_dict_to_smdistributed",
    "translate_hf_gpt2_state_dict_to_smdistributed_gpt2",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf_gpt2",
]


def translate_hf_state_dict_to_smdistributed_gpt2(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """Weights of a GPT-2 language model, or of a bare model, under the names of its distributed version.

    `sd` is emptied on the way. max_seq_len is accepted for old scripts; buffers of causal masks are dropped.
    """
    return translation.gpt2_in(sd)


def translate_state_dict_to_hf_gpt2(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """The inverse of `translate_hf_state_dict_to_smdistributed_gpt2`; names that tied weights need are added.

    `sd` is emptied on the way. max_seq_len: length of the causal-mask buffers, for transformers before 4.30.
    """
    return translation.gpt2_out(sd, max_seq_len)


def translate_hf_block_state_dict_to_smdistributed(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """Weights of one `GPT2Block`, or of a model with only its blocks replaced, under their distributed names.

    `sd` is emptied on the way. max_seq_len is accepted for old scripts; buffers of causal masks are dropped.
    """
    return translation.gpt2_blocks_in(sd)


def translate_layer_state_dict_to_hf_gpt2_block(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """The inverse of `translate_hf_block_state_dict_to_smdistributed`.

    `sd` is emptied on the way. max_seq_len: length of the causal-mask buffers, for transformers before 4.30.
    """
    return translation.gpt2_blocks_out(sd, max_seq_len)


def get_hf_gpt2_transformer_lm_head_hooks() -> Hooks:
    """Init, forward and return hook of `GPT2LMHeadModel` for `DistributedTransformerLMHead`."""
    return families.hooks_of("gpt2", "GPT2LMHeadModel")


def get_hf_gpt2_transformer_hooks() -> Hooks:
    """Init, forward and return hook of `GPT2Model` for `DistributedTransformerLMHead` without a head."""
    return families.hooks_of("gpt2", "GPT2Model")


def get_hf_gpt2_transformer_layer_hooks() -> Hooks:
    """Init, forward and return hook of `GPT2Block` for `DistributedTransformerLayer`."""
    return families.hooks_of("gpt2", "GPT2Block")


# Other spellings of the same function, in documents and scripts of the original.
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_gpt2_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_gpt2_state_dict_to_smdistributed_gpt2 = translate_hf_state_dict_to_smdistributed_gpt2
