"""BERT: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from torch import Tensor

from shardwright.integrations.huggingface import families, translation
from shardwright.integrations.huggingface.adapter import Hooks
from shardwright.integrations.huggingface.renaming import State

__all__ = [
    "get_hf_bert_transformer_hooks",
    "get_hf_bert_transformer_layer_hooks",
    "get_hf_bert_transformer_lm_head_hooks",
    "translate_hf_bert_state_dict_to_smdistributed",
    "translate_hf_bert_state_dict_to_smdistributed_bert",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]


def translate_hf_state_dict_to_smdistributed_bert(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """Weights of any BERT model, under the names of its distributed version. Names beside the encoder's stay.

    `sd` is emptied on the way. max_seq_len is accepted for old scripts; buffers of causal masks are dropped.
    """
    return translation.encoder_in(sd)


def translate_state_dict_to_hf_bert(sd: State, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """The inverse of `translate_hf_state_dict_to_smdistributed_bert`; names that tied weights need are added.

    `sd` is emptied on the way. max_seq_len: length of the causal-mask buffers, for transformers before 4.30.
    """
    return translation.encoder_out(sd, max_seq_len)


def get_hf_bert_transformer_lm_head_hooks() -> Hooks:
    """Init, forward and return hook of `BertModel` for `DistributedTransformerLMHead`. Models with a pooler are left alone."""
    return families.hooks_of("bert", "BertModel")


def get_hf_bert_transformer_hooks() -> Hooks:
    """Init, forward and return hook of `BertEncoder` for `DistributedTransformer`."""
    return families.hooks_of("bert", "BertEncoder")


def get_hf_bert_transformer_layer_hooks() -> Hooks:
    """Init, forward and return hook of `BertLayer` for `DistributedTransformerLayer`."""
    return families.hooks_of("bert", "BertLayer")


# Other spellings of the same function, in documents and scripts of the original.
translate_hf_bert_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_hf_bert_state_dict_to_smdistributed_bert = translate_hf_state_dict_to_smdistributed_bert
