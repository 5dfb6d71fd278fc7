"""Attributes of modules that glue assigns, as each microbatch sees them.

Microbatches are in flight together, but a script may use attributes as if they came one after the other:
`self.losses = []` at the start of a forward, `self.count = self.count + 1`, a hidden state that the step body reads
after the model's call. So an assignment made by glue counts for its own microbatch and for later ones until these make
their own. When the step has ended, the last microbatch's values stay. A module that a step makes is nobody's yet: it
keeps its attributes itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwright.errors import UnsupportedOperationError

_ABSENT = object()


class _Slot:
    """One attribute: its value before the step, what microbatches assigned, and the latest that a unit used it for."""

    __slots__ = ("before", "by_microbatch", "key", "module", "taken")

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module = module
        self.key = key
        self.before = module.__dict__.get(key, _ABSENT)
        self.by_microbatch: dict[int, Any] = {}
        self.taken = -1

    def seen_by(self, microbatch: int) -> Any:
        for i in sorted(self.by_microbatch, reverse=True):
            if i == microbatch or (i < microbatch and not callable(self.by_microbatch[i])):
                return self.by_microbatch[i]
        return self.before

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.module.__dict__.pop(self.key, None)
        else:
            self.module.__dict__[self.key] = value


class Overlay:
    """The attributes that the glue of one step has assigned so far, on one rank.

    In order: any number of `assign` and `show`; then `settle`, or `undo` if the step failed.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._new: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def is_new(self, module: nn.Module) -> None:
        """The step has begun to make this module."""
        self._new.add(module)

    def assign(self, microbatch: int, module: nn.Module, key: str, value: Any, setter: Callable[..., None]) -> None:
        """Assign an attribute for a microbatch, by `setter(module, key, value)`."""
        if module in self._new:
            setter(module, key, value)
            return
        slot = self._slots.get((id(module), key))
        if slot is None:
            if module.__dict__.get(key, _ABSENT) is value:
                return
            slot = _Slot(module, key)
        if microbatch < slot.taken:
            raise UnsupportedOperationError(
                f"microbatch {microbatch} assigns '{key}' of {type(module).__name__}, which microbatch {slot.taken} has"
                " used already, in another order than one process would",
                remedy="assign it where a microbatch begins, not after model.backward()",
            )
        setter(module, key, value)
        if module.__dict__.get(key, _ABSENT) is value:  # not a parameter, buffer, module or property
            self._slots[(id(module), key)] = slot
            slot.by_microbatch[microbatch] = value

    def newest(self, microbatch: int, value: Any) -> Any:
        """What this microbatch should see where `value` was found: an earlier one may have assigned anew since."""
        for slot in self._slots.values():
            if slot.before is value or any(value is made for made in slot.by_microbatch.values()):
                return slot.seen_by(microbatch)
        return value

    def take(self, microbatch: int, module: nn.Module, key: str) -> None:
        """A unit uses the attribute for a microbatch: those before it may not assign it any more."""
        slot = self._slots.get((id(module), key))
        if slot is not None:
            slot.taken = max(slot.taken, microbatch)

    def track(self, module: nn.Module, key: str) -> None:
        """Let every microbatch of the step have this attribute for itself, whether it is assigned or not."""
        self._slots.setdefault((id(module), key), _Slot(module, key))

    def begin(self, microbatch: int) -> None:
        """This microbatch has done nothing so far, and those before it have come further since it was shown first."""
        for slot in self._slots.values():
            slot.by_microbatch.pop(microbatch, None)
        self.show(microbatch)

    def show(self, microbatch: int) -> None:
        """This microbatch runs now: let modules have the attributes that it should see."""
        for slot in self._slots.values():
            value = slot.seen_by(microbatch)
            if type(value) in (list, dict, set) and slot.by_microbatch.get(microbatch) is not value:
                value = slot.by_microbatch[microbatch] = value.copy()  # what this one adds is not for those before it
            slot.put(value)

    def settle(self) -> None:
        """The step has ended: keep what the last microbatches assigned."""
        for slot in self._slots.values():
            slot.put(slot.by_microbatch[max(slot.by_microbatch)] if slot.by_microbatch else slot.before)
        self._slots.clear()
        self._new.clear()

    def undo(self) -> None:
        """The step failed: modules have the attributes that they had before."""
        for slot in self._slots.values():
            slot.put(slot.before)
        self._slots.clear()
        self._new.clear()
