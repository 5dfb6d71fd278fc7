"""Nested Python values as a skeleton plus the tensors they hold.

Everything that crosses a border (step inputs, arguments and results of units) goes through here, so that
containers, dataclasses, `ModelOutput`s and objects that carry tensors (a key-value cache, a list of boxes)
are treated alike everywhere.

A *skeleton* is a nested tuple that can be compared, hashed and pickled; tensors in it are numbers.
Immutable containers (tuple, namedtuple, frozenset) are part of the skeleton. Mutable ones (list, dict, set,
objects) are *cells*: numbered, kept by identity, so that an object changed inside a unit can be changed alike
on every rank, and two references to one object stay two references to one object.

    ("none",)  ("const", type, value)  ("tensor", i)  ("cell", j)
    ("tuple", cls, children)  ("frozenset", children)  ("slice", children)  ("opaque", type_name)

The contents of cell j are `cells[j]` of the skeleton: ("list"|"dict"|"set"|"object", cls, children).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

Node = tuple[Any, ...]

_CONSTANTS = (
    bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented), enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_REFERENCES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The shape of a value: its root node and the contents of its cells."""

    root: Node
    cells: tuple[Node, ...]

    @functools.cached_property
    def has_constants(self) -> bool:
        """True if a Python value other than None is in it (numbers, strings, flags)."""
        return _any_node(self, lambda n: n[0] == "const")

    @functools.cached_property
    def opaque(self) -> str | None:
        """Type name of something that cannot be described by value, or None."""
        found: list[str] = []
        _any_node(self, lambda n: n[0] == "opaque" and not found.append(n[1]))
        return found[0] if found else None


class Walker:
    """Describes values one after the other with one numbering of tensors and cells.

    Objects that the walker has met before keep their number, so results can refer to arguments.
    `leave_alone(obj)`: True for objects that are each rank's own (modules, optimizers): described by type only.
    """

    def __init__(self, leave_alone: Callable[[Any], bool] = lambda obj: False) -> None:
        self.tensors: list[torch.Tensor] = []
        self.cells: list[Any] = []
        self.contents: list[Node] = []
        self._numbers: dict[int, int] = {}
        self._cell_numbers: dict[int, int] = {}
        self._leave_alone = leave_alone

    def describe(self, value: Any) -> Node:
        """Return the node of `value`, adding its tensors and cells to this walker."""
        if value is None:
            return ("none",)
        if isinstance(value, torch.Tensor):
            return ("tensor", self.number(value))
        cls = type(value)
        if isinstance(value, _CONSTANTS):
            return ("const", cls, tuple(value) if cls is torch.Size else value)
        if isinstance(value, tuple):
            return ("tuple", cls, tuple(self.describe(v) for v in value))
        if cls is slice:
            return ("slice", (self.describe(value.start), self.describe(value.stop), self.describe(value.step)))
        if isinstance(value, frozenset):
            return ("frozenset", tuple(self.describe(v) for v in _ordered(value)))
        if isinstance(value, _REFERENCES):
            return ("opaque", _type_name(value))
        if self._leave_alone(value) or isinstance(value, (torch.nn.Module, torch.Generator)):
            return ("opaque", _type_name(value))
        if isinstance(value, (list, dict, set)) or _has_state(value):
            return self._cell(value)
        return ("opaque", _type_name(value))

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, a new one if it was not met before."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def adopt_cell(self, value: Any) -> None:
        """Give a cell the next number without reading it yet (see `reread`)."""
        self._cell_numbers[id(value)] = len(self.cells)
        self.cells.append(value)
        self.contents.append(())

    def skeleton(self, root: Node) -> Skeleton:
        return Skeleton(root, tuple(self.contents))

    def reread(self) -> list[Node]:
        """Describe all known cells again as they are now; new tensors and cells are added."""
        known = len(self.cells)
        self.contents[:known] = [self._read(cell) for cell in self.cells[:known]]
        return self.contents

    def _cell(self, value: Any) -> Node:
        number = self._cell_numbers.get(id(value))
        if number is None:
            number = self._cell_numbers[id(value)] = len(self.cells)
            self.cells.append(value)
            self.contents.append(())
            self.contents[number] = self._read(value)
        return ("cell", number)

    def _read(self, value: Any) -> Node:
        cls = type(value)
        if isinstance(value, list):
            return ("list", cls, tuple(self.describe(v) for v in value), self._extra(value))
        if isinstance(value, dict):
            items = tuple(((type(k), k), self.describe(v)) for k, v in value.items())
            return ("dict", cls, items, self._extra(value))
        if isinstance(value, set):
            return ("set", cls, tuple(self.describe(v) for v in _ordered(value)), ())
        return ("object", cls, (), self._extra(value))

    def _extra(self, value: Any) -> Node:
        return tuple((name, self.describe(v)) for name, v in _attributes(value))


