"""What the assignment works on: modules that do work, in execution order, ties folded into one place.

A *holder* is a module with work of its own that can't be divided: it holds parameters directly, or something
below it does that never ran by itself. Every other module that ran is a chain of holders.

Modules joined by a tie are one: the first to run is the *anchor*, carries the cost of all, and the others go
where it goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.partition.cost import Prices, execution_key
from shardwright.partition.tree import Groups, ModuleTree

TEAR = 0.02
"""Cost of starting a stage inside a module, as a part of an ideal stage: once for the
outermost module torn, twice more for the next within it, and so on, since what is torn runs piece by piece. A
module that costs more than an ideal stage must be torn anyway, and a container is no more than its children:
both are free."""

DETOUR = 0.05
"""Cost of going to a stage once more than needed, as a part of an ideal stage: the pipeline waits for it."""


@dataclass(frozen=True)
class Outline:
    """The part of the tree that is assigned; everything else follows (see `assign.complete`).

    order: modules that ran and aren't empty after tying, parents first, in execution order.
    children: of each, those in `order`.   own: cost of each without its descendants.   total: with them.
    holders: those of `order` that hold work themselves.   anchors: tied module -> where it goes.
    """

    order: tuple[str, ...]
    parent: dict[str, str | None]
    children: dict[str, tuple[str, ...]]
    own: dict[str, float]
    total: dict[str, float]
    holders: frozenset[str]
    anchors: dict[str, str]


@dataclass(frozen=True)
class Piece:
    """One holder with the ancestors that begin with it: the smallest thing a stage can consist of.

    entry: the module that a stage which begins here takes over first. entry_cost: what beginning here costs
    more than at the cheapest place.
    """

    entry: str
    modules: tuple[str, ...]
    cost: float
    entry_cost: float


def outline(tree: ModuleTree, prices: Prices, *, join_ties: bool) -> Outline:
    """Fold ties and whatever never ran into the modules that did."""
    keys = execution_key(tree)
    keys.setdefault("", (0, 0))
    anchors = _anchors(tree, keys, join_ties)
    own = dict.fromkeys(keys, 0.0)
    holders: set[str] = set()
    for name, node in tree.nodes.items():
        host = _host(tree, name, keys, anchors)
        own[host] += prices.own[name]
        if node.parameters:
            holders.add(host)
    useful: set[str] = {""}
    for name in holders:
        while name and name not in useful:
            useful.add(name)
            name = tree.nodes[name].parent or ""
    children = {
        name: tuple(sorted((c for c in tree.nodes[name].children if c in useful), key=keys.__getitem__))
        for name in useful
    }
    order = _preorder(children)
    total = {name: own[name] for name in order}
    for name in reversed(order):
        for child in children[name]:
            total[name] += total[child]
    return Outline(
        order=order,
        parent={name: tree.nodes[name].parent for name in order},
        children=children,
        own=own,
        total=total,
        holders=frozenset(holders),
        anchors=anchors,
    )


def pieces(tree: ModuleTree, out: Outline, prices: Prices, num_stages: int) -> list[Piece]:
    """Cut the outline into its smallest pieces, in execution order, and price a cut before each.

    A cut inside a module that is called several times is crossed as often, there and back.
    """
    records = tree.trace.records
    ideal = 1.0 / num_stages
    found: list[Piece] = []
    pending: list[str] = []
    for name in out.order:
        pending.append(name)
        if name not in out.holders:
            continue
        torn, visits, above = 0, 1, out.parent[pending[0]]
        while above is not None:
            if not tree.nodes[above].container and out.total[above] <= ideal:
                torn += 1
            if above in records:
                visits = max(visits, records[above].num_calls)
            above = out.parent[above]
        crossing = next((prices.crossing[m] for m in pending if m in prices.crossing), 0.0)
        found.append(
            Piece(
                entry=pending[0],
                modules=tuple(pending),
                cost=sum(out.own[member] for member in pending),
                entry_cost=visits * (TEAR * ideal * torn * (torn + 1) / 2 + crossing)
                + 2 * (visits - 1) * DETOUR * ideal,
            )
        )
        pending = []
    least = min((piece.entry_cost for piece in found[1:]), default=0.0)
    found = [replace(piece, entry_cost=max(0.0, piece.entry_cost - least)) for piece in found]
    if pending:  # a model without parameters
        found.append(Piece(entry=pending[0], modules=tuple(pending), cost=0.0, entry_cost=0.0))
    return found


def _anchors(tree: ModuleTree, keys: dict[str, tuple[int, int]], join_ties: bool) -> dict[str, str]:
    """Tied modules other than the first to run -> the first.

    Ties are shared and borrowed parameters, and being part of one indivisible module.
    """
    groups = Groups()
    for group in tree.welds():
        if any(tree.nodes[name].parameters for name in group):  # the others follow their parents anyway
            groups.join(group)
    if join_ties:
        for group in tree.ties():
            groups.join(group)
    for user, holder in tree.trace.borrowed:
        if not any(child in keys for child in tree.nodes[user].children):
            groups.join((user, holder))
    anchors: dict[str, str] = {}
    idle: list[tuple[str, ...]] = []
    for group in groups.sorted_by({name: index for index, name in enumerate(tree.nodes)}):
        first = min((name for name in group if name in keys), key=keys.__getitem__, default=None)
        if first is None:
            idle.append(group)
        else:
            anchors.update({name: first for name in group if name != first})
    for group in idle:  # none of them ran: all go where the first would
        host = _host(tree, group[0], keys, anchors)
        anchors.update(dict.fromkeys(group, host))
    return anchors


def _host(tree: ModuleTree, name: str, keys: dict[str, tuple[int, int]], anchors: dict[str, str]) -> str:
    """Where a module counts: it or its nearest ancestor that ran, or the anchor of that."""
    while name not in keys and name not in anchors:
        name = tree.nodes[name].parent or ""
    return anchors.get(name, name)


def _preorder(children: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    order: list[str] = []
    stack = [""]
    while stack:
        name = stack.pop()
        order.append(name)
        stack.extend(reversed(children[name]))
    return tuple(order)
