"""`DistributedAttentionLayer`: attention heads split over the tp ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.nn.options import Norm


class DistributedAttentionLayer(DistributedModule):
    """Self or cross attention with its projections, norms, dropout and residual. Options: see options.py.

    Parameters (full shapes): query, key, value, dense (.weight [out, in], .bias), pre_layernorm, layernorm,
    query_norm, key_norm, relative_bias.weight [buckets, heads].
    """

    indivisible: ClassVar[bool] = True

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        num_key_value_heads: int | None = None,
        qkv_bias: bool = True,
        dense_bias: bool = True,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        attention_in_fp32: bool = False,
        query_key_layer_scaling: bool = False,
        fused_softmax: bool = True,
        fused_dropout: bool = False,
        fused_bias_gelu: bool = False,
        flash_attention: bool = True,
        fp32_residual_addition: bool = False,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        rotary_frequencies: Sequence[float] | None = None,
        rotary_interleaved: bool = False,
        rotary_scale: float = 1.0,
        window_size: int | None = None,
        qk_norm: bool = False,
        norm: Norm = "layernorm",
        relative_attention_buckets: int | None = None,
        relative_attention_max_distance: int = 128,
        relative_attention_bidirectional: bool = True,
        residual: bool = True,
        nested: bool = False,
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, inputs: Tensor | tuple[Any, ...], position_ids: Tensor | None = None) -> Any:
        raise NotImplementedError
