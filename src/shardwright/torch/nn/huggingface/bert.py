"""BERT: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from shardwright.torch import _not_built

__all__ = [
    "get_hf_bert_transformer_hooks",
    "get_hf_bert_transformer_layer_hooks",
    "get_hf_bert_transformer_lm_head_hooks",
    "translate_hf_bert_state_dict_to_smdistributed",
    "translate_hf_bert_state_dict_to_smdistributed_bert",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]

translate_state_dict_to_hf_bert = _not_built.function("nn.huggingface.bert.translate_state_dict_to_hf_bert")
translate_hf_state_dict_to_smdistributed_bert = _not_built.function(
    "nn.huggingface.bert.translate_hf_state_dict_to_smdistributed_bert"
)
get_hf_bert_transformer_lm_head_hooks = _not_built.function(
    "nn.huggingface.bert.get_hf_bert_transformer_lm_head_hooks"
)
get_hf_bert_transformer_hooks = _not_built.function("nn.huggingface.bert.get_hf_bert_transformer_hooks")
get_hf_bert_transformer_layer_hooks = _not_built.function(
    "nn.huggingface.bert.get_hf_bert_transformer_layer_hooks"
)

# Other spellings of the same function, in documents and scripts of the original.
translate_hf_bert_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_hf_bert_state_dict_to_smdistributed_bert = translate_hf_state_dict_to_smdistributed_bert
