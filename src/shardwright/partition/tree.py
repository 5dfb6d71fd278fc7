"""The module tree as plain data: parameter and buffer bytes, tied parameters joined.

Read once from the module; everything after it (cost, assignment, plan) works on these records only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwright.partition.records import UNTRACED, Trace

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter object. `name` is its first full name; `holders` are all modules that hold it
    directly."""

    name: str
    numel: int
    nbytes: int
    trainable: bool
    holders: tuple[str, ...]


@dataclass(frozen=True)
class ModuleNode:
    """One module object, under the first name that `named_modules()` gives it.

    parameters: indices into `ModuleTree.parameters` of those it holds directly.
    container: its forward only chains its children, or it has none (Sequential, ModuleList, ModuleDict).
    lookup: its parameters are looked up in, not multiplied with (Embedding).
    indivisible: everything below it goes where it goes; its class says so (attribute `indivisible`).
    """

    name: str
    kind: str
    parent: str | None
    children: tuple[str, ...]
    parameters: tuple[int, ...]
    buffer_bytes: int
    container: bool
    lookup: bool
    indivisible: bool = False


@dataclass(frozen=True)
class ModuleTree:
    """All modules, parents before children, in the order of `named_modules()`, with what a trace saw of
    them."""

    nodes: dict[str, ModuleNode]
    parameters: tuple[ParameterInfo, ...]
    trace: Trace = UNTRACED

    def with_trace(self, trace: Trace) -> ModuleTree:
        """The same tree, measured."""
        return replace(self, trace=trace)

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of modules joined by parameters they share, each in tree order; groups of one are left
        out."""
        groups = Groups()
        for parameter in self.parameters:
            groups.join(parameter.holders)
        order = {name: index for index, name in enumerate(self.nodes)}
        return groups.sorted_by(order)

    def welds(self) -> tuple[tuple[str, ...], ...]:
        """Each outermost indivisible module with all that is below it; those without anything below are left out."""
        members: dict[str, list[str]] = {}
        home: dict[str, str] = {}
        for name, node in self.nodes.items():
            above = home.get(node.parent) if node.parent is not None else None
            if above is None and node.indivisible:
                above = name
            if above is not None:
                home[name] = above
                members.setdefault(above, []).append(name)
        return tuple(tuple(group) for group in members.values() if len(group) > 1)

    def bearing(self) -> frozenset[str]:
        """Modules that hold a parameter, themselves or below."""
        found: set[str] = set()
        for name, node in reversed(self.nodes.items()):
            if node.parameters or any(child in found for child in node.children):
                found.add(name)
        return frozenset(found)


class Groups:
    """Disjoint groups of names that grow by joining (union-find)."""

    def __init__(self) -> None:
        self._up: dict[str, str] = {}

    def find(self, name: str) -> str:
        self._up.setdefault(name, name)
        while self._up[name] != name:
            self._up[name] = self._up[self._up[name]]
            name = self._up[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        first: str | None = None
        for name in names:
            root = self.find(name)
            if first is None:
                first = root
            elif root != first:
                self._up[root] = first

    def sorted_by(self, order: dict[str, int]) -> tuple[tuple[str, ...], ...]:
        """Groups of two or more, members and groups in the given order."""
        members: dict[str, list[str]] = {}
        for name in sorted(self._up, key=order.__getitem__):
            members.setdefault(self.find(name), []).append(name)
        return tuple(tuple(group) for group in members.values() if len(group) > 1)


def is_indivisible(module: nn.Module) -> bool:
    """Does the module's class say that its forward must run on one stage, such as one with collectives in it?"""
    return getattr(type(module), "indivisible", False) is True


