"""The arguments of a glue call: nested in tuples, lists, dicts and slices, some of them placed.

`gather` finds the tensors, `swap` replaces some of them, `lift` makes placed leaves of those that need a gradient or
belong to the model, and `Keyed` says in comparable form what a call's outcome can depend on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from shardwright.pipeline.placed import PlacedTensor
from shardwright.pipeline.spec import spec_of
from shardwright.transport.structure import Walker

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame

_KEYABLE = frozenset(
    (
        bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
        torch.memory_format, torch.Size,
    )
)  # fmt: skip
_NUMBERS = frozenset((int, float))
_NESTED = (tuple, list, dict)


def gather(value: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors inside a tuple, list or dict to `found`, with repetitions."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, _NESTED):
            gather(item, found)
        elif type(item) is slice:
            gather((item.start, item.stop, item.step), found)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors that a call returned, each once, in the order in which its outcome lists them."""
    if isinstance(result, torch.Tensor):
        return [result]
    walker = Walker()
    walker.describe(result)
    return walker.tensors


def swap(value: Any, table: dict[int, Any]) -> Any:
    """`value` with every tensor whose id is in `table` replaced."""
    if isinstance(value, torch.Tensor):
        return table.get(id(value), value)
    if isinstance(value, tuple):
        if type(value) is tuple:
            return tuple([swap(v, table) for v in value])
        if hasattr(value, "_fields"):
            return type(value)(*(swap(v, table) for v in value))
        return value
    if isinstance(value, list):
        return [swap(v, table) for v in value]
    if isinstance(value, dict):
        return {k: swap(v, table) for k, v in value.items()}
    if type(value) is slice:
        return slice(swap(value.start, table), swap(value.stop, table), swap(value.step, table))
    return value


def lift(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Parameters, buffers and ordinary tensors that require grad become placed leaves."""
    tensors: list[torch.Tensor] = []
    gather(args, tensors)
    if kwargs:
        gather(kwargs, tensors)
    table: dict[int, Any] = {}
    for t in tensors:
        if id(t) not in table:
            leaf = lifted(frame, t)
            if leaf is not t:
                table[id(t)] = leaf
    if not table:
        return args, kwargs
    return swap(args, table), swap(kwargs, table)


def lifted(frame: Frame, tensor: torch.Tensor) -> Any:
    """One tensor as glue sees it: a placed leaf, or itself if it is the same on all ranks."""
    if type(tensor) is PlacedTensor:
        return tensor
    registered = frame.runtime.registered.get(id(tensor))
    if registered is not None:
        return frame.parameter_leaf(registered)
    if tensor.requires_grad and torch.is_grad_enabled():
        return frame.script_leaf(tensor)
    return tensor


class Keyed:
    """One walk over arguments.

    operands: the placed tensors, each once.   ordinary: the other tensors.
    key: comparable; equal keys (and operand specs) have equal outcomes.   cacheable: False if there is no such key.
    skip: an object to leave out.   plain_numbers: only the types of numbers count, not their values.
    """

    __slots__ = ("_numbers", "_parts", "_skip", "cacheable", "operands", "ordinary")

    def __init__(self, *values: Any, skip: Any = None, plain_numbers: bool = False) -> None:
        self.operands: list[PlacedTensor] = []
        self.ordinary: list[torch.Tensor] = []
        self.cacheable = True
        self._parts: list[Any] = []
        self._skip = skip
        self._numbers: Collection[type] = _NUMBERS if plain_numbers else ()
        for value in values:
            self._read(value)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self._parts) if self.cacheable else ()

    def _read(self, value: Any) -> None:
        kind = type(value)
        parts = self._parts
        if kind is PlacedTensor:
            if value is self._skip:
                parts.append("target")
                return
            for i, known in enumerate(self.operands):
                if known is value:
                    parts.append(("p", i))
                    return
            parts.append(("p", len(self.operands)))
            self.operands.append(value)
        elif kind in _KEYABLE:
            parts.append(kind if kind in self._numbers else (kind, value))
        elif isinstance(value, torch.Tensor):
            self.ordinary.append(value)
            if value.layout is torch.strided:
                parts.append((kind, value.device, spec_of(value)))
            else:
                self.cacheable = False
        elif isinstance(value, (tuple, list)):
            parts.append((kind, len(value)))
            for v in value:
                self._read(v)
        elif isinstance(value, dict):
            parts.append((dict, tuple(value)))
            for v in value.values():
                self._read(v)
        elif kind is slice:
            parts.append(slice)
            self._read(value.start)
            self._read(value.stop)
            self._read(value.step)
        else:  # functions, arrays, other objects: what they hold can't be compared
            self.cacheable = False
