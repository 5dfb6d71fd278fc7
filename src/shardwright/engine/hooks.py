"""Hooks of scripts on the model: called once, in order, as `hook(model, optimizer)` or `hook()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Hook = Callable[..., Any]


@dataclass(eq=False)
class _Waiting:
    """One registration; the same function may be registered several times."""

    hook: Hook
    removed: bool = False


class HookHandle:
    """What registering returns; `remove()` takes the hook back if it has not run yet."""

    def __init__(self, registration: _Waiting) -> None:
        self._registration = registration

    def remove(self) -> None:
        """Take the hook back."""
        self._registration.removed = True


class HookList:
    """Hooks that wait for one moment.

    call: runs a hook with the model and the optimizer of the moment.
    """

    def __init__(self, call: Callable[[Hook], None]) -> None:
        self._call = call
        self._waiting: list[_Waiting] = []

    def add(self, hook: Hook, *, now: bool) -> HookHandle:
        """Keep a hook for `release`, or run it at once. Raises: TypeError if it can't be called."""
        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
        registration = _Waiting(hook)
        if now:
            self._call(hook)
        else:
            self._waiting.append(registration)
        return HookHandle(registration)

    def release(self) -> None:
        """Run the hooks that wait, in order. Those that a hook adds meanwhile wait for the next release."""
        waiting, self._waiting = self._waiting, []
        for registration in waiting:
            if not registration.removed:
                self._call(registration.hook)


def call_hook(hook: Hook, model: object, optimizer: object) -> None:
    """Call as `hook(model, optimizer)`, or as `hook()` if it takes nothing."""
    if _takes_nothing(hook):
        hook()
    else:
        hook(model, optimizer)


def _takes_nothing(hook: Hook) -> bool:
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return False
    takes = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return not any(parameter.kind in takes for parameter in parameters)
