"""Nested Python values as a skeleton plus the tensors they hold.

Everything that crosses a border (step inputs, arguments and results of units) goes through here, so that
containers, dataclasses, `ModelOutput`s and objects that carry tensors (a key-value cache, a list of boxes)
are treated alike everywhere.

A *skeleton* is a nested tuple that can be compared, hashed and pickled; tensors in it are numbers.
Immutable containers (tuple, namedtuple, frozenset) are part of the skeleton. Mutable ones (list, dict, set,
objects) are *cells*: numbered, kept by identity, so that an object changed inside a unit can be changed alike
on every rank, and two references to one object stay two references to one object. What has no description
(functions, modules, open files) is *opaque*: numbered too, so that it is at least known to be the same.

    ("none",)  ("const", type, value)  ("tensor", i)  ("cell", j)  ("opaque", type_name, k, content)
    ("tuple", cls, children)  ("frozenset", children)  ("slice", children)

The contents of cell j are `cells[j]` of the skeleton: ("list"|"dict"|"set"|"object", cls, children, attributes).
No code of a user's class runs while a value is described or built: neither __init__, __eq__, __getattr__ nor
properties.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash

from shardwright.errors import UsageError

Node = tuple[Any, ...]

_CONSTANTS = (
    bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented), enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_PLAIN = frozenset({bool, int, str, bytes})
_REFERENCES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial)
_ALWAYS_OPAQUE = (torch.nn.Module, torch.Generator, torch.optim.Optimizer, torch.utils.data.DataLoader)
_VALUE_MODULES = frozenset({"numpy", "datetime", "decimal", "fractions", "pathlib", "uuid"})
_NONE = ("none",)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The shape of a value: its root node and the contents of its cells."""

    root: Node
    cells: tuple[Node, ...]

    @functools.cached_property
    def has_constants(self) -> bool:
        """True if a Python value other than None is in it (numbers, strings, flags)."""
        return any(node[0] == "const" for node in nodes_of(self.root, self.cells))

    @functools.cached_property
    def opaque(self) -> str | None:
        """Type name of something that cannot be described, or None."""
        return next((node[1] for node in nodes_of(self.root, self.cells) if node[0] == "opaque"), None)


