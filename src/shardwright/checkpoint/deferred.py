"""Tensors that aren't here yet, and functions of them that run when they have come.

A state dict is given other names and forms (`smp.state.module_manager.translate_functions`) by functions of whole
dicts. To run one of them while tensors come by one at a time, it is given deferred tensors, which have shape and dtype but
no memory; they note what is done to them. Each result then tells which tensors it needs, and is made as soon as it has them.

What a function finds out about values, such as whether two tensors are equal, can't be deferred: torch refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_|__setitem__")


@dataclass(frozen=True, eq=False)
class _Origin:
    """How a tensor is made: it is the one of this name, or what a call returns, at `place` if that is several."""

    name: str = ""
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    place: int | None = None


class Deferred(Tensor):
    """A tensor on the meta device that knows how it is made."""

    _origin: _Origin

    @staticmethod
    def named(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Deferred:
        """Stand for a tensor that will come under this name."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Deferred)
        made._origin = _Origin(name)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if IN_PLACE.fullmatch(name):
            raise RuntimeError(f"{name} would change a tensor that isn't here yet")
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, Tensor):
            return _computed(cls, result, _Origin("", func, args, kwargs or {}))
        if isinstance(result, (tuple, list)) and any(isinstance(item, Tensor) for item in result):
            origins = (_Origin("", func, args, kwargs or {}, index) for index in range(len(result)))
            return [_computed(cls, item, origin) for item, origin in zip(result, origins, strict=True)]
        return result

    def needs(self) -> frozenset[str]:
        """The names of the tensors that this one is made of."""
        return frozenset(_names(self))

    def make(self, given: Mapping[str, Tensor]) -> Tensor:
        """The tensor itself. given: at least those that it needs."""
        return _made(self, given)


def filled(content: Any, known: Mapping[int, Any]) -> Any:
    """Nested content with deferred tensors replaced by what is known by their ids; torch's notes on a state dict stay."""
    made = tree_map_only(Deferred, lambda tensor: known[id(tensor)], content)
    if hasattr(content, "_metadata"):
        made._metadata = content._metadata
    return made


def _computed(cls: type[Deferred], result: Tensor, origin: _Origin) -> Deferred:
    with torch._C.DisableTorchFunctionSubclass():
        found = result.detach().as_subclass(cls)
    found._origin = origin
    return found


def _names(tensor: Deferred) -> Iterator[str]:
    origin = tensor._origin
    if origin.function is None:
        yield origin.name
    for leaf in tree_leaves((origin.args, origin.kwargs)):
        if isinstance(leaf, Deferred):
            yield from _names(leaf)


def _made(tensor: Deferred, given: Mapping[str, Tensor]) -> Tensor:
    origin = tensor._origin
    if origin.function is None:
        return given[origin.name]
    args, kwargs = tree_map_only(Deferred, lambda t: _made(t, given), (origin.args, dict(origin.kwargs)))
    result: Any = origin.function(*args, **kwargs)
    return result if origin.place is None else result[origin.place]  # type: ignore[no-any-return]
