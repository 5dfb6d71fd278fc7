"""`DistributedAttentionLayer`: attention heads split over the tp ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import ConfigError, UsageError
from shardwright.sharding.slices import Units, covering_ranges, even_ranges, overlapping
from shardwright.tensor_parallel import batch, randomness
from shardwright.tensor_parallel.module import (
    DistributedModule,
    check_divisible,
    keeps_hidden_sliced,
    normal,
    tp_rank,
    tp_size,
)
from shardwright.tensor_parallel.nn import positions
from shardwright.tensor_parallel.nn.functional import Source, column_linear, row_linear
from shardwright.tensor_parallel.nn.linear import SlicedLinear
from shardwright.tensor_parallel.nn.norm import RMSNorm, apply_norm, make_norm, rms_norm
from shardwright.tensor_parallel.nn.options import Norm
from shardwright.tensor_parallel.nn.residual import add_residual, check_norms
from shardwright.topology import context
from shardwright.transport import differentiable as comm


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
        return_normed: bool = False,
        nested: bool = False,
    ) -> None:
        super().__init__()
        check_norms(pre_layernorm, post_layernorm, residual)
        check_divisible("num_attention_heads", num_attention_heads)
        batch.check_hidden(hidden_size)
        num_key_value_heads = num_key_value_heads or num_attention_heads
        if num_attention_heads % num_key_value_heads:
            raise ConfigError(
                f"'num_attention_heads' is {num_attention_heads}, expected a multiple of 'num_key_value_heads' "
                f"({num_key_value_heads})"
            )
        if scale_attn_by_layer_idx and layer_idx is None:
            raise ConfigError("'scale_attn_by_layer_idx' is True, but 'layer_idx' is None", remedy="pass layer_idx")
        self.sliced = keeps_hidden_sliced()
        self.head_size = attention_head_size
        self.cross_attention = cross_attention
        self.causal = causal_mask_size is not None and not cross_attention
        self.attention_dropout_prob = attention_dropout_prob
        self.hidden_dropout_prob = hidden_dropout_prob
        self.scale = (1 / math.sqrt(attention_head_size) if scale_attention_scores else 1.0) / (
            1 + layer_idx if scale_attn_by_layer_idx and layer_idx is not None else 1
        )
        self.attention_in_fp32 = attention_in_fp32
        self.query_key_layer_scaling = query_key_layer_scaling
        self.fp32_residual_addition = fp32_residual_addition
        self.rotary_frequencies = None if rotary_frequencies is None else tuple(map(float, rotary_frequencies))
        self.rotary_interleaved = rotary_interleaved
        self.rotary_scale = rotary_scale
        self.window_size = window_size
        self.recompute = context.is_initialized() and context.world().config.checkpoint_attentions
        self.residual = residual
        self.return_normed = return_normed
        self._share_heads(num_attention_heads, num_key_value_heads)
        self.alibi_bias_max = alibi_bias_max if use_alibi else None
        self.relative_attention_max_distance = relative_attention_max_distance
        self.relative_attention_bidirectional = relative_attention_bidirectional
        self.nested = nested
        if not nested:
            self.enter = batch.EnterScaledBatch()
            self.leave = batch.LeaveScaledBatch()

        def column(num_heads: int, users_per_head: int) -> SlicedLinear:
            return SlicedLinear(
                hidden_size,
                num_heads * attention_head_size,
                qkv_bias,
                split="column",
                units=Units(attention_head_size, users_per_head),
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
            )

        self.pre_layernorm = (
            make_norm(norm, hidden_size, layernorm_epsilon, sliced=self.sliced) if pre_layernorm else None
        )
        self.query = column(num_attention_heads, 1)
        self.key = column(num_key_value_heads, num_attention_heads // num_key_value_heads)
        self.value = column(num_key_value_heads, num_attention_heads // num_key_value_heads)
        self.query_norm = RMSNorm(attention_head_size, layernorm_epsilon) if qk_norm else None
        self.key_norm = RMSNorm(attention_head_size, layernorm_epsilon) if qk_norm else None
        self.relative_bias = (
            RelativeBias(relative_attention_buckets, num_attention_heads, initializer_range)
            if relative_attention_buckets is not None
            else None
        )
        self.dense = SlicedLinear(
            num_attention_heads * attention_head_size,
            hidden_size,
            dense_bias,
            split="row",
            units=Units(attention_head_size),
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
        )
        self.layernorm = make_norm(norm, hidden_size, layernorm_epsilon, sliced=self.sliced) if post_layernorm else None

    def _share_heads(self, num_heads: int, num_key_value_heads: int) -> None:
        """Decide which heads this rank has: its share of the query heads, and the key-value heads they need.

        kv_index: which of its key-value heads each of its query heads uses; None: its own, or in equal groups.
        """
        group = num_heads // num_key_value_heads
        self.num_heads = num_heads
        self.query_heads = even_ranges(num_heads, tp_size())
        self.key_heads = covering_ranges(self.query_heads, group)
        self.shares_keys = overlapping(self.key_heads)
        self.num_key_value_heads = num_key_value_heads
        start, stop = self.query_heads[tp_rank()]
        first, last = self.key_heads[tp_rank()]
        index = [head // group - first for head in range(start, stop)]
        num_own, num_own_keys = stop - start, last - first
        regular = num_own % num_own_keys == 0 and index == [
            head // (num_own // num_own_keys) for head in range(num_own)
        ]
        self.kv_index = None if regular else index
        self.grouped = regular and num_own != num_own_keys

    def forward(self, inputs: Tensor | tuple[Any, ...], position_ids: Tensor | None = None) -> Any:
        """(hidden, mask), or with cross attention (hidden, cross_states, mask), to hidden states.

        mask: additive, [B, 1, 1 or S, S], or None.   position_ids: [B, S], for the rotary embedding.
        Returns: hidden; (hidden, mask + bias) if it has a relative bias; (hidden, normed input) with
            `return_normed`.
        Called by: every rank of the tp group. Collectives: those of `column_linear` and `row_linear`, of the
            norms in memory mode, and of the batch exchange unless nested.
        """
        hidden, states, mask = self._unpack(inputs)
        if not self.nested:
            hidden, mask, position_ids = self.enter(hidden, mask, position_ids)
            if states is not None:
                (states,) = self.enter(states)
        residual = hidden
        normed, source = apply_norm(self.pre_layernorm, hidden)
        query, key, value = self._project(normed, None if self.return_normed else source, states, position_ids)
        if self.relative_bias is not None:
            mask = self._with_relative_bias(mask, query, key)
        if self.recompute and self.training and torch.is_grad_enabled() and not comm.is_silent(query):
            attended = checkpoint(self._attend, query, key, value, mask, use_reentrant=False)
        else:
            attended = self._attend(query, key, value, mask)
        hidden = row_linear(attended, self.dense.weight, self.dense.bias, leave="hidden" if self.sliced else "whole")
        hidden = randomness.dropout(hidden, self.hidden_dropout_prob, self.training, split=self.sliced)
        if self.residual:
            hidden = add_residual(hidden, residual, self.fp32_residual_addition)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if not self.nested:
            hidden = self.leave(hidden)
        if self.relative_bias is not None:
            return hidden, mask
        return (hidden, normed) if self.return_normed else hidden

    def _unpack(self, inputs: Tensor | tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if self.cross_attention:
            if len(values) not in (2, 3) or values[1] is None:
                raise UsageError(f"cross attention got {len(values)} inputs, expected (hidden, cross_states, mask)")
            return values[0], values[1], values[2] if len(values) == 3 else None
        if len(values) > 2:
            raise UsageError(f"attention got {len(values)} inputs, expected (hidden, mask)")
        return values[0], None, values[1] if len(values) == 2 else None

    def _project(
        self, hidden: Tensor, source: Source | None, states: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of this rank's heads: [B, heads, S, head]."""
        layers = [self.query, self.key, self.value]
        weights, biases = [self.query.weight], [self.query.bias]
        for layer in layers[1:]:
            weights.append(self._shared(layer.weight))
            biases.append(None if layer.bias is None else self._shared(layer.bias))
        if states is None:
            query, key, value = column_linear(hidden, weights, biases, sliced=self.sliced, source=source)
        else:
            (query,) = column_linear(hidden, weights[:1], biases[:1], sliced=self.sliced, source=source)
            key, value = column_linear(states, weights[1:], biases[1:], sliced=self.sliced)
        query, key, value = (
            flat.view(*flat.shape[:-1], -1, self.head_size).transpose(1, 2) for flat in (query, key, value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            # every rank sees its own heads only, so the gradients of these weights are summed
            query = rms_norm(query, comm.copy_to_ranks(self.query_norm.weight), self.query_norm.eps)
            key = rms_norm(key, comm.copy_to_ranks(self.key_norm.weight), self.key_norm.eps)
        if self.rotary_frequencies is not None:
            cos, sin = positions.rotary_tables(
                self.rotary_frequencies, self.rotary_scale, query.shape[2], position_ids, query
            )
            query = positions.rotate(query, cos, sin, interleaved=self.rotary_interleaved)
            key = positions.rotate(key, cos, sin, interleaved=self.rotary_interleaved)
        return query, key, value

    def _shared(self, tensor: Tensor) -> Tensor:
        """A slice of the key or value projection; heads that several ranks hold get the sum of the gradients."""
        if not self.shares_keys:
            return tensor
        return comm.shared_slice(
            tensor,
            0,
            self.num_key_value_heads * self.head_size,
            self.key_heads[tp_rank()][0] * self.head_size,
        )

    def _with_relative_bias(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """[1 or B, own heads, S, S2]"""
        assert self.relative_bias is not None
        buckets = positions.relative_buckets(
            query.shape[2],
            key.shape[2],
            self.relative_bias.num_buckets,
            self.relative_attention_max_distance,
            self.relative_attention_bidirectional,
            query.device,
        )
        bias = nn.functional.embedding(buckets, self.relative_bias.weight).permute(2, 0, 1).unsqueeze(0)
        return bias if mask is None else bias + mask

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(scores + biases) @ value of this rank's heads: [B, S, heads * head]."""
        dtype = query.dtype
        if self.kv_index is not None:
            key, value = key[:, self.kv_index], value[:, self.kv_index]
        # Scaling scores by the layer's number and back again in a float32 softmax guards half precision against
        # overflow and is neutral otherwise: computing in float32 does the same.
        if self.attention_in_fp32 or (self.query_key_layer_scaling and dtype == torch.float16):
            query, key, value = query.float(), key.float(), value.float()
        bias, is_causal = self._bias(query, key.shape[2], mask)
        probability = self.attention_dropout_prob if self.training else 0.0
        options: dict[str, Any] = {
            "attn_mask": bias,
            "dropout_p": probability,
            "is_causal": is_causal,
            "scale": self.scale,
            "enable_gqa": self.grouped,
        }
        if probability and not comm.is_silent(query):
            with randomness.split_stream():
                found = nn.functional.scaled_dot_product_attention(query, key, value, **options)
        else:
            found = nn.functional.scaled_dot_product_attention(query, key, value, **options)
        return found.to(dtype).transpose(1, 2).flatten(2)

    def _bias(self, query: Tensor, num_keys: int, mask: Tensor | None) -> tuple[Tensor | None, bool]:
        """Return what is added to the scores, and whether the causal triangle is left to the kernel."""
        length = query.shape[2]
        window = self.window_size if self.window_size is not None and self.window_size < length else None
        bias = mask
        if self.alibi_bias_max is not None:
            slopes = positions.alibi_slopes(self.num_heads, self.alibi_bias_max).to(query.device)
            alibi = positions.alibi_bias(slopes[slice(*self.query_heads[tp_rank()])], num_keys)
            bias = alibi if bias is None else bias + alibi
        if bias is None and window is None:
            return None, self.causal
        lowest = torch.finfo(query.dtype).min
        if self.causal or window is not None:
            seen = positions.visible(length, causal=self.causal, window=window, device=query.device)
            if bias is None:
                bias = torch.zeros(1, 1, 1, 1, dtype=query.dtype, device=query.device)
            bias = bias.masked_fill(~seen, lowest)
        assert bias is not None
        if bias.dtype != query.dtype:  # the lowest float32 would become -inf, and rows of it not a number
            bias = bias.clamp(min=lowest).to(query.dtype)
        return bias.expand(-1, -1, length, -1) if bias.shape[2] == 1 else bias, False


class RelativeBias(DistributedModule):
    """Holds T5's bias for every bucket and head: weight [buckets, heads / tp]."""

    weight: Tensor

    def __init__(self, num_buckets: int, num_heads: int, initializer_range: float) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.add_parameter("weight", (num_buckets, num_heads), normal(initializer_range), 1)

    def forward(self, input: Tensor) -> Tensor:
        raise UsageError("a slice of a relative bias can't be called by itself", remedy="call the attention layer")
