"""RoBERTa: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from torch import Tensor

from shardwright.integrations.huggingface import families, translation
from shardwright.integrations.huggingface.adapter import Hooks
from shardwright.integrations.huggingface.renaming import State

__all__ = [
    "get_hf_roberta_transformer_hooks",
    "get_hf_roberta_transformer_layer_hooks",
    "get_hf_roberta_transformer_lm_head_hooks",
    "translate_hf_roberta_state_dict_to_smdistributed",
    "translate_hf_roberta_state_dict_to_smdistributed_roberta",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]


def translate_hf_state_dict_to_smdistributed_roberta(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """Weights of any RoBERTa model, under the names of its distributed version. Names beside the encoder's stay.

    `sd` is emptied on the way. max_seq_len is accepted for old scripts; buffers of causal masks are dropped.
    """
    return translation.encoder_in(sd)


def translate_state_dict_to_hf_roberta(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """The inverse of `translate_hf_state_dict_to_smdistributed_roberta`; names that tied weights need are added.

    `sd` is emptied on the way. max_seq_len: length of the causal-mask buffers, for transformers before 4.30.
    """
    return translation.encoder_out(sd, max_seq_len)


def get_hf_roberta_transformer_lm_head_hooks() -> Hooks:
    """Init, forward and return hook of `RobertaModel` for `DistributedTransformerLMHead`. Models with a pooler are left alone."""
    return families.hooks_of("roberta", "RobertaModel")


def get_hf_roberta_transformer_hooks() -> Hooks:
    """Init, forward and return hook of `RobertaEncoder` for `DistributedTransformer`."""
    return families.hooks_of("roberta", "RobertaEncoder")


def get_hf_roberta_transformer_layer_hooks() -> Hooks:
    """Init, forward and return hook of `RobertaLayer` for `DistributedTransformerLayer`."""
    return families.hooks_of("roberta", "RobertaLayer")


# Other spellings of the same function, in documents and scripts of the original.
translate_hf_roberta_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_hf_roberta_state_dict_to_smdistributed_roberta = translate_hf_state_dict_to_smdistributed_roberta
