"""Calls in the manner of transformers, turned into calls of distributed modules, and their results back.

What a distributed module can't serve is refused by the name of the argument; None, False, 0 and lists of None ask for
nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

CACHES = frozenset({"cache", "past_key_values", "past_key_value", "layer_past"})
# Arguments that change nothing in what a module computes, at any level.
_NEUTRAL = frozenset({"return_dict", "num_items_in_batch"})
# Arguments that a stack or a layer gets from the model around it, and that our layers serve or find out themselves.
_INNER = _NEUTRAL | CACHES | {"use_cache", "cache_position", "position_embeddings", "position_ids"}


def named_arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the original's forward gives them."""
    bound = signature(forward).bind(None, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


@functools.cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature under all decorators. Cached: hooks run in every forward."""
    return inspect.signature(function)


def lm_head_call(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, token_types: bool = False
) -> Arguments:
    """A call of a causal language model, or of a bare one, as a call of `DistributedTransformerLMHead`.

    transformers' masks have 1 where a token counts, that of the distributed module 1 where it is masked.
    token_types: whether the model has embeddings of their own for them. GPT models look them up among the words,
        which is refused; models without that argument take no note of it.
    """
    named = named_arguments(forward, args, kwargs)
    input_ids = named.pop("input_ids", None)
    attention_mask = inverted(named.pop("attention_mask", None), "attention_mask")
    types, positions, labels = (named.pop(key, None) for key in ("token_type_ids", "position_ids", "labels"))
    if not token_types and "token_type_ids" in signature(forward).parameters:
        refuse({"token_type_ids": types}, of="a distributed model of this family")
    types = types if token_types else None
    cross_states, cross_mask = named.pop("encoder_hidden_states", None), named.pop("encoder_attention_mask", None)
    refuse(named, accepted=_NEUTRAL - {"num_items_in_batch"}, of="a distributed model")
    if input_ids is None:
        raise UsageError("a distributed model needs 'input_ids'", remedy="pass token ids instead of embeddings")
    if cross_states is None:
        return ((input_ids, attention_mask, types, positions, labels),), {}
    cross_mask = inverted(cross_mask, "encoder_attention_mask")
    return ((input_ids, attention_mask, types, positions, cross_states, cross_mask, labels),), {}


def stack_call(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, positions: bool = False
) -> Arguments:
    """A call of an encoder or of one layer as a call of `DistributedTransformer` or `DistributedTransformerLayer`.

    positions: whether the layers use position ids.
    """
    named = named_arguments(forward, args, kwargs)
    hidden: Tensor = named.pop("hidden_states")
    mask = additive(named.pop("attention_mask", None), hidden, "attention_mask")
    cross_states, cross_mask = named.pop("encoder_hidden_states", None), named.pop("encoder_attention_mask", None)
    for name in CACHES & named.keys():
        close_cache(named[name])
    refuse(named, accepted=_INNER, of="a distributed layer")
    known = {"position_ids": named["position_ids"]} if positions and named.get("position_ids") is not None else {}
    if cross_states is None:
        return ((hidden, mask),), known
    return ((hidden, cross_states, mask, additive(cross_mask, hidden, "encoder_attention_mask")),), known


def refuse(named: Mapping[str, Any], *, accepted: frozenset[str] = frozenset(), of: str) -> None:
    """Refuse arguments that ask for something and aren't accepted."""
    asked = sorted(name for name, value in named.items() if name not in accepted and not _asks_nothing(value))
    if asked:
        raise UsageError(
            f"{of} does not support the argument {', '.join(map(repr, asked))}",
            remedy="leave it out, or leave this module undistributed with smp.set_tensor_parallelism(module, False)",
        )


def _asks_nothing(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None or (isinstance(value, (bool, int)) and not value)


def inverted(mask: Tensor | None, name: str) -> Tensor | None:
    """A 0-1 mask [B, S] whose 1 means "counts" as one whose 1 means "masked"."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise UsageError(f"'{name}' is {list(mask.shape)}, expected [batch, sequence] of 0 and 1")
    return (mask == 0).to(torch.int64)


def additive(mask: Tensor | None, hidden: Tensor, name: str) -> Tensor | None:
    """A mask as transformers hands it to layers (for any attention implementation) as one that is added to scores."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise UsageError(
            f"'{name}' is a {type(mask).__name__}, expected a tensor",
            remedy="load the model with attn_implementation='sdpa' or 'eager'",
        )
    if mask.dim() == 2:
        mask = mask[:, None, None, :] != 0
    if not mask.is_floating_point():
        kept = mask != 0
        return torch.zeros(kept.shape, dtype=hidden.dtype, device=kept.device).masked_fill(
            ~kept, torch.finfo(hidden.dtype).min
        )
    return mask.to(hidden.dtype)


def close_cache(cache: Any) -> None:
    """Make sure that nobody generates with a key-value cache that distributed layers don't fill.

    Models make an empty cache even when they train. A full one is refused here; an empty one raises when it is
    asked for its length the next time, which is what generation does with it.
    """
    if cache is None or getattr(cache, "shardwright_closed", False):
        return
    length = cache.get_seq_length()
    if isinstance(length, Tensor) or length:
        _refuse_cache()
    cache.shardwright_closed = True
    cache.get_seq_length = _refuse_cache


def _refuse_cache(*_: Any, **__: Any) -> int:
    raise UsageError(
        "distributed layers do not keep a key-value cache, so this one is empty",
        remedy="generate with use_cache=False",
    )


def output_class(name: str) -> Callable[..., Any]:
    """A class of transformers' model outputs."""
    return getattr(importlib.import_module("transformers.modeling_outputs"), name)


def logits_output(name: str, output: Any) -> Any:
    """The result of a distributed language model as the output class of the original."""
    loss, logits = output if isinstance(output, tuple) else (None, output)
    return output_class(name)(loss=loss, logits=logits)


def hidden_output(name: str, output: Any) -> Any:
    """The hidden states of a distributed stack or bare model as the output class of the original."""
    return output_class(name)(last_hidden_state=_hidden(output))


def layer_output(extra: int | None, output: Any) -> Any:
    """The hidden states of a distributed layer: alone, or first of a tuple with `extra` times None behind them."""
    hidden = _hidden(output)
    return hidden if extra is None else (hidden, *[None] * extra)


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
