"""What happened to tensors that have no storage yet, so that it can be done when one of them is needed.

Tensors on the meta device have shapes but no memory; what is computed with them is noted in one list, by the storages
that it reads and writes. The value of a tensor is then found by doing, in order, the calls that it depends on.

Note [Values by call]: each call is made on a random stream of its own, derived from (base, number of the call). So a value
does not depend on which others are made, in which process, or in which order: not on the layout. It is not the value
that the plain construction gives for the same seed, which draws everything from one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.topology.rng import derive_seed, torch_forked


@dataclass(frozen=True)
class Ref:
    """A tensor without memory: a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Ref:
        return cls(storage_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def within(self, whole: Tensor) -> Tensor:
        """The view of the real storage, of which `whole` is any view."""
        return torch.as_strided(whole, self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Generator:
    """A generator of the script's, as it was."""

    state: Tensor

    def again(self) -> torch.Generator:
        generator = torch.Generator("cpu")
        generator.set_state(self.state)
        return generator


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref | None, ...]
    reads: frozenset[int]
    context: int
    number: int


def storage_of(tensor: Tensor) -> int:
    """Tells storages apart as long as they live; 0 for tensors that have none (sparse ones)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


class Tape:
    """Calls on tensors without memory, of all contexts since it was cleared.

    bases: the random number of each context; equal bases give equal values.
    """

    def __init__(self) -> None:
        self.bases: list[int] = []
        self._calls: list[_Call] = []
        self._touching: dict[int, list[int]] = {}
        self._alive: dict[int, Any] = {}  # storages, so that none is taken for another one later

    def knows(self, tensor: Tensor) -> bool:
        """Is it a tensor without memory whose value can be found?"""
        return storage_of(tensor) in self._touching

    def note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        made: Sequence[Any], written: Iterable[Tensor],
    ) -> None:  # fmt: skip
        """Enter a call. made: its tensors in order, None for those that aren't new.   written: changed in place."""
        number = len(self._calls)
        reads: set[int] = set()
        kept = (self._kept(args, reads), self._kept(kwargs, reads))
        refs = tuple(None if t is None else Ref.of(t) for t in made)
        self._calls.append(_Call(function, *kept, refs, frozenset(reads), len(self.bases) - 1, number))
        for tensor in (*written, *(t for t in made if t is not None)):
            key = storage_of(tensor)
            self._alive[key] = tensor.untyped_storage()
            touching = self._touching.setdefault(key, [])
            if not touching or touching[-1] != number:
                touching.append(number)

    def value(self, tensor: Tensor) -> Tensor:
        """What a tensor without memory is, as a new tensor on the CPU of the same layout.

        At most the tensors that it was made from are held besides.
        """
        ref = Ref.of(tensor)
        real: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.device("cpu"):
            for number in sorted(self._needed(ref.storage)):
                self._do(self._calls[number], real)
            found = ref.within(real[ref.storage])
            whole = found.numel() * found.element_size() == found.untyped_storage().nbytes()
            return found if whole else found.clone(memory_format=torch.preserve_format)

    def _needed(self, storage: int) -> set[int]:
        """Numbers of the calls that a storage's value depends on."""
        needed: set[int] = set()
        open_ends = [(storage, len(self._calls))]
        seen: dict[int, int] = {}
        while open_ends:
            key, end = open_ends.pop()
            if seen.get(key, -1) >= end:
                continue
            seen[key] = end
            for number in self._touching.get(key, ()):
                if number < end and number not in needed:
                    needed.add(number)
                    open_ends += [(other, number) for other in self._calls[number].reads]
        return needed

    def _do(self, call: _Call, real: dict[int, Tensor]) -> None:
        with torch_forked(derive_seed(self.bases[call.context], "delayed", call.number)):
            result = call.function(*_firm(call.args, real), **_firm(call.kwargs, real))
        for ref, tensor in zip(call.made, tensors_in(result), strict=True):
            if ref is None:
                continue
            if tensor.stride() != ref.stride or tensor.storage_offset() != ref.offset or tensor.dtype != ref.dtype:
                fitting = torch.empty(ref.offset + _extent(ref), dtype=ref.dtype)
                ref.within(fitting).copy_(tensor)
                tensor = fitting
            real[ref.storage] = tensor

    def _kept(self, value: Any, reads: set[int]) -> Any:
        """An argument as it is now, with references for tensors without memory."""
        if isinstance(value, Tensor):
            if self.knows(value):
                reads.add(storage_of(value))
                return Ref.of(value)
            return value.detach().clone() if value.device.type != "meta" else value
        if isinstance(value, torch.Generator):
            return _Generator(value.get_state())
        if isinstance(value, (torch.device, str)) and is_place(value):
            return torch.device("cpu")
        return _nested(value, lambda item: self._kept(item, reads))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return [t for item in value.values() for t in tensors_in(item)] if isinstance(value, dict) else []


def replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """The same nesting with every tensor, generator, device and name of a device given through `replace`."""
    if isinstance(value, (Tensor, torch.Generator, torch.device)) or (isinstance(value, str) and is_place(value)):
        return replace(value)
    return _nested(value, lambda item: replaced(item, replace))


def is_place(value: Any) -> bool:
    """Does it name a device?"""
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "mps", "xpu", "meta")
    )


def _firm(value: Any, real: dict[int, Tensor]) -> Any:
    if isinstance(value, Ref):
        return value.within(real[value.storage])
    return value.again() if isinstance(value, _Generator) else _nested(value, lambda item: _firm(item, real))


def _nested(value: Any, each: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in (tuple, list):
        return kind([each(item) for item in value])
    return {key: each(item) for key, item in value.items()} if kind is dict else value


def _extent(ref: Ref) -> int:
    """Elements from the first to the last of a view."""
    if 0 in ref.size:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
