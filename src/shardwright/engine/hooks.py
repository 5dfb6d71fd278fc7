"""Hooks that scripts register on the model: called once, in order, as `hook(model, optimizer)` or `hook()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class HookHandle:
    """What registering returns; `remove()` takes the hook back if it has not run yet."""

    def __init__(self, pending: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        self._pending = pending
        self._hook = hook

    def remove(self) -> None:
        if self._hook in self._pending:
            self._pending.remove(self._hook)


class HookList:
    """Hooks that wait for one moment. A hook may register further ones: they run at the same moment, after it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._pending: list[Callable[..., Any]] = []

    def add(self, hook: Callable[..., Any], *, now: bool) -> HookHandle:
        """Keep a hook for `release`, or run it at once."""
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        handle = HookHandle(self._pending, hook)
        if now:
            from shardwright.engine.state import state

            self._call(hook, state.optimizer)
        else:
            self._pending.append(hook)
        return handle

    def release(self, optimizer: Any, *, once: bool = False) -> None:
        """Run all waiting hooks in order. once: those that a hook adds wait for the next release."""
        last = self._pending[-1] if self._pending else None
        while self._pending:
            hook = self._pending.pop(0)
            self._call(hook, optimizer)
            if once and hook is last:
                return

    def _call(self, hook: Callable[..., Any], optimizer: Any) -> None:
        if _num_positional(hook) == 0:
            hook()
        else:
            hook(self._model, optimizer)


def _num_positional(hook: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return sum(p.kind in kinds for p in parameters)
