"""Which tensors inside an object a unit looks at.

A key-value cache holds the tensors of all layers; a block needs its own. In the first call of a kind every tensor of
the cache is brought to the block's rank, those that come from elsewhere behind a tripwire; calls after it bring only
those that were touched. One that is touched later nevertheless is an error by name, never a wrong value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.transport.structure import Walker


class _Tripwire(torch.Tensor):
    """A tensor that notes its first use; then the real one is used in its place."""

    _touched: bool
    _real: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_unwrap(args), **_unwrap(kwargs or {}))


def _unwrap(value: Any) -> Any:
    if type(value) is _Tripwire:
        value._touched = True
        return value._real
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_unwrap(v) for v in value)
    if type(value) is dict:
        return {k: _unwrap(v) for k, v in value.items()}
    return value


class Tripwires:
    """The tripwires of one call. In order: `set` before it, then `untouched` and `remove`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._real: dict[int, torch.Tensor] = {}

    def set(self, given: list[Any]) -> None:
        """Put tripwires in front of the tensors with these numbers."""
        for number in self._numbers:
            real = given[number]
            wire = real.detach().as_subclass(_Tripwire)
            wire._touched, wire._real = False, real
            self._real[number] = real
            given[number] = wire

    def untouched(self, given: Sequence[Any]) -> frozenset[int]:
        """Numbers of the tensors that nothing has looked at."""
        return frozenset(n for n in self._numbers if not given[n]._touched)

    def remove(self, given: list[Any], walker: Walker) -> None:
        """Put the real tensors back; the walker takes a tripwire that is still somewhere for the real one."""
        for number in self._numbers:
            walker.alias(given[number], number)
            given[number] = self._real[number]
