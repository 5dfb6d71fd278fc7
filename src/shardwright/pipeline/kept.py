"""What a unit keeps in attributes of its modules: an auxiliary loss, a running total, a cache.

`self.aux_loss = ...` in a forward happens on one rank; glue on every rank may read it. So tensors that a call leaves in
attributes, and in lists and other objects kept there, are results of the call: during a step every rank finds placed
tensors in those attributes. Before the module runs again, its owner puts the real ones back. Outside steps the owner
finds the real ones, and other ranks what was there before.

A unit takes up what the calls before it have left, in the order of one process. Microbatches that all run one program
never overtake each other, so a unit that each calls once is in order by itself. Where one is called several times, or
programs differ, or tensors are kept in a list or another object, of which each microbatch has its own copy, and calls
look at what was kept, a microbatch begins when those before it are through forward (see `PipelineSteps`); so do all
microbatches of the first step of a kind, in which nobody knows yet what is kept. When one leaves the program for the
first time, those after it wait for it where they come to such a unit (`Executor.stay_in_line`). If a call
comes out of order nevertheless (after backward, on a path that no microbatch took before), its owner raises. A unit
that keeps tensors and never looks at them, an auxiliary loss, runs in any order: each microbatch's glue sees its own.
Buffers and tensors inside other objects, which glue is not shown, count as well. The statistics of batch norms don't:
they are updated as microbatches come by.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.contents import HOLDS_NO_TENSOR, Contents, buffers_of, changed, contents_of, depths_of
from shardwright.pipeline.overlay import Overlay
from shardwright.pipeline.placed import PlacedTensor
from shardwright.pipeline.watch import Watch, can_be_watched
from shardwright.transport.structure import Builder, Node, Walker

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame

# Where something is kept: the number of a module among the unit's modules, and the attribute.
Place = tuple[int, str]

_ABSENT = object()


class Kept:
    """What the modules of one unit keep, on one rank.

    In order: `begin_step`; around each call on the owner `called`, `restore`, `watch` and, for a new kind of call, `look`
    and `changes`, then `reads` and `describe`; after it `show` on every rank, `remember` and `put_back` on the owner; at
    last `end_step`.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.places: set[Place] = set()
        # Those that earlier steps told: the same on all ranks at any time of a step.
        self._settled: set[Place] = set()
        # By id of a placed tensor that glue sees: it, and the real one. Only on the owner.
        self._real: dict[int, tuple[PlacedTensor, torch.Tensor]] = {}
        # What was in a place before something was kept there; and, between steps, what glue saw in it at last.
        self._original: dict[Place, Any] = {}
        self._outside: dict[Place, tuple[Any, Any]] = {}
        # On the owner: where calls changed what glue is not shown (buffers, tensors inside other objects); where they
        # looked; do they look at what they change?
        self.unseen: set[Place] = set()
        self._read: set[Place] = set()
        self._reads = False
        # The step of the last call, its latest microbatch, and whether one before that came after it.
        self._step = -1
        self._latest = -1
        self._overtaken = False

    # ------------------------------------------------------------------ around a step

    def begin_step(self, overlay: Overlay) -> None:
        """Show glue what it saw at last, unless the script has put something else there since."""
        for place, (put, seen) in self._outside.items():
            if self._get(place) is put:
                self._set(place, seen)
            else:
                self._original[place] = self._get(place)
        self._outside.clear()
        for place in self.places:
            overlay.track(self.modules[place[0]], place[1])
        self._settled = set(self.places)

    def end_step(self) -> None:
        """Give the owner real tensors, and other ranks what was there before anything was kept."""
        alive = Walker()
        for place in self.places:
            seen = self._get(place)
            if not any(type(t) is PlacedTensor for t in _tensors_in(seen, alive)):
                continue
            put = self._with_real(seen) if self._real else self._original.get(place, _ABSENT)
            self._outside[place] = (put, seen)
            self._set(place, put)
        self._real = {id(t): self._real[id(t)] for t in alive.tensors if id(t) in self._real}

    # ------------------------------------------------------------------ before a call, on every rank

    def operands(self, frame: Frame) -> list[PlacedTensor]:
        """What the call takes in besides its arguments: tensors of the microbatch that require grad, or that glue made."""
        shown = frame.told.get((id(self), "places"), ())
        told = frame.told.get(id(self), {})
        walker = Walker()
        for place in sorted(self._settled.union(shown)):
            _tensors_in(self._get(place), walker)
        found = [t for t in walker.tensors if type(t) is PlacedTensor and t._value.frame is frame]
        return [t for t in found if t._value.spec.requires_grad or told.get(t._value.id) is not t]

    # ------------------------------------------------------------------ around a call, on the owner

    def called(self, frame: Frame, name: str) -> None:
        """A call begins. Raises if it looks at what is kept and comes out of order."""
        if frame.step != self._step:
            self._step, self._latest, self._overtaken = frame.step, -1, False
        self._overtaken = self._overtaken or frame.index < self._latest
        self._latest = max(self._latest, frame.index)
        self._demand_order(frame, name, self._reads)

    def watch(self, *, new: bool) -> Watch | None:
        """What to open around a call, to find out what it looks at. new: it is of a new kind."""
        changing = self.places | self.unseen
        if self._reads or not (new or changing) or not self._can_be_watched:
            return None
        return Watch(self.modules if new else [self.modules[number] for number, _ in changing])

    @functools.cached_property
    def _can_be_watched(self) -> bool:
        return all(map(can_be_watched, self.modules))

    def reads(self, frame: Frame, name: str, watch: Watch | None, changes: Iterable[Place]) -> bool:
        """After a call that may have made these `changes`: has a call of the unit looked there?

        What the first microbatch finds missing and makes, and others only use, is no state. So only those after it tell.
        Raises if calls have looked at what they change, and came out of order.
        """
        if watch is not None:
            numbers = {id(module): number for number, module in enumerate(self.modules)}
            self._read |= {(numbers[module], key) for module, key in watch.seen if module in numbers}
        elif not self._can_be_watched:
            self._read.update(changes)
        reads = not self._read.isdisjoint(changes)
        self._demand_order(frame, name, reads)
        self._reads = self._reads or (reads and frame.is_steady)
        return self._reads

    def _demand_order(self, frame: Frame, name: str, reads: bool) -> None:
        for number, key in self.places & self._read if reads else ():
            frame.runtime.overlay.take(frame.index, self.modules[number], key)
        if self._overtaken and reads:
            raise UnsupportedOperationError(
                f"module '{name}' looks at tensors that it keeps from call to call, and was called by microbatch"
                f" {frame.index} and by one after it in another order than in one process",
                where=frame.where(name),
                remedy="call it either before model.backward() or after it, alike in all microbatches and steps; or give"
                " it what it keeps as an argument",
            )

    def restore(self, given: Mapping[int, torch.Tensor]) -> dict[Place, Any]:
        """Put real tensors where glue sees placed ones; returns what glue saw. given: the operands' by placed one's id."""
        seen = {}
        for place in self.places:
            seen[place] = self._get(place)
            self._set(place, self._with_real(seen[place], given))
        return seen

    def look(self) -> list[tuple[Contents, Contents, Contents]]:
        """What is there before a call, to find out what it changes."""
        met: set[int] = set()
        return [(contents_of(module), buffers_of(module), depths_of(module, met)) for module in self.modules]

    def changes(self, before: list[tuple[Contents, Contents, Contents]]) -> tuple[tuple[Place, ...], set[Place]]:
        """Where tensors are kept now that were not there before the call: for glue to see, and all others."""
        shown, unseen = [], set()
        for number, (module, old, now) in enumerate(zip(self.modules, before, self.look(), strict=True)):
            for name in changed(old[0], now[0]):
                walker = Walker()
                if _tensors_in(module.__dict__.get(name), walker) and not walker.opaques:
                    shown.append((number, name))
            unseen |= {(number, name) for name in changed(old[1], now[1])}
            inside = {(number, name) for name in changed(old[2], now[2])}.difference(shown)
            unseen |= inside
            self._read |= inside  # who changes an object has looked at the attribute
        self.unseen |= unseen
        return tuple(sorted(shown)), unseen

    def describe(self, frame: Frame, walker: Walker, places: Sequence[Place]) -> tuple[list[Node], bool]:
        """Nodes of what is in these places; and whether it is more than single tensors, so that it must be told.

        A tensor that this microbatch kept before, in a list to which the call has added, is numbered by its value's id.
        """
        values = [self._get(place) for place in places]
        single = {i: walker.describe(v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
        for placed, real in self._real.values():
            if placed._value.frame is frame:
                walker.alias(real, -1 - placed._value.id)
        return [single.get(i) or walker.describe(v) for i, v in enumerate(values)], len(single) < len(places)

    def remember(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Which real tensors are behind placed ones."""
        for placed, real in pairs:
            if type(placed) is PlacedTensor:
                self._real[id(placed)] = (placed, real)

    def put_back(self, seen: dict[Place, Any], but: Iterable[Place]) -> None:
        """Let glue see again what it saw before the call, `but` what the call changed."""
        for place in seen.keys() - set(but):
            self._set(place, seen[place])

    # ------------------------------------------------------------------ after a call, on every rank

    def show(self, frame: Frame, place: Place, node: Node, builder: Builder) -> None:
        """Let the microbatch's glue find placed tensors in a place."""
        if place not in self.places:
            self.places.add(place)
            self._original[place] = self._get(place)
        frame.told.setdefault((id(self), "places"), set()).add(place)
        module, name = self.modules[place[0]], place[1]
        frame.runtime.overlay.assign(frame.index, module, name, builder.value(node), _set_plainly)

    # ------------------------------------------------------------------

    def _with_real(self, value: Any, given: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Any:
        """The same with real tensors, in containers of its own."""
        walker = Walker()
        tensors = [self._real_of(t, given) for t in _tensors_in(value, walker)]
        if all(real is t for real, t in zip(tensors, walker.tensors, strict=True)):
            return value
        root = walker.describe(value)
        return Builder(tensors, (), walker.contents, dict(enumerate(walker.opaques))).value(root)

    def _real_of(self, tensor: torch.Tensor, given: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The tensor behind a placed one; itself if it is none, or not here."""
        real = given.get(id(tensor))
        if real is not None or type(tensor) is not PlacedTensor:
            return tensor if real is None else real
        if id(tensor) in self._real:
            return self._real[id(tensor)][1]
        value = tensor._value  # made by glue: without gradient, where it is here, its number is enough
        return tensor if value.tensor is None or value.spec.requires_grad else value.tensor

    def _get(self, place: Place) -> Any:
        return self.modules[place[0]].__dict__.get(place[1], _ABSENT)

    def _set(self, place: Place, value: Any) -> None:
        if value is _ABSENT:
            self.modules[place[0]].__dict__.pop(place[1], None)
        else:
            self.modules[place[0]].__dict__[place[1]] = value


def _set_plainly(module: nn.Module, name: str, value: Any) -> None:
    module.__dict__[name] = value


class Numbered:
    """Tensors of a call by number; below zero, those that its microbatch kept before, by their values' ids."""

    def __init__(self, tensors: Sequence[Any], kept: Mapping[int, Any]) -> None:
        self._tensors = tensors
        self._kept = kept

    def __getitem__(self, number: int) -> Any:
        return self._tensors[number] if number >= 0 else self._kept[-1 - number]


def _tensors_in(value: Any, walker: Walker) -> list[torch.Tensor]:
    if value is _ABSENT or isinstance(value, HOLDS_NO_TENSOR):
        return []
    known = len(walker.tensors)
    walker.describe(value)
    return walker.tensors[known:]