class Walker:
    """Describes values one after the other with one numbering of tensors, cells and opaque objects.

    Objects that the walker has met before keep their number, so results can refer to arguments.
    `leave_alone(obj)`: True for objects that are each rank's own: they are opaque, and so are devices then.
    """

    def __init__(self, leave_alone: Callable[[Any], bool] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.cells: list[Any] = []
        self.contents: list[Node] = []
        self.opaques: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._cell_numbers: dict[int, int] = {}
        self._opaque_numbers: dict[int, int] = {}
        self._leave_alone = leave_alone

    def describe(self, value: Any) -> Node:
        """Return the node of `value`, adding its tensors, cells and opaque objects to this walker.

        Raises: UsageError for a set whose members have no order that is the same on every rank.
        """
        if value is None:
            return _NONE
        cls = type(value)
        if cls in _PLAIN:
            return ("const", cls, value)
        if isinstance(value, torch.Tensor):
            return ("tensor", self.number(value))
        if cls is tuple:
            return ("tuple", cls, tuple([self.describe(v) for v in value]))
        if cls is list or cls is dict:
            return self._cell(value)
        if isinstance(value, _CONSTANTS) and not (cls is torch.device and self._leave_alone is not None):
            return _constant(cls, value)
        if isinstance(value, tuple):
            return ("tuple", cls, tuple(self.describe(v) for v in value))
        if cls is slice:
            return ("slice", (self.describe(value.start), self.describe(value.stop), self.describe(value.step)))
        if isinstance(value, frozenset):
            return ("frozenset", tuple(self.describe(v) for v in _ordered(value)))
        if self._is_opaque(value):
            return ("opaque", type_name(value), self._opaque_number(value), fingerprint(value))
        return self._cell(value)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, a new one if it was not met before."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def alias(self, tensor: torch.Tensor, number: int) -> None:
        """Take a tensor for the one that has this number, or will have it."""
        self._numbers[id(tensor)] = number

    def adopt(self, tensors: Iterable[torch.Tensor], cells: Iterable[Any], opaques: Iterable[Any]) -> None:
        """Begin with the numbers of another walker; cells are read by `reread`."""
        for number, tensor in enumerate(tensors):
            self._numbers[id(tensor)] = number
            self.tensors.append(tensor)
        for cell in cells:
            self._cell_numbers[id(cell)] = len(self.cells)
            self.cells.append(cell)
            self.contents.append(())
        for value in opaques:
            self._opaque_number(value)

    def skeleton(self, root: Node) -> Skeleton:
        return Skeleton(root, tuple(self.contents))

    def reread(self) -> None:
        """Describe all known cells again as they are now; new tensors and cells are added."""
        for number in range(len(self.cells)):
            self.contents[number] = self._read(self.cells[number])

    def _is_opaque(self, value: Any) -> bool:
        if isinstance(value, (*_REFERENCES, *_ALWAYS_OPAQUE)):
            return True
        if self._leave_alone is not None and self._leave_alone(value):
            return True
        return not (isinstance(value, (list, dict, set)) or _has_state(type(value)))  # type: ignore[arg-type]

    def _opaque_number(self, value: Any) -> int:
        number = self._opaque_numbers.get(id(value))
        if number is None:
            number = self._opaque_numbers[id(value)] = len(self.opaques)
            self.opaques.append(value)
        return number

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
            return ("list", cls, tuple([self.describe(v) for v in list.__iter__(value)]), self._extra(value))
        if isinstance(value, dict):
            items = tuple([(self.describe(k), self.describe(v)) for k, v in dict.items(value)])
            return ("dict", cls, items, self._extra(value))
        if isinstance(value, set):
            return ("set", cls, tuple(self.describe(v) for v in _ordered(value)), self._extra(value))
        return ("object", cls, (), self._extra(value))

    def _extra(self, value: Any) -> Node:
        cls = type(value)
        if cls is list or cls is dict or cls is set:
            return ()
        return tuple([(name, self.describe(v)) for name, v in _attributes(value)])


def skeleton_of(value: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """Describe one value by itself: its skeleton and its tensors in order of first appearance."""
    walker = Walker()
    root = walker.describe(value)
    return walker.skeleton(root), walker.tensors


def build(skeleton: Skeleton, tensors: Sequence[Any]) -> Any:
    """Make a new value of this skeleton around `tensors`; inverse of `skeleton_of`. Raises TypeError if it is opaque."""
    return Builder(tensors, [], skeleton.cells).value(skeleton.root)


class SupportsNumbers(Protocol):
    """A list of tensors, or something else that has one for each number."""

    def __getitem__(self, number: int, /) -> Any: ...


class Builder:
    """Turns nodes back into values.

    tensors: one object per tensor number.   cells: existing objects per cell number; missing ones are made.
    contents: what the cells hold; written into made cells at once, into existing ones by `write`.
    opaques: objects per opaque number.   opaque: makes those that are not in `opaques`.
    """

    def __init__(
        self,
        tensors: SupportsNumbers,
        cells: Sequence[Any],
        contents: Sequence[Node],
        opaques: Mapping[int, Any] | None = None,
        opaque: Callable[[Node], Any] | None = None,
    ) -> None:
        self._tensors = tensors
        self._cells: dict[int, Any] = dict(enumerate(cells))
        self._contents = contents
        self._opaques = opaques or {}
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
        if node[2] in self._opaques:
            return self._opaques[node[2]]
        if self._opaque is not None:
            return self._opaque(node)
        raise TypeError(f"a value of type {node[1]} cannot be rebuilt on another rank")

    def cell(self, number: int) -> Any:
        if number not in self._cells:
            cls = self._contents[number][1]
            self._cells[number] = cls.__new__(cls)
            self.write(number)
        return self._cells[number]

    def write(self, number: int) -> None:
        """Give a cell the contents that its node describes, keeping its identity."""
        kind, _, children, extra = self._contents[number]
        target = self._cells[number]
        if kind == "list":
            list.__setitem__(target, slice(None), [self.value(n) for n in children])
        elif kind == "dict":
            pairs = [(self.value(k), self.value(n)) for k, n in children]
            base = _dict_type(target)
            base.clear(target)
            for key, item in pairs:
                base.__setitem__(target, key, item)
        elif kind == "set":
            members = [self.value(n) for n in children]
            set.clear(target)
            set.update(target, members)
        if kind == "object" or extra or getattr(type(target), "__dictoffset__", 0):
            _set_attributes(target, {name: self.value(n) for name, n in extra})


# ---------------------------------------------------------------------- what is opaque, and how it can still be told


def fingerprint(value: Any) -> int:
    """A number that changes with the contents of an opaque value, for those kinds that have contents to compare."""
    if type(value).__module__ != "numpy" or not hasattr(value, "tobytes"):
        return 0
    kind = xxhash.xxh32_intdigest(f"{value.dtype}{value.shape}".encode())
    return int(xxhash.xxh64_intdigest(value.tobytes(), seed=kind))


def is_data(value: Any) -> bool:
    """Is an opaque value plain data: NumPy arrays and numbers, dates, decimals, paths and the like?"""
    return type(value).__module__.partition(".")[0] in _VALUE_MODULES


def pickled(value: Any) -> bytes | None:
    """An opaque value as bytes, if it is plain data or can be found by its name on other ranks; else None."""
    if not is_data(value) and not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return None
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return None  # a lambda, a class inside a function


def nodes_of(root: Node, cells: Iterable[Node]) -> Iterable[Node]:
    """All nodes of a root and of the contents of cells, those of the cells' keys and attributes included."""
    stack: list[Node] = [root]
    for kind, _, children, extra in cells:
        for child in children:
            stack += child if kind == "dict" else (child,)
        stack += [node for _, node in extra]
    while stack:
        node = stack.pop()
        yield node
        if node[0] == "tuple":
            stack += node[2]
        elif node[0] in ("slice", "frozenset"):
            stack += node[1]


def type_name(value: Any) -> str:
    """The type of an opaque object in words; for functions and classes also which one."""
    cls = type(value)
    name = getattr(value, "__qualname__", "") if isinstance(value, _REFERENCES[:3]) else ""
    return f"{cls.__module__}.{cls.__qualname__}" + (f" {name}" if name else "")


@functools.lru_cache(maxsize=4096)
def _has_state(cls: type) -> bool:
    """Is the state of an instance all in its attributes?"""
    if cls.__reduce__ is types.SimpleNamespace.__reduce__:
        return True
    if cls.__module__ in ("builtins", "threading", "_thread") or cls.__reduce__ is not object.__reduce__:
        return dataclasses.is_dataclass(cls)
    return bool(getattr(cls, "__dictoffset__", 0)) or bool(_slots(cls))


# ---------------------------------------------------------------------- attributes


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[tuple[str, Any], ...]:
    """(name, descriptor) of all slots of a class."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__slots__" in base.__dict__:
            for name, member in base.__dict__.items():
                if isinstance(member, types.MemberDescriptorType):
                    found.setdefault(name, member)
    return tuple(found.items())


_ABSENT = object()


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Instance attributes in a stable order."""
    cls = type(value)
    found: list[tuple[str, Any]] = []
    if getattr(cls, "__dictoffset__", 0):
        found += object.__getattribute__(value, "__dict__").items()
    for name, member in _slots(cls):  # type: ignore[arg-type]
        try:
            found.append((name, member.__get__(value)))
        except AttributeError:
            pass  # an empty slot
    if isinstance(value, collections.defaultdict):
        found.append(("default_factory", value.default_factory))
    return found


def _set_attributes(target: Any, attributes: dict[str, Any]) -> None:
    if isinstance(target, collections.defaultdict):
        target.default_factory = attributes.pop("default_factory")
    for name, member in _slots(type(target)):  # type: ignore[arg-type]
        item = attributes.pop(name, _ABSENT)
        if item is not _ABSENT:
            member.__set__(target, item)
        else:
            try:
                member.__delete__(target)
            except AttributeError:
                pass  # empty before
    if getattr(type(target), "__dictoffset__", 0):
        own = object.__getattribute__(target, "__dict__")
        own.clear()
        own.update(attributes)


def _dict_type(value: Any) -> Any:
    """The built-in type whose __setitem__ fills `value` without running a subclass's own logic."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


# ---------------------------------------------------------------------- small values


_nans: dict[type, Any] = {}


def _constant(cls: type, value: Any) -> Node:
    if cls is torch.Size:
        return ("const", cls, tuple(value))
    if isinstance(value, float) and value != value:
        value = _nans.setdefault(cls, value)  # one object, for a number that is not equal to itself
    return ("const", cls, value)


def _make_tuple(cls: type, items: list[Any]) -> Any:
    if cls is tuple:
        return tuple(items)
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types.*: only their own constructor makes them
        return cls(items)
    return tuple.__new__(cls, items)


def _ordered(values: Any) -> list[Any]:
    """Set members in an order that is the same on every rank."""
    members = list(values)
    if len(members) > 1:
        if not all(_is_sortable(v) for v in members):
            raise UsageError(
                "a set of tensors or objects has no order that is the same on every rank",
                remedy="use a list, a tuple or a dict",
            )
        members.sort(key=lambda v: (type(v).__qualname__, repr(v)))
    return members


def _is_sortable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_sortable(v) for v in value)
    return value is None or isinstance(value, (*_CONSTANTS, type))
