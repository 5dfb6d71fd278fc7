"""Which attributes of its modules a unit's call looks at.

Python offers one place that sees every way of reading an attribute, missing ones included: `__getattribute__` of the
class. It is replaced while a call runs that is to be watched, for the classes of its modules; other threads that come by
meanwhile are let through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class Watch:
    """While open, `seen` gathers (id of a module, name) of attributes that this thread reads. For one use."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._classes = {type(module) for module in modules}
        self.seen: set[tuple[int, str]] = set()

    def __enter__(self) -> Watch:
        with _lock:
            for cls in self._classes:
                _hold(cls)
        self._before = getattr(_local, "seen", None)
        _local.seen = self.seen
        return self

    def __exit__(self, *exc: object) -> None:
        _local.seen = self._before
        with _lock:
            for cls in self._classes:
                _release(cls)


def can_be_watched(module: nn.Module) -> bool:
    """Is its forward plain Python? What is compiled reads attributes in its own way."""
    call = module.__dict__.get("_compiled_call_impl")
    call = getattr(call, "_call", call)  # a unit's border stands in front of it
    compiled = call is not None and getattr(call, "__func__", None) is not nn.Module._call_impl
    return not compiled and not type(module).__module__.startswith(("torch._dynamo", "torch.jit"))


_local = threading.local()
_lock = threading.Lock()
# Per class: how many watches are open on it, and its own `__getattribute__`, if it has one.
_held: dict[type, list[Any]] = {}


def _hold(cls: type) -> None:
    if cls in _held:
        _held[cls][0] += 1
        return
    _held[cls] = [1, cls.__dict__.get("__getattribute__")]
    plain: Any = cls.__getattribute__
    cls.__getattribute__ = _noting(plain)  # type: ignore[assignment]


def _release(cls: type) -> None:
    held = _held[cls]
    held[0] -= 1
    if held[0] > 0:
        return
    del _held[cls]
    if held[1] is None:
        del cls.__getattribute__
    else:
        cls.__getattribute__ = held[1]  # type: ignore[assignment]


def _noting(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        seen = getattr(_local, "seen", None)
        if seen is not None:
            seen.add((id(self), name))
        return read(self, name)

    return __getattribute__
