"""Attention of one process against the formula, written out plainly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.nn import positions
from shardwright.tensor_parallel.nn.attention import DistributedAttentionLayer
from shardwright.tensor_parallel.nn.flash import FlashAttentionLayer, build_alibi_mask
from shardwright.tensor_parallel.nn.lm_head import DistributedTransformerLMHead
from shardwright.tensor_parallel.nn.mlp import DistributedTransformerOutputLayer, find_activation

HEADS, HEAD, HIDDEN, LENGTH = 4, 6, 10, 7
PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False}


def _by_hand(layer: DistributedAttentionLayer, x: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """One head and one query at a time."""
    normed = layer.pre_layernorm(x) if layer.pre_layernorm is not None else x
    num_keys = options.get("num_key_value_heads", HEADS)
    query, key, value = (
        torch.nn.functional.linear(normed, part.weight, part.bias) for part in (layer.query, layer.key, layer.value)
    )
    frequencies = options.get("rotary_frequencies")
    context = torch.zeros(*x.shape[:2], HEADS * HEAD)
    for sample in range(x.shape[0]):
        for head in range(HEADS):
            shared = head // (HEADS // num_keys)
            q = query[sample, :, head * HEAD : (head + 1) * HEAD]
            k = key[sample, :, shared * HEAD : (shared + 1) * HEAD]
            v = value[sample, :, shared * HEAD : (shared + 1) * HEAD]
            if layer.query_norm is not None and layer.key_norm is not None:
                q = q / (q.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.query_norm.weight
                k = k / (k.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.key_norm.weight
            if frequencies is not None:
                q, k = (_turned(part, frequencies, options.get("rotary_interleaved", False)) for part in (q, k))
            scale = 1.0
            if options.get("scale_attention_scores", True):
                scale /= math.sqrt(HEAD)
            if options.get("scale_attn_by_layer_idx"):
                scale /= options["layer_idx"] + 1
            for i in range(LENGTH):
                scores = scale * (k @ q[i])
                for j in range(LENGTH):
                    if mask is not None:
                        scores[j] += mask[sample, 0, 0, j]
                    if options.get("use_alibi"):
                        scores[j] += 2.0 ** (-(head + 1) * 8 / HEADS) * (j - i)
                    if options.get("causal_mask_size") and j > i:
                        scores[j] = -math.inf
                    window = options.get("window_size")
                    if window and j <= i - window:
                        scores[j] = -math.inf
                context[sample, i, head * HEAD : (head + 1) * HEAD] = scores.softmax(0) @ v
    out = torch.nn.functional.linear(context, layer.dense.weight, layer.dense.bias) + x
    return layer.layernorm(out) if layer.layernorm is not None else out


def _turned(x: Tensor, frequencies: list[float], interleaved: bool) -> Tensor:
    x = x.clone()
    before = x.clone()
    pairs = len(frequencies)
    for place in range(x.shape[0]):
        for pair, frequency in enumerate(frequencies):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
            cos, sin = math.cos(place * frequency), math.sin(place * frequency)
            x[place, a] = before[place, a] * cos - before[place, b] * sin
            x[place, b] = before[place, b] * cos + before[place, a] * sin
    return x


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**PRE, "causal_mask_size": 8},
        {**PRE, "causal_mask_size": 8, "window_size": 3},
        {**PRE, "causal_mask_size": 8, "use_alibi": True},
        {**PRE, "causal_mask_size": 8, "rotary_frequencies": [1.0, 0.3]},
        {**PRE, "rotary_frequencies": [1.0, 0.3, 0.1], "rotary_interleaved": True},
        {**PRE, "num_key_value_heads": 2},
        {"qk_norm": True},
        {"scale_attention_scores": False},
        {"scale_attn_by_layer_idx": True, "layer_idx": 3},
    ],
)
def test_attention(options: dict[str, Any], masked: bool) -> None:
    torch.manual_seed(0)
    layer = DistributedAttentionLayer(HEADS, HEAD, HIDDEN, **options).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.4)
    x = torch.randn(2, LENGTH, HIDDEN)
    mask = torch.zeros(2, 1, 1, LENGTH)
    mask[1, ..., 5:] = -1e9
    given = mask if masked else None
    with torch.no_grad():
        torch.testing.assert_close(layer((x, given)), _by_hand(layer, x, given, options), rtol=1e-4, atol=1e-5)


def test_position_ids_turn_like_shifted_positions() -> None:
    layer = DistributedAttentionLayer(HEADS, HEAD, HIDDEN, rotary_frequencies=[1.0, 0.3]).eval()
    x = torch.randn(2, LENGTH, HIDDEN)
    here = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        plain = layer((x, None))
        torch.testing.assert_close(layer((x, None), here), plain)
        torch.testing.assert_close(layer((x, None), here + 5), plain, rtol=1e-4, atol=1e-5)  # only distances count
        assert not torch.allclose(layer((x, None), here * 2), plain, atol=1e-4)


def test_relative_buckets_are_those_of_t5() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for both_ways in (True, False):
        distance = torch.arange(40).unsqueeze(0) - torch.arange(30).unsqueeze(1)
        want = t5.T5Attention._relative_position_bucket(distance, both_ways, 32, 20)
        got = positions.relative_buckets(30, 40, 32, 20, both_ways, torch.device("cpu"))
        assert torch.equal(got, want)


def test_half_precision_survives_the_lowest_mask() -> None:
    layer = DistributedAttentionLayer(HEADS, HEAD, HIDDEN, causal_mask_size=8).eval().half()
    mask = torch.full((1, 1, 1, LENGTH), torch.finfo(torch.float32).min)
    assert layer((torch.randn(1, LENGTH, HIDDEN).half(), mask)).isfinite().all()


def test_activations() -> None:
    x = torch.linspace(-3, 3, 50)
    torch.testing.assert_close(find_activation("gelu_new")(x), torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(find_activation("quick_gelu")(x), x * torch.sigmoid(1.702 * x))
    with pytest.raises(ConfigError, match=r"'mish', expected one of gelu, gelu_new"):
        DistributedTransformerOutputLayer(activation="mish")


def test_arguments() -> None:
    with pytest.raises(ConfigError, match="both False"):
        DistributedAttentionLayer(pre_layernorm=False, post_layernorm=False)
    with pytest.raises(ConfigError, match="'num_attention_heads' is 4, expected a multiple"):
        DistributedAttentionLayer(4, num_key_value_heads=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        DistributedTransformerLMHead(colour=1)  # type: ignore[call-arg]
    known = DistributedTransformerLMHead.accepted_arguments()
    assert {"num_layers", "use_alibi", "rotary_frequencies", "num_experts", "gather_logits"} <= known
    assert not known & {"self", "options", "kwargs"}


def test_flash_attention_layer() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, LENGTH, 3, HEADS, HEAD)
    query, key, value = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    layer = FlashAttentionLayer(0.0, HEAD, scale_attn_by_layer_idx=True, layer_idx=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(HEAD) / 2
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    torch.testing.assert_close(layer(qkv), scores.softmax(-1) @ value)
    torch.testing.assert_close(layer(qkv, causal=True), scores.masked_fill(hidden, -math.inf).softmax(-1) @ value)
    with pytest.raises(RuntimeError, match="mask"):
        layer(qkv, torch.zeros(1, 1, 1, LENGTH))
    padded = torch.zeros(2, LENGTH)
    padded[1, 5:] = 1
    bias = build_alibi_mask(padded, LENGTH, HEADS)
    assert bias.shape == (2, HEADS, 1, LENGTH)
    assert bias[1, 0, 0, 5] == -math.inf
    assert bias[0, 1, 0].tolist() == pytest.approx([2.0**-4 * place for place in range(1 - LENGTH, 1)])
    alibi = FlashAttentionLayer(0.0, HEAD, triton_flash_attention=True, use_alibi=True)
    want = (query @ key.transpose(-1, -2) / math.sqrt(HEAD) + bias).masked_fill(hidden, -math.inf).softmax(-1) @ value
    torch.testing.assert_close(alibi(qkv, bias, causal=True), want)
    with pytest.raises(ValueError, match="attention_head_size"):
        FlashAttentionLayer()
    assert FlashAttentionLayer(scale=2.0).scale == 2.0
