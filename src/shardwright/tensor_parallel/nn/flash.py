"""`FlashAttentionLayer`: attention over packed query, key and value without a stored score matrix."""

from __future__ import annotations

from torch import Tensor, nn


class FlashAttentionLayer(nn.Module):
    """qkv [B, S, 3, heads, head] -> [B, heads, S, head], by `scaled_dot_product_attention`. Collectives: none."""

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
        raise NotImplementedError

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        raise NotImplementedError
