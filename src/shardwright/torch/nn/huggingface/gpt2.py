"""GPT-2: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from shardwright.torch import _not_built

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

translate_state_dict_to_hf_gpt2 = _not_built.function("nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2")
translate_hf_state_dict_to_smdistributed_gpt2 = _not_built.function(
    "nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed_gpt2"
)
translate_hf_block_state_dict_to_smdistributed = _not_built.function(
    "nn.huggingface.gpt2.translate_hf_block_state_dict_to_smdistributed"
)
translate_layer_state_dict_to_hf_gpt2_block = _not_built.function(
    "nn.huggingface.gpt2.translate_layer_state_dict_to_hf_gpt2_block"
)
get_hf_gpt2_transformer_lm_head_hooks = _not_built.function(
    "nn.huggingface.gpt2.get_hf_gpt2_transformer_lm_head_hooks"
)
get_hf_gpt2_transformer_hooks = _not_built.function("nn.huggingface.gpt2.get_hf_gpt2_transformer_hooks")
get_hf_gpt2_transformer_layer_hooks = _not_built.function(
    "nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks"
)

# Other spellings of the same function, in documents and scripts of the original.
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_gpt2_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_gpt2_state_dict_to_smdistributed_gpt2 = translate_hf_state_dict_to_smdistributed_gpt2