def skeleton_of(value: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """Describe one value by itself: its skeleton and its tensors in order of first appearance."""
    walker = Walker()
    root = walker.describe(value)
    return walker.skeleton(root), walker.tensors


def build(skeleton: Skeleton, tensors: list[Any], opaque: Callable[[Node], Any] | None = None) -> Any:
    """Make a new value of this skeleton around `tensors`; inverse of `skeleton_of`."""
    return Builder(tensors, [], skeleton.cells, opaque).value(skeleton.root)


class Builder:
    """Turns nodes back into values.

    tensors: one object per tensor number.   cells: existing objects per cell number; missing ones are made.
    contents: what the cells hold; written into made cells at once, into existing ones by `write`.
    """

    def __init__(
        self,
        tensors: list[Any],
        cells: list[Any],
        contents: Iterable[Node],
        opaque: Callable[[Node], Any] | None = None,
    ) -> None:
        self._tensors = tensors
        self._cells: dict[int, Any] = dict(enumerate(cells))
        self._contents = list(contents)
        self._opaque = opaque

    def value(self, node: Node) -> Any:
        kind = node[0]
        if kind == "tensor":
            return self._tensors[node[1]]
        if kind == "none":
            return None
        if kind == "const":
            return torch.Size(node[2]) if node[1] is torch.Size else node[2]
        if kind == "tuple":
            return _make_tuple(node[1], [self.value(n) for n in node[2]])
        if kind == "cell":
            return self.cell(node[1])
        if kind == "slice":
            return slice(*(self.value(n) for n in node[1]))
        if kind == "frozenset":
            return frozenset(self.value(n) for n in node[1])
        if self._opaque is not None:
            return self._opaque(node)
        raise TypeError(f"a value of type {node[1]} cannot be rebuilt on another rank")

    def cell(self, number: int) -> Any:
        if number not in self._cells:
            content = self._contents[number]
            made = content[1].__new__(content[1])
            self._cells[number] = made
            self.write(number)
        return self._cells[number]

    def write(self, number: int) -> None:
        """Give an existing cell the contents that its node describes, keeping its identity.

        Parts that can't be described by value (functions, types) stay what they are in the cell now.
        """
        kind, _, children, extra = self._contents[number]
        target = self._cells[number]
        if kind == "list":
            now = list(target)
            items = [self._part(n, now[i] if i < len(now) else _ABSENT) for i, n in enumerate(children)]
            list.__init__(target, items)
        elif kind == "dict":
            before = dict(target)
            pairs = [(key, self._part(n, before.get(key, _ABSENT))) for (_, key), n in children]
            _dict_type(target).clear(target)
            for key, item in pairs:
                _dict_type(target).__setitem__(target, key, item)
        elif kind == "set":
            members = [self.value(n) for n in children]
            target.clear()
            target.update(members)
        attributes = {name: self._part(n, getattr(target, name, _ABSENT)) for name, n in extra}
        if hasattr(target, "__dict__"):
            for name in [n for n in target.__dict__ if n not in attributes]:
                del target.__dict__[name]
            target.__dict__.update(attributes)
        else:
            for name, item in attributes.items():
                object.__setattr__(target, name, item)

    def _part(self, node: Node, now: Any) -> Any:
        if node[0] == "opaque" and now is not _ABSENT:
            return now
        return self.value(node)


_ABSENT = object()


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Instance attributes in a stable order; a `ModelOutput` keeps its fields as items and attributes alike."""
    found = list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.append((name, getattr(value, name)))
    return found


def _has_state(value: Any) -> bool:
    cls = type(value)
    if cls.__module__ in ("builtins", "threading", "_thread") or cls.__reduce__ is not object.__reduce__:
        return dataclasses.is_dataclass(value)
    return hasattr(value, "__dict__") or any("__slots__" in c.__dict__ for c in cls.__mro__[:-1])


def _dict_type(value: Any) -> Any:
    """The built-in type whose __setitem__ fills `value` without running a subclass's own logic."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


def _make_tuple(cls: type, items: list[Any]) -> Any:
    if cls is tuple:
        return tuple(items)
    if hasattr(cls, "_fields"):
        return cls(*items)
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types.*
        return cls(items)
    return tuple.__new__(cls, items)


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Set members in an order that is the same on every rank, as far as their type allows."""
    return sorted(values, key=lambda v: (type(v).__name__, repr(v) if not isinstance(v, torch.Tensor) else ""))


def _type_name(value: Any) -> str:
    cls = type(value)
    name = getattr(value, "__qualname__", "") if isinstance(value, (type, types.FunctionType)) else ""
    return f"{cls.__module__}.{cls.__qualname__}" + (f" {name}" if name else "")


def _any_node(skeleton: Skeleton, test: Callable[[Node], Any]) -> bool:
    stack: list[Node] = [skeleton.root]
    for content in skeleton.cells:
        kind, _, children, extra = content
        stack += [n for _, n in children] if kind == "dict" else list(children)
        stack += [n for _, n in extra]
    while stack:
        node = stack.pop()
        if test(node):
            return True
        if node[0] == "tuple":
            stack += node[2]
        elif node[0] in ("slice", "frozenset"):
            stack += node[1]
    return False
