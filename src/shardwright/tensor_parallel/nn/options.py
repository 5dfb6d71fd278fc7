"""The keyword options that transformer classes pass down to their layers, each explained once.

`DistributedTransformerLMHead`, `DistributedTransformer` and `DistributedTransformerLayer` take them as
keywords; `spelled_out` gives their constructors a signature that lists every one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, TypeVar

Norm = Literal["layernorm", "rmsnorm"]
ParallelResidual = Literal["shared_norm", "two_norms"]
SplitExperts = Literal["intermediate", "experts"]

_C = TypeVar("_C", bound=Callable[..., None])


class _AttentionOnly(TypedDict, total=False):
    """Options of attention alone.

    num_key_value_heads: fewer than the query heads: grouped heads; may be fewer than the tp degree.
    scale_attention_scores: by 1/sqrt(head size).   scale_attn_by_layer_idx: by 1/(layer_idx + 1) as well.
    attention_in_fp32: scores and softmax in float32.   query_key_layer_scaling: neutral; see attention.py.
    fused_softmax, flash_attention: accepted, never change the mathematics.
    rotary_frequencies: inverse frequencies, one for each pair of rotated dims; None: no rotary embedding.
    rotary_interleaved: pairs are neighbours (GPT-J), else halves apart.   rotary_scale: factor on cos and sin.
    window_size: a query sees the last `window_size` keys only, itself included.
    qk_norm: RMS norm over the head dim of queries and keys, before the rotary embedding.
    relative_attention_*: T5's learned bias by bucketed distance; the layer then returns (hidden, mask with the
        bias), so that further layers get it.
    """

    num_key_value_heads: int | None
    qkv_bias: bool
    dense_bias: bool
    scale_attention_scores: bool
    scale_attn_by_layer_idx: bool
    layer_idx: int | None
    attention_in_fp32: bool
    query_key_layer_scaling: bool
    fused_softmax: bool
    flash_attention: bool
    rotary_frequencies: Sequence[float] | None
    rotary_interleaved: bool
    rotary_scale: float
    window_size: int | None
    qk_norm: bool
    relative_attention_buckets: int | None
    relative_attention_max_distance: int
    relative_attention_bidirectional: bool


class _OutputOnly(TypedDict, total=False):
    """Options of the output layer alone.

    gated: activation(dense1_gate(x)) * dense1(x).   mlp_bias: biases of its linear layers.
    intermediate_dropout_prob: dropout on what dense2 gets (T5).
    """

    gated: bool
    mlp_bias: bool
    intermediate_dropout_prob: float


class _Mixture(TypedDict, total=False):
    """Options of a mixture of experts in the output layer's place (`DistributedMixtureOutputLayer`)."""

    num_experts: int | None
    experts_per_token: int | None
    normalize_router: bool
    split_experts: SplitExperts | None


class _Both(TypedDict, total=False):
    """Options of attention and output layer alike.

    norm: kind of the input and output norms.
    fused_dropout, fused_bias_gelu: accepted, never change the mathematics.
    """

    fused_dropout: bool
    fused_bias_gelu: bool
    fp32_residual_addition: bool
    norm: Norm


class LayerOptions(_AttentionOnly, _OutputOnly, _Mixture, _Both, total=False):
    """Options of `DistributedTransformerLayer`: those of attention and output layer, and its residual form.

    parallel_residual: attention and output layer both read the layer's input: "shared_norm" through one norm
        (GPT-J), "two_norms" through a norm each (GPT-NeoX).
    """

    parallel_residual: ParallelResidual | None


class StackOptions(LayerOptions, total=False):
    """Options of `DistributedTransformer` and the LM head, which have no positions for the last two.

    use_alibi, alibi_bias_max: a bias linear in the position of the key, of another slope for each head.
    """

    use_alibi: bool
    alibi_bias_max: int


ATTENTION: Final = frozenset({*_AttentionOnly.__annotations__, *_Both.__annotations__})
"""Names of the options that the attention layer takes."""

OUTPUT: Final = frozenset({*_OutputOnly.__annotations__, *_Both.__annotations__})
"""Names of the options that the output layer takes."""

MIXTURE: Final = frozenset({*_Mixture.__annotations__, "norm", "fp32_residual_addition"})
"""Names of the options that the mixture of experts takes."""


def chosen(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return those options that `known` lists."""
    return {name: value for name, value in options.items() if name in known}


def spelled_out(options: type[Any]) -> Callable[[_C], _C]:
    """Give a constructor with `**options` a signature with each of them, for whoever asks what it takes.

    A name that the constructor has itself is left as it is.
    """

    def decorate(constructor: _C) -> _C:
        signature = inspect.signature(constructor)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {parameter.name for parameter in own}
        extra = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in options.__annotations__
            if name not in known
        ]
        constructor.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
        return constructor

    return decorate


def check_known(options: Mapping[str, Any], known: type[Any], where: str) -> None:
    """Raise TypeError for a keyword that no layer knows, as Python does for a plain signature."""
    unknown = sorted(options.keys() - set(known.__annotations__))
    if unknown:
        raise TypeError(f"{where}() got an unexpected keyword argument {unknown[0]!r}")
