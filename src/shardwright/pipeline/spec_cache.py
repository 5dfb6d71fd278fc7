"""What comes out of a unit, before it is computed: outcomes by kind of call, alike on all ranks.

Its owner tells an outcome the first time that a kind of call appears. What a microbatch may take for known must not
depend on how far the others have come, since that differs between ranks: it is what earlier steps told, and what this
microbatch was told itself. News of a step is learned when the step has ended well on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwright.pipeline.kept import Place
from shardwright.pipeline.spec import Spec
from shardwright.transport.structure import Node, nodes_of

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame
    from shardwright.pipeline.runtime import Runtime

_MOST_KINDS = 256
"""Kinds of calls remembered per unit; an argument that counts steps would make a new one each time."""


@dataclass(frozen=True)
class View:
    """Where a result lies in memory that it shares: elements after the start of tensor `of`, in numbers of a call."""

    of: int
    offset: int


@dataclass(frozen=True)
class UnitOutcome:
    """What one call of a unit returns and changes. Tensors are numbered: arguments first, then new ones.

    root: a tuple of the result and of what the call left in attributes of its modules, at the places `kept`.
    contents: of all cells after the call; the first `num_cells` were arguments.
    changed: cells among the arguments that the call changed.
    specs, views, depends: per new tensor; `views` says whose memory it shares (None: its own), `depends` which operands
        its gradient reaches.
    mutated: (argument tensor, new tensor) where the call changed an argument's values in place.
    unused: argument tensors that came along in an object and were not looked at.
    opaques: (number, pickled) of values that have no description but can be told.
    reads: the call, or one before it, has looked at what is kept; where it keeps nothing, nobody asks.
    volatile: it tells Python values that may depend on data, so every call is announced.
    """

    root: Node
    kept: tuple[Place, ...]
    contents: tuple[Node, ...]
    num_cells: int
    changed: tuple[int, ...]
    specs: tuple[Spec, ...]
    views: tuple[View | None, ...]
    depends: tuple[tuple[int, ...], ...]
    mutated: tuple[tuple[int, int], ...]
    unused: frozenset[int]
    opaques: tuple[tuple[int, bytes], ...]
    volatile: bool
    reads: bool = False

    def agrees_with(self, known: UnitOutcome) -> bool:
        """Is it the same to other ranks? Strides may differ: they follow from how the arguments came."""
        return (
            self.root == known.root
            and self.kept == known.kept
            and self.contents == known.contents
            and self.changed == known.changed
            and self.mutated == known.mutated
            and len(self.specs) == len(known.specs)
            and all(
                a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
                for a, b in zip(self.specs, known.specs, strict=True)
            )
        )

    def __str__(self) -> str:
        words = [str(spec) for spec in self.specs]
        words += [repr(n[2]) for n in nodes_of(self.root, ()) if n[0] == "const"]
        words += [f"a change of {len(self.changed)} object(s)"] if self.changed else []
        return ", ".join(words) or "nothing new"


class Key:
    """What decides the outcome of a call; its hash is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._hash == other._hash and self._parts == other._parts


class SpecCache:
    """The outcomes of one unit that are known, by key; see the module's note for who may know what when."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[Any, UnitOutcome] = {}

    def known(self, key: Any, frame: Frame) -> tuple[UnitOutcome | None, bool]:
        """The outcome of this kind of call, or None if its owner announces it now; the same on all ranks.

        And whether no step before this one has seen it: then the next one won't announce it again.
        """
        found = self._known.get(key)
        is_new = found is None
        if is_new:
            found = frame.told.get((id(self), key))
        return None if found is None or found.volatile else found, is_new

    def told(self, key: Any, frame: Frame, outcome: UnitOutcome) -> None:
        """A call was announced in this microbatch."""
        frame.told[(id(self), key)] = outcome
        if key not in self._known:
            self._runtime.news.append((self, key, outcome))

    def learn(self, news: dict[Any, UnitOutcome]) -> None:
        """Keep all that one step told; the same on all ranks, whatever order it came in."""
        self._known |= news
        if len(self._known) > _MOST_KINDS:
            self._known = news

    def clear(self) -> None:
        """Forget all, on every rank at the same point: the module was changed."""
        self._known = {}


structural: list[Callable[[type], bool]] = []


def register_structural(test: Callable[[type], bool]) -> None:
    """Name classes of objects whose Python values follow from the shapes of calls (a key-value cache), not from data.

    Changes of them are remembered like shapes; should they differ one day, the owner notices and raises.
    """
    structural.append(test)


def tells_data(root: Node, before: tuple[Node, ...], after: tuple[Node, ...]) -> bool:
    """Do the result or changed objects hold Python values that may depend on data?

    before, after: contents of cells; those of arguments come first in both.
    """
    if any(_may_be_data(node) for node in nodes_of(root, ())):
        return True
    for number, content in enumerate(after):
        kind, cls, children, extra = content
        if any(test(cls) for test in structural):
            continue
        old = before[number] if number < len(before) else (kind, cls, (), ())
        if content == old:
            continue
        parts = [*(children if kind == "dict" else enumerate(children)), *extra]
        known = dict([*(old[2] if kind == "dict" else enumerate(old[2])), *old[3]])
        for name, node in parts:
            is_news = kind == "set" or known.get(name) != node
            if is_news and any(_may_be_data(n) for n in nodes_of(node, ())):
                return True
            if kind == "dict" and name not in known and name[0] == "const" and name[1] is not str:
                return True
    return False


_NEVER_DATA = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _may_be_data(node: Node) -> bool:
    if node[0] == "opaque":
        return node[3] != 0
    return node[0] == "const" and node[1] not in _NEVER_DATA
