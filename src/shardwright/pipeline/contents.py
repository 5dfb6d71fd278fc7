"""What objects hold, in a form that shows whether it has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from shardwright.pipeline.placed import PlacedTensor

_ABSENT = object()
HOLDS_NO_TENSOR = (bool, int, float, complex, str, bytes, type(None), nn.Module, nn.Parameter)
_INTERNAL = frozenset(nn.Module().__dict__) | {"_compiled_call_impl", "forward"}
_NOT_LOOKED_INTO = (*HOLDS_NO_TENSOR, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_DEPTH = 4

Contents = dict[str, tuple[Any, Sequence[Any]]]


def contents_of(thing: Any) -> Contents:
    """By name, the attributes of an object that may hold tensors, and what shows a change of each."""
    attributes = getattr(thing, "__dict__", {})
    may_hold = {n: v for n, v in attributes.items() if n not in _INTERNAL and not isinstance(v, HOLDS_NO_TENSOR)}
    return {n: (v, _entries(v)) for n, v in may_hold.items()}


def buffers_of(module: nn.Module) -> Contents:
    """The same for its buffers; the statistics of batch norms are nobody's state."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return {}
    return {n: (t, _entries(t)) for n, t in module._buffers.items() if t is not None}


def depths_of(module: nn.Module, met: set[int]) -> Contents:
    """By name, all tensors within reach of its attributes. met: ids of objects looked into so far."""
    found: Contents = {}
    for name, value in module.__dict__.items():
        if name not in _INTERNAL and not isinstance(value, _NOT_LOOKED_INTO):
            tensors: list[Any] = []
            _dive(value, _DEPTH, tensors, met)
            found[name] = (None, tensors)
    return found


def changed(before: Contents, after: Contents) -> list[str]:
    """Names whose contents differ."""
    nothing = (_ABSENT, ())
    return [n for n, now in after.items() if not _same(before.get(n, nothing), now)]


def _entries(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return () if value.is_inference() else (value._version,)
    if isinstance(value, (list, set)):
        return tuple(value)
    return (*value, *value.values()) if isinstance(value, dict) else ()


def _same(left: tuple[Any, Sequence[Any]], right: tuple[Any, Sequence[Any]]) -> bool:
    if left[0] is not right[0] or len(left[1]) != len(right[1]):
        return False
    return all(a is b or (type(a) is int and a == b) for a, b in zip(left[1], right[1], strict=True))


def _dive(value: Any, depth: int, found: list[Any], met: set[int]) -> None:
    """Add the tensors that a value holds, and their versions."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, (nn.Parameter, PlacedTensor)):
            found += [value, *_entries(value)]
        return
    if depth == 0 or isinstance(value, _NOT_LOOKED_INTO) or id(value) in met:
        return
    met.add(id(value))
    inside: Iterable[Any]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    else:
        inside = getattr(value, "__dict__", {}).values()
    for part in list(inside):
        _dive(part, depth - 1, found, met)
