"""`DistributedTransformerLMHead`: embeddings, transformer, and a language model head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.nn.options import StackOptions, spelled_out


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with embeddings and a language model head.

    inputs: (input_ids, attention_mask, token_type_ids, position_ids, labels); with cross attention
        (input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels), or the same
        with cross_states once more before labels. All but input_ids may be None.
    attention_mask, cross_mask: [B, S], 1 = masked.
    Returns: logits [B, S, V], or (loss, logits) with labels; without the head (add_lm_head False) hidden states.
    labels: shifted by one inside with `shift_labels`.

    num_positions: 0 for no position embedding.   num_token_types: 0 for none.
    final_layernorm: default: pre_layernorm and not post_layernorm.
    distribute_embedding: word embedding and head are split over the vocabulary.
    gather_logits: False: with labels (loss, None) is returned; without them this rank's slice of the
        vocabulary.
    embedding_scale: factor on word embeddings.
    """

    @spelled_out(StackOptions)
    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        tie_word_embeddings: bool = True,
        lm_head_bias: bool = False,
        embedding_dropout_prob: float | None = None,
        final_layernorm: bool | None = None,
        embedding_layernorm: bool = False,
        distribute_embedding: bool = False,
        gather_logits: bool = True,
        embedding_scale: float | None = None,
        shift_labels: bool = True,
        attention_windows: Sequence[int | None] | None = None,
        nested: bool = False,
        **options: Unpack[StackOptions],
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, inputs: Tensor | tuple[Any, ...]) -> Any:
        raise NotImplementedError
