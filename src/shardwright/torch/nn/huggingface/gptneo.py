"""GPT-Neo: hooks for its modules and translation of its weights, both ways."""

from __future__ import annotations

from shardwright.torch import _not_built

__all__ = [
    "get_hf_gptneo_transformer_hooks",
    "get_hf_gptneo_transformer_layer_hooks",
    "get_hf_gptneo_transformer_lm_head_hooks",
    "translate_hf_gptneo_state_dict_to_smdistributed",
    "translate_hf_gptneo_state_dict_to_smdistributed_gptneo",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

translate_state_dict_to_hf_gptneo = _not_built.function(
    "nn.huggingface.gptneo.translate_state_dict_to_hf_gptneo"
)
translate_hf_state_dict_to_smdistributed_gptneo = _not_built.function(
    "nn.huggingface.gptneo.translate_hf_state_dict_to_smdistributed_gptneo"
)
get_hf_gptneo_transformer_lm_head_hooks = _not_built.function(
    "nn.huggingface.gptneo.get_hf_gptneo_transformer_lm_head_hooks"
)
get_hf_gptneo_transformer_hooks = _not_built.function("nn.huggingface.gptneo.get_hf_gptneo_transformer_hooks")
get_hf_gptneo_transformer_layer_hooks = _not_built.function(
    "nn.huggingface.gptneo.get_hf_gptneo_transformer_layer_hooks"
)

# Other spellings of the same function, in documents and scripts of the original.
translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_hf_gptneo_state_dict_to_smdistributed_gptneo = translate_hf_state_dict_to_smdistributed_gptneo
