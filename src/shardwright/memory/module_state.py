"""What modules keep in attributes and buffers, as it was before a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ABSENT = object()
_CONTAINERS = (list, dict, set)
# What torch itself keeps on every module, buffers apart.
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}

# Batch and instance norm write to these without a trace in the tensor's version.
_WRITTEN_UNSEEN = frozenset({"running_mean", "running_var"})

Table = dict[str, Any]


class StateBefore:
    """In order: made before a call, `settle` after it, then `in_place` around each repetition.

    Only what the call changed is kept: attributes that it assigned, tensors that it changed in place (the values), and
    entries of lists, dicts and sets.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = _tables(modules)
        self._entries = [{key: _Entry(value, key in _WRITTEN_UNSEEN) for key, value in _own(table)} for table in self._tables]
        self._changed: list[tuple[Table, dict[str, Any]]] = []

    def settle(self) -> None:
        """Find out what the call changed."""
        for table, entries in zip(self._tables, self._entries, strict=True):
            changed = {key: entry.before for key, entry in entries.items() if entry.changed(table.get(key, _ABSENT))}
            changed.update((key, _ABSENT) for key, _ in _own(table) if key not in entries)
            if changed:
                self._changed.append((table, changed))
        self._entries = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, everything is as it was before the call; afterwards as it is now, whatever happens meanwhile."""
        now = [(table, dict(table)) for table in self._tables]
        containers = [(v, v.copy()) for _, table in now for v in table.values() if isinstance(v, _CONTAINERS)]
        for table, changed in self._changed:
            for key, value in changed.items():
                if value is _ABSENT:
                    table.pop(key, None)
                else:
                    table[key] = _copy(value)  # the repetition will change it again
        try:
            yield
        finally:
            for table, before in now:
                if table.keys() != before.keys() or any(table[key] is not value for key, value in before.items()):
                    table.clear()
                    table.update(before)
            for container, copy in containers:
                if not _same(container, copy):
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(copy)


class _Entry:
    """One attribute or buffer, and what it takes to bring it back."""

    __slots__ = ("_unseen", "_value", "_version", "before")

    def __init__(self, value: Any, unseen: bool) -> None:
        self._value = value
        self._unseen = unseen
        self._version = value._version if _has_version(value) else 0
        with torch.no_grad():
            self.before = _copy(value)

    def changed(self, now: Any) -> bool:
        value = self._value
        if isinstance(value, _CONTAINERS) and now is value:
            return not _same(value, self.before)
        written = _has_version(value) and (self._unseen or value._version != self._version)
        if written:
            self.before.requires_grad_(value.requires_grad)
        elif now is not value:
            self.before = value  # another object took its place
        return now is not value or written


def _tables(modules: Sequence[nn.Module]) -> list[Table]:
    """The attributes and the buffers of all modules below these, each module once."""
    found: dict[int, nn.Module] = {id(m): m for top in modules for m in top.modules()}
    return [table for m in found.values() for table in ((vars(m), m._buffers) if m._buffers else (vars(m),))]


def _own(table: Table) -> list[tuple[str, Any]]:
    """Entries that a forward may change."""
    return [(key, value) for key, value in table.items() if key not in _TORCHS_OWN]


def _copy(value: Any) -> Any:
    if type(value) is Tensor:
        return value.clone()
    return value.copy() if isinstance(value, _CONTAINERS) else value


def _has_version(value: Any) -> bool:
    return type(value) is Tensor and not value.is_inference()


def _same(value: Any, copy: Any) -> bool:
    if isinstance(value, dict):
        return len(value) == len(copy) and all(k in copy and copy[k] is v for k, v in value.items())
    if isinstance(value, set):
        return bool(value == copy)
    return len(value) == len(copy) and all(a is b for a, b in zip(value, copy, strict=True))
