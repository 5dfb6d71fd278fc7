"""One call of a unit: its way over the border, and back.

Everything that crosses goes through `transport.structure`: nested arguments and results, and mutable objects among the
arguments (a key-value cache), which are read again after the call and written back alike on all ranks. Objects that
hooks inside units write to are arguments too (`runtime.ambient`).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import PipelineError, UnsupportedOperationError
from shardwright.log import get_logger, once
from shardwright.pipeline import aliasing, derive
from shardwright.pipeline.contents import changed, contents_of
from shardwright.pipeline.glue import choose_rank
from shardwright.pipeline.kept import Numbered, Place
from shardwright.pipeline.operands import lifted
from shardwright.pipeline.placed import PlacedTensor, Value
from shardwright.pipeline.runtime import ambient
from shardwright.pipeline.spec import Spec, ambient_key, spec_of, wire_stride
from shardwright.pipeline.spec_cache import Key, UnitOutcome, View, tells_data
from shardwright.pipeline.tripwire import Tripwires
from shardwright.topology import rng
from shardwright.transport.structure import Builder, Node, Walker, fingerprint, nodes_of, pickled, type_name

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame
    from shardwright.pipeline.unit import Unit

_log = get_logger(__name__)
_MANY_PARTS = 5000


class Crossing:
    """One call on its way. `is_needed` False: nothing in it is placed, every rank may run it for itself."""

    def __init__(self, frame: Frame, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = frame.runtime.own
        walker = Walker(lambda value: id(value) in own) if own else Walker()
        describe = walker.describe
        parts = [describe(a) for a in args]
        parts += [describe(v) for v in kwargs.values()]
        self.root: Node = ("tuple", tuple, tuple(parts))
        for read in ambient:
            collector = read()
            if collector is not None:
                describe(collector)
        first_kept = len(walker.tensors)
        for tensor in unit.kept.operands(frame) if unit.kept.places else ():
            describe(tensor)
        self.kept = range(first_kept, len(walker.tensors))
        self.frame = frame
        self.unit = unit
        self.keywords = tuple(kwargs)
        self.walker = walker
        self.contents = tuple(walker.contents)
        with torch._C.DisableTorchFunction():
            self.originals: list[Any] = [lifted(frame, t) for t in walker.tensors]
        self.operands = [i for i, t in enumerate(self.originals) if type(t) is PlacedTensor]
        self.values: list[Value] = [aliasing.resolve(frame, self.originals[i]) for i in self.operands]
        self.owner = unit.owner if unit.has_state or not self.values else choose_rank(self.values)
        self.result: Any = None
        self.made: Walker | None = None
        self.seen: dict[Place, Any] = {}
        if len(walker.cells) > _MANY_PARTS:
            once(
                _log,
                logging.WARNING,
                "the arguments of module '%s' hold thousands of objects, which are looked through at every call; pass"
                " the module what it needs",
                unit.name,
            )

    @property
    def is_needed(self) -> bool:
        return bool(self.operands or self.unit.has_state or self.walker.cells)

    def run(self, native: Callable[..., Any]) -> Any:
        """Run the call on its owner; elsewhere find or hear what comes out. Returns its result, on every rank."""
        frame, unit = self.frame, self.unit
        if unit.name in frame.runtime.readers:
            frame.stay_in_line()
        key = self._key()
        known, once = unit.cache.known(key, frame) if not unit.dynamic else (None, False)
        if known is not None and known.unused:
            self._leave_out(known.unused)
        for value in self.values:
            frame.fetch(value, self.owner)
        leaves = None
        if frame.rank == self.owner:
            outcome, leaves = self._run_here(native, known)
            if known is None:
                self._announce(outcome, once)
            elif not outcome.agrees_with(known):
                raise PipelineError(
                    f"module '{unit.name}' returned {outcome} where the same kind of call returned {known} before",
                    where=frame.where(unit.name),
                    remedy="mark it with smp.dynamic_shapes(module)",
                )
        else:
            outcome = known if known is not None else frame.announce(self.owner, None, once=once)
        if known is not None:
            outcome = known
        else:
            self._leave_out(outcome.unused)
            if outcome.reads:
                in_objects = any(node[0] != "tensor" for node in outcome.root[2][1:])
                readers = frame.runtime.new_readers
                readers[unit.name] = readers.get(unit.name, False) or in_objects
            if not unit.dynamic:
                unit.cache.told(key, frame, outcome)
        return self._settle(outcome, leaves)

    def _leave_out(self, unused: frozenset[int]) -> list[int]:
        """Take arguments that nobody looks at from the operands; returns the positions of those that stay."""
        kept = [k for k, number in enumerate(self.operands) if number not in unused]
        if len(kept) < len(self.operands):
            self.operands = [self.operands[k] for k in kept]
            self.values = [self.values[k] for k in kept]
        return kept

    def _key(self) -> Any:
        unit = self.unit
        with torch._C.DisableTorchFunction():
            specs = tuple([v._value.spec if type(v) is PlacedTensor else (spec_of(v),) for v in self.originals])
            return Key((self.root, self.keywords, self.contents, specs, unit.mode, ambient_key(self.frame.device.type),
                    self.frame.checkpointing > 0))  # fmt: skip

    def _announce(self, outcome: UnitOutcome, once: bool) -> None:
        try:
            pickle.dumps(outcome)
        except Exception as error:
            raise UnsupportedOperationError(
                f"module '{self.unit.name}' returned something that can't be told to other ranks: {error}",
                where=self.frame.where(self.unit.name),
                remedy="define the classes and keys that it returns at the top level of a module",
            ) from error
        self.frame.announce(self.owner, outcome, once=once)

    # ------------------------------------------------------------------ on the owner

    def _run_here(self, native: Callable[..., Any], known: UnitOutcome | None) -> tuple[UnitOutcome, Any]:
        """Run the module on real tensors; describe what came back."""
        frame, unit = self.frame, self.unit
        cautious = known is None
        copied = set() if known is None else {number for number, _ in known.mutated}
        given: list[Any] = list(self.originals)
        versions: dict[int, int] = {}
        before: tuple[Any, ...] = ()
        wires = Tripwires(self._only_in_objects()) if cautious else None
        watch = unit.kept.watch(new=cautious)

        def call(leaves: list[torch.Tensor]) -> Any:
            nonlocal before
            with torch._C.DisableTorchFunction():
                for number, leaf in zip(self.operands, leaves, strict=True):
                    given[number] = leaf.clone() if cautious or number in copied else leaf
                for number, tensor in enumerate(given):
                    if type(tensor) is not PlacedTensor and not tensor.is_inference():
                        versions[number] = tensor._version
                if wires is not None:
                    wires.set(given)
            unit.kept.called(frame, unit.name)
            if unit.kept.places:
                self.seen = unit.kept.restore({id(self.originals[n]): given[n] for n in self.kept})
            parts = self._rebuild(given)
            if cautious:
                before = self._look()
            num_args = len(parts) - len(self.keywords)
            run = unit.recomputed(native, within=frame.checkpointing > 0) if torch.is_grad_enabled() else native
            keywords = dict(zip(self.keywords, parts[num_args:], strict=True))
            if watch is None:
                return run(*parts[:num_args], **keywords)
            with watch:
                return run(*parts[:num_args], **keywords)

        self.result, leaves = frame.run_here(call, self.values, rng.forked)
        if unit.buffers:
            unit.runtime.refresh_buffers(unit.buffers)
        with torch._C.DisableTorchFunction():
            places, unseen = (known.kept, unit.kept.unseen) if known is not None else self._changes(before)
            reads = unit.kept.reads(frame, unit.name, watch, unseen.union(places))
            outcome = self._describe(given, versions, leaves, wires, places, known, reads)
        return outcome, leaves

    def _look(self) -> tuple[Any, ...]:
        """What the call might change besides its arguments: attributes of its modules, objects of this rank's own."""
        own = [v for v in self.walker.opaques if id(v) in self.frame.runtime.own and not isinstance(v, torch.nn.Module)]
        with torch._C.DisableTorchFunction():
            return self.unit.kept.look(), [(v, contents_of(v)) for v in own]

    def _changes(self, before: tuple[Any, ...]) -> tuple[tuple[Place, ...], set[Place]]:
        in_modules, own = before
        for thing, old in own:
            if changed(old, contents_of(thing)):
                raise UnsupportedOperationError(
                    f"module '{self.unit.name}' changed an object of type {type_name(thing)} that each rank has for"
                    " itself",
                    where=self.frame.where(self.unit.name),
                    remedy="return what it found out, or put it into a list or dict made in the step function",
                )
        return self.unit.kept.changes(in_modules)

    def _rebuild(self, given: list[Any]) -> Any:
        """The arguments around real tensors; objects among them hold real tensors until they are written back."""
        if not self.contents:
            return _flat(self.root, given, self.walker.opaques)
        inside = Builder(given, self.walker.cells, self.contents, dict(enumerate(self.walker.opaques)))
        for number, tensors in enumerate(self.walker.tensors_in):
            if any(given[n] is not self.originals[n] for n in tensors):
                inside.write(number)
        return inside.value(self.root)

    def _only_in_objects(self) -> list[int]:
        """Operands from other ranks that come along in an object and are no arguments themselves."""
        if not self.contents:
            return []
        direct = {node[1] for node in nodes_of(self.root, ()) if node[0] == "tensor"}
        pairs = zip(self.operands, self.values, strict=True)
        return [n for n, v in pairs if n not in direct and v.holder != self.owner]

    def _describe(
        self,
        given: list[Any],
        versions: dict[int, int],
        leaves: list[torch.Tensor],
        wires: Tripwires | None,
        places: tuple[Place, ...],
        known: UnitOutcome | None,
        reads: bool,
    ) -> UnitOutcome:
        """The outcome of the run that returned `self.result`."""
        before = self.walker
        made = self.made = Walker()
        unused: frozenset[int] = frozenset()
        if wires is not None:
            unused = wires.untouched(given)
            wires.remove(given, made)
            leaves[:] = [leaves[k] for k in self._leave_out(unused)]
        made.adopt(given, before.cells, before.opaques)
        made.reread()
        result = made.describe(self.result)
        kept, volatile = self.unit.kept.describe(self.frame, made, places) if places else ([], False)
        root: Node = ("tuple", tuple, (result, *kept))
        num_cells, num_given = len(before.cells), len(given)
        altered = tuple(i for i in range(num_cells) if made.contents[i] != self.contents[i])
        mutated = []
        for number, version in versions.items():
            if given[number]._version != version and number not in unused:
                mutated.append((number, len(made.tensors)))
                made.tensors.append(given[number])
        self._check_opaques()
        specs: list[Spec] = []
        views: list[View | None] = []
        for tensor in made.tensors[num_given:]:
            self._check_layout(tensor)
            specs.append(spec_of(tensor))
            views.append(_view_of(tensor, made.tensors[: num_given + len(views)]))
        for _, new in mutated:
            views[new - num_given] = None
        # Backward notices if a later call of this kind depends on something else (see `tape`).
        depends = known.depends if known is not None else tuple(
            derive.reached_leaves(t, leaves) for t in made.tensors[num_given:]
        )  # fmt: skip
        return UnitOutcome(
            root, places, tuple(made.contents), num_cells, altered, tuple(specs), tuple(views), depends, tuple(mutated),
            unused, self._told_opaques(), volatile or tells_data(root, self.contents, tuple(made.contents)), reads,
        )  # fmt: skip

    def _check_layout(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            raise UnsupportedOperationError(
                f"module '{self.unit.name}' returned a tensor of layout {tensor.layout}",
                where=self.frame.where(self.unit.name),
                remedy="return dense tensors from modules, .to_dense() where needed",
            )

    def _check_opaques(self) -> None:
        """An opaque argument with contents (a NumPy array) can't be changed in a way that other ranks see."""
        for node in nodes_of(self.root, self.contents):
            if node[0] == "opaque" and node[3] and fingerprint(self.walker.opaques[node[2]]) != node[3]:
                raise UnsupportedOperationError(
                    f"module '{self.unit.name}' changed an argument of type {node[1]} in place, which can't be seen on"
                    " other ranks",
                    where=self.frame.where(self.unit.name),
                    remedy="use tensors, or change a copy",
                )

    def _told_opaques(self) -> tuple[tuple[int, bytes], ...]:
        assert self.made is not None
        told = []
        for number, value in enumerate(self.made.opaques[len(self.walker.opaques) :], len(self.walker.opaques)):
            data = pickled(value)
            if data is None:
                raise UnsupportedOperationError(
                    f"module '{self.unit.name}' returned an object of type {type_name(value)}, which can't be seen on"
                    " other ranks",
                    where=self.frame.where(self.unit.name),
                    remedy="return tensors in tuples, lists, dicts, dataclasses or objects with attributes",
                )
            told.append((number, data))
        return tuple(told)

    # ------------------------------------------------------------------ on every rank

    def _settle(self, outcome: UnitOutcome, leaves: Any) -> Any:
        """Record the call, and put placed tensors where its results and changes are."""
        frame, unit, before = self.frame, self.unit, self.walker
        num_given = len(self.originals)
        results = None if self.made is None else self.made.tensors[num_given:]
        recorded = frame.record(
            unit.name, self.owner, self.values, outcome.specs, outcome.depends, results, leaves, unit
        )  # fmt: skip
        tensors: list[Any] = [*self.originals, *map(PlacedTensor.of, recorded)]
        for number, new in outcome.mutated:
            _change(before.tensors[number], tensors[new])
        for number, view in enumerate(outcome.views, num_given):
            if view is not None:
                _link(tensors[number], tensors[view.of], view, unit.name)
        opaques = dict(enumerate(before.opaques))
        if self.made is not None:
            opaques |= dict(enumerate(self.made.opaques))
            cells = self.made.cells
            real, first = self.made.tensors, len(before.cells)
            stale = [
                i for i, inside in enumerate(self.made.tensors_in)
                if i in outcome.changed or i >= first or any(real[n] is not tensors[n] for n in inside if n >= 0)
            ]  # fmt: skip
        else:
            opaques |= {number: pickle.loads(data) for number, data in outcome.opaques}
            cells = before.cells
            stale = list(outcome.changed)
        for buffer in unit.registered_buffers:
            frame.forget_leaf(buffer)
        known: dict[int, Any] = frame.told.setdefault(id(unit.kept), {}) if outcome.kept else {}
        if outcome.contents:
            builder = Builder(Numbered(tensors, known), cells, outcome.contents, opaques)
            for number in stale:
                builder.write(number)
            result = builder.value(outcome.root[2][0])
        else:
            result = _flat(outcome.root[2][0], tensors, opaques)
        if outcome.kept or self.seen:
            self._keep(outcome, tensors, opaques, known)
        return result

    def _keep(
        self, outcome: UnitOutcome, tensors: list[Any], opaques: dict[int, Any], known: dict[int, Any]
    ) -> None:
        """Let glue find placed tensors in the attributes where the call left real ones. known: those of before."""
        kept, frame = self.unit.kept, self.frame
        builder = Builder(Numbered(tensors, known), self.walker.cells, outcome.contents, opaques)
        for place, node in zip(outcome.kept, outcome.root[2][1:], strict=True):
            kept.show(frame, place, node, builder)
        known.update({t._value.id: t for t in tensors if type(t) is PlacedTensor})
        if self.made is not None:
            kept.remember(zip(tensors, self.made.tensors, strict=True))
            kept.put_back(self.seen, outcome.kept)


def _change(target: Any, fresh: PlacedTensor) -> None:
    """A call changed an argument's values in place."""
    if type(target) is PlacedTensor and target._parent is None and target._untracked is None:
        target._value = fresh._value
        target._version_count += 1
    else:
        torch.Tensor.copy_(target, fresh)  # glue knows what else shares its memory, or refuses


def _flat(node: Node, tensors: Any, opaques: Any) -> Any:
    """The value of a node without cells: the common case, without a builder."""
    kind = node[0]
    if kind == "tensor":
        return tensors[node[1]]
    if kind == "tuple" and node[1] is tuple:
        return tuple([_flat(n, tensors, opaques) for n in node[2]])
    if kind == "none":
        return None
    opaques = opaques if isinstance(opaques, dict) else dict(enumerate(opaques))
    return Builder(tensors, (), (), opaques).value(node)


def _view_of(tensor: torch.Tensor, others: list[torch.Tensor]) -> View | None:
    """Whose memory `tensor` shares: the first of `others`."""
    storage = tensor.untyped_storage()._cdata
    for number, other in enumerate(others):
        if type(other) is PlacedTensor or other.layout != torch.strided:
            continue
        if other.untyped_storage()._cdata == storage:
            return View(number, int(tensor.storage_offset()) - int(other.storage_offset()))
    return None


def _link(tensor: PlacedTensor, base: Any, view: View, name: str) -> None:
    """Let in-place changes of `tensor` and of the tensor whose memory it shares follow each other, or be refused."""
    spec = tensor._value.spec
    if spec.numel == 0:
        return
    if type(base) is PlacedTensor and _covers(base._value.spec, spec, view.offset):
        size, stride, expected = spec.shape, spec.stride, base._value.spec.stride

        def make(real: Any) -> Any:
            if real.stride() != expected:
                raise UnsupportedOperationError(
                    f"in-place change of memory that module '{name}' returned a view of, in another layout",
                    remedy="clone() what the module returned",
                )
            return real.as_strided(size, stride, real.storage_offset() + view.offset)

        key = ("as_strided", size, stride, expected, view.offset)
        aliasing.link_view(tensor, base, make, key, torch.is_grad_enabled())
        return
    tensor._untracked = f"module '{name}' returned memory that others use"
    if type(base) is PlacedTensor:
        aliasing.cannot_follow(base, f"module '{name}' returned memory of it")


def _covers(base: Any, view: Any, offset: int) -> bool:
    """Does the memory of a dense tensor hold all elements of a view of it?"""
    if base.dtype != view.dtype or wire_stride(base) != base.stride or offset < 0:
        return False
    last = offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    return bool(last < base.numel)
