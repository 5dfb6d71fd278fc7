"""`DistributedTransformerLayer` and `DistributedTransformer`: containers, with only glue in their forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.nn.options import LayerOptions, StackOptions, spelled_out


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross attention if asked for, and the output layer.

    (hidden, mask) -> (hidden, mask); with cross attention (hidden, cross_states, mask, cross_mask) -> same.
    Children: attention, cross_attention, output.
    """

    @spelled_out(LayerOptions)
    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        *,
        nested: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(
        self, inputs: Tensor | tuple[Any, ...], position_ids: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        raise NotImplementedError


class DistributedTransformer(DistributedModule):
    """A stack of layers, `seq_layers`; input and output as one layer's.

    attention_windows: for each layer its `window_size` or None.
    final_layernorm: a norm after the last layer (`layernorm`).
    """

    @spelled_out(StackOptions)
    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        attention_windows: Sequence[int | None] | None = None,
        final_layernorm: bool = False,
        nested: bool = False,
        **options: Unpack[StackOptions],
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(
        self, inputs: Tensor | tuple[Any, ...], position_ids: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        raise NotImplementedError
