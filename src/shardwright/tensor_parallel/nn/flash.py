"""`FlashAttentionLayer`: attention over packed query, key and value without a stored score matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.tensor_parallel.nn import positions


class FlashAttentionLayer(nn.Module):
    """qkv [B, S, 3, heads, head] -> [B, heads, S, head], by `scaled_dot_product_attention`.

    scale: of the scores; None: the product of 1/sqrt(attention_head_size), if `scale_attention_scores`, and
        1/(layer_idx + 1), if `scale_attn_by_layer_idx`.
    triton_flash_attention, use_alibi: both are needed for a mask, as in the original; `use_alibi` adds the bias
        by itself if no mask is given.
    Called by: any rank. Collectives: none. On any device and dtype; dropout goes with ALiBi, too.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if scale is None:
            scale = 1.0
            if scale_attention_scores:
                if attention_head_size is None:
                    raise ValueError("'attention_head_size' is None, but 'scale_attention_scores' needs it")
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx:
                if layer_idx is None:
                    raise ValueError("'layer_idx' is None, but 'scale_attn_by_layer_idx' needs it")
                scale /= layer_idx + 1
        self.scale = scale
        self.attention_dropout_prob = attention_dropout_prob
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """attn_mask: additive, broadcast to [B, heads, S, S], such as `build_alibi_mask` makes.

        Raises: UsageError for a mask without `triton_flash_attention` and `use_alibi`.
        """
        if attn_mask is not None and not (self.triton_flash_attention and self.use_alibi):
            raise UsageError(
                "a mask was given without 'triton_flash_attention' and 'use_alibi'", remedy="set both, or pass None"
            )
        query, key, value = (part.squeeze(2).transpose(1, 2) for part in qkv.split(1, 2))
        length = query.shape[2]
        if self.use_alibi and attn_mask is None:
            attn_mask = positions.alibi_bias(positions.alibi_slopes(query.shape[1], 8).to(qkv.device), length)
        if attn_mask is not None:
            attn_mask = attn_mask.clamp(min=torch.finfo(qkv.dtype).min).to(qkv.dtype)
            if causal:
                seen = positions.visible(length, causal=True, window=None, device=qkv.device)
                attn_mask = attn_mask.masked_fill(~seen, torch.finfo(qkv.dtype).min)
            attn_mask = attn_mask.expand(-1, -1, length, -1)
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
            is_causal=causal and attn_mask is None,
            scale=self.scale,
        )


def build_alibi_mask(
    attention_mask: Tensor | None, length: int, num_heads: int, bias_max: int = 8, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ALiBi's bias [1 or B, heads, 1, S], with minus infinity where `attention_mask` ([B, S], 1 = padded) says.

    The bias's own zero is at the last position.
    """
    bias = positions.alibi_bias(positions.alibi_slopes(num_heads, bias_max), length)
    if attention_mask is not None:
        bias = bias.to(attention_mask.device).masked_fill(attention_mask[:, None, None, :].bool(), -math.inf)
    return bias.to(dtype)
