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
        with torch.no_grad():
            self._before = [(table, table.copy(), _copies(table)) for table in _tables(modules)]
        self._changed: list[tuple[Table, dict[str, Any]]] = []

    def settle(self) -> None:
        """Find out what the call changed."""
        for table, before, copies in self._before:
            changed = {k: v for k, v in before.items() if k not in _TORCHS_OWN and table.get(k, _ABSENT) is not v}
            changed.update((key, _ABSENT) for key in table.keys() - before.keys())
            for key, (copy, version) in copies.items():
                if key in _WRITTEN_UNSEEN or _is_changed(before[key], copy, version):
                    changed[key] = copy
            if changed:
                self._changed.append((table, changed))
        self._before = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, everything is as it was before the call; afterwards as it is now, whatever happens meanwhile."""
        tables = {id(table): table for table, _ in self._changed}.values()
        now = [(table, table.copy()) for table in tables]
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
                table.clear()
                table.update(before)
            for container, copy in containers:
                if not _same(container, copy):
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(copy)


def _tables(modules: Sequence[nn.Module]) -> list[Table]:
    """The attributes and the buffers of all modules below these, each module once."""
    found: dict[int, nn.Module] = {id(m): m for top in modules for m in top.modules()}
    return [table for m in found.values() for table in ((vars(m), m._buffers) if m._buffers else (vars(m),))]


def _copies(table: Table) -> dict[str, tuple[Any, int]]:
    """Copies of what a call may change in place, and versions of the tensors."""
    found: dict[str, tuple[Any, int]] = {}
    for key, value in table.items():
        if key in _TORCHS_OWN:
            continue
        if isinstance(value, _CONTAINERS):
            found[key] = value.copy(), 0
        elif type(value) is Tensor and not value.is_inference():
            found[key] = value.clone().requires_grad_(value.requires_grad), value._version
    return found


def _is_changed(value: Any, copy: Any, version: int) -> bool:
    return not _same(value, copy) if isinstance(value, _CONTAINERS) else value._version != version


def _copy(value: Any) -> Any:
    if type(value) is Tensor:
        return value.clone()
    return value.copy() if isinstance(value, _CONTAINERS) else value


def _same(value: Any, copy: Any) -> bool:
    if isinstance(value, dict):
        return len(value) == len(copy) and all(k in copy and copy[k] is v for k, v in value.items())
    if isinstance(value, set):
        return bool(value == copy)
    return len(value) == len(copy) and all(a is b for a, b in zip(value, copy, strict=True))