def build_tree(module: nn.Module) -> ModuleTree:
    """Read a module into a `ModuleTree`.

    A module with several parents is one node, below the parent that comes first. Bytes come from shape and
    dtype, so a model on the meta device reads like any other. Nothing in the module is changed; no
    collectives.
    """
    from torch import nn

    children: dict[str, list[str]] = {name: [] for name, _ in module.named_modules()}
    parameter_index: dict[int, int] = {}
    holders: list[list[str]] = []
    facts: list[tuple[str, int, int, bool]] = []
    own: dict[str, list[int]] = {name: [] for name in children}
    buffer_bytes: dict[str, int] = {}
    seen_buffers: set[int] = set()

    for name, found in module.named_modules():
        if name:
            children[name.rpartition(".")[0]].append(name)
        for local_name, parameter in found._parameters.items():
            if parameter is None:
                continue
            index = parameter_index.get(id(parameter))
            if index is None:
                index = parameter_index[id(parameter)] = len(facts)
                full_name = f"{name}.{local_name}" if name else local_name
                numel = parameter.numel()
                facts.append((full_name, numel, numel * parameter.element_size(), parameter.requires_grad))
                holders.append([])
            if name not in holders[index]:
                holders[index].append(name)
                own[name].append(index)
        buffer_bytes[name] = 0
        for buffer in found._buffers.values():
            if buffer is not None and id(buffer) not in seen_buffers:
                seen_buffers.add(id(buffer))
                buffer_bytes[name] += buffer.numel() * buffer.element_size()

    nodes = {
        name: ModuleNode(
            name=name,
            kind=type(found).__name__,
            parent=name.rpartition(".")[0] if name else None,
            children=tuple(children[name]),
            parameters=tuple(own[name]),
            buffer_bytes=buffer_bytes[name],
            container=type(found) in (nn.Sequential, nn.ModuleList, nn.ModuleDict),
            lookup=isinstance(found, nn.Embedding | nn.EmbeddingBag),
            indivisible=is_indivisible(found),
        )
        for name, found in module.named_modules()
    }
    parameters = tuple(
        ParameterInfo(*fact, holders=tuple(names_of)) for fact, names_of in zip(facts, holders, strict=True)
    )
    return ModuleTree(nodes=nodes, parameters=parameters)


# ------------------------------------------------------------------ on disk


_FLAGS = {"c": "container", "l": "lookup", "i": "indivisible"}


def to_record(tree: ModuleTree) -> dict[str, Any]:
    """What a tree is besides sizes, as JSON values: modules as [name, kind, flags], parameters as [name, trainable, holders]."""
    return {
        "modules": [
            [node.name, node.kind, "".join(letter for letter, field in _FLAGS.items() if getattr(node, field))]
            for node in tree.nodes.values()
        ],
        "parameters": [[p.name, p.trainable, p.holders] for p in tree.parameters],
    }


def from_record(record: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]) -> ModuleTree:
    """The tree that `to_record` was given.

    sizes: elements and bytes of every tensor of the state dict by name; the tree's parameters must be in it.
    """
    parameters = tuple(
        ParameterInfo(name, *sizes[name], trainable, tuple(holders)) for name, trainable, holders in record["parameters"]
    )
    names = {name for name, _, _ in record["modules"]}
    children: dict[str, list[str]] = {name: [] for name in names}
    own: dict[str, list[int]] = {name: [] for name in names}
    buffer_bytes = dict.fromkeys(names, 0)
    for name, _, _ in record["modules"]:
        if name:
            children[name.rpartition(".")[0]].append(name)
    known = set()
    for index, parameter in enumerate(parameters):
        last = parameter.name.rpartition(".")[2]
        for holder in parameter.holders:
            own[holder].append(index)
            known.add(f"{holder}.{last}" if holder else last)
        known.add(parameter.name)
    for name, (_, num_bytes) in sizes.items():
        above = name.rpartition(".")[0]
        if name not in known and above in buffer_bytes:
            buffer_bytes[above] += num_bytes
    nodes = {
        name: ModuleNode(
            name=name,
            kind=kind,
            parent=name.rpartition(".")[0] if name else None,
            children=tuple(children[name]),
            parameters=tuple(own[name]),
            buffer_bytes=buffer_bytes[name],
            **{field: letter in flags for letter, field in _FLAGS.items()},
        )
        for name, kind, flags in record["modules"]
    }
    return ModuleTree(nodes=nodes, parameters=parameters)
