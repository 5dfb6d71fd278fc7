"""How a module runs on its owner and elsewhere.

A unit is a module whose whole subtree one stage owns. Its border is its outermost `__call__`, hooks included. On
the owner it runs natively, on detached real tensors; elsewhere the call only yields placed tensors, whose specs
the owner announces once per key and never guesses.

Everything that crosses the border goes through `transport.structure`: nested arguments and results, and mutable
objects among the arguments (a key-value cache), which are read again after the call and written back alike on all
ranks. Objects that hooks inside units write to are arguments too (`runtime.ambient`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn

from shardwright.errors import PipelineError, UnsupportedOperationError, UsageError
from shardwright.pipeline import aliasing, derive
from shardwright.pipeline.glue import choose_rank
from shardwright.pipeline.operands import lifted
from shardwright.pipeline.placed import PlacedTensor, Value, current_frame
from shardwright.pipeline.runtime import Registered, Runtime, ambient, harmless_hooks
from shardwright.pipeline.spec import Spec, ambient_key, spec_of
from shardwright.topology import rng
from shardwright.transport.structure import Builder, Node, Skeleton, Walker

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame


@dataclass(frozen=True)
class UnitOutcome:
    """What one call of a unit returns and changes. Tensors are numbered: arguments first, then new ones.

    root: the result.   contents: of all cells after the call; the first `num_cells` were arguments.
    changed: cells among the arguments that the call changed.
    specs, alias, depends: per new tensor; alias names the argument tensor whose memory it shares.
    mutated: (argument tensor, new tensor) where the call changed an argument's values in place.
    volatile: it returned Python values, so every call is announced.
    """

    root: Node
    contents: tuple[Node, ...]
    num_cells: int
    changed: tuple[int, ...]
    specs: tuple[Spec, ...]
    alias: tuple[int | None, ...]
    depends: tuple[tuple[int, ...], ...]
    mutated: tuple[tuple[int, int], ...]
    volatile: bool


_DYNAMIC = "_shardwright_dynamic_shapes"


def mark_dynamic(module: nn.Module) -> None:
    """Let the owner of a module announce its results at every call."""
    module.__dict__[_DYNAMIC] = True


class Unit:
    """The border of one module: stands in front of its `__call__`."""

    def __init__(self, runtime: Runtime, name: str, module: nn.Module, owner: int) -> None:
        self.runtime = runtime
        self.name = name
        self.module = module
        self.owner = owner
        self.outcomes: dict[Any, UnitOutcome] = {}
        self.being_told: dict[Any, Frame] = {}
        self._call: Callable[..., Any] = module._compiled_call_impl or module._call_impl

    @property
    def dynamic(self) -> bool:
        """Was it marked with `smp.dynamic_shapes`?"""
        return _DYNAMIC in self.module.__dict__

    @functools.cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(self.module.parameters())

    @functools.cached_property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)

    @functools.cached_property
    def tied(self) -> tuple[nn.Parameter, ...]:
        """Trainable parameters that modules outside may use as well."""
        return tuple(p for p in self.trainable if id(p) in self.runtime.tied)

    @functools.cached_property
    def buffers(self) -> list[tuple[str, nn.Module, str]]:
        """(full name, module, key) of every buffer inside."""
        return [
            (f"{path}.{key}" if path else key, m, key)
            for path, m in self.module.named_modules(prefix=self.name)
            for key in m._buffers
        ]

    @functools.cached_property
    def registered_buffers(self) -> list[Registered]:
        """What glue knows of the buffers inside."""
        names = {name for name, _, _ in self.buffers}
        return [r for r in self.runtime.registered.values() if r.is_buffer and r.name in names]

    @functools.cached_property
    def has_state(self) -> bool:
        """Does it hold parameters or buffers? If not, a call runs where its data is."""
        return bool(self.parameters or self.buffers)

    @functools.cached_property
    def _inner(self) -> list[dict[str, Any]]:
        return [m.__dict__ for m in self.module.modules() if m is not self.module]

    def install(self) -> None:
        self.module._compiled_call_impl = self
        self.runtime.units.append(self)

    def remove(self) -> None:
        self.module._compiled_call_impl = None
        if self.module.__dict__.get("forward") is not None and isinstance(self.module.forward, _ForwardBorder):
            del self.module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()
        if frame is None:
            self._demand_owner()
            return self._call(*args, **kwargs)
        for hooks in self._inner:
            if _is_hooked(hooks):
                return self._run_as_glue(args, kwargs)
        if _is_hooked(self.module.__dict__):
            return self._run_with_hooks(args, kwargs)
        return call_unit(frame, self, self._call, args, kwargs)

    def _demand_owner(self) -> None:
        if self.runtime.rank != self.owner:
            raise UsageError(
                f"module '{self.name}' was called outside a step on pipeline rank {self.runtime.rank}, but lives on"
                f" pipeline rank {self.owner}",
                remedy="call the model inside a function decorated with @smp.step",
            )

    def _run_as_glue(self, args: Any, kwargs: Any) -> Any:
        """A module inside has hooks that Python sees: every rank runs this forward, its children are units."""
        return self.module._call_impl(*args, **kwargs)

    def _run_with_hooks(self, args: Any, kwargs: Any) -> Any:
        """The module itself has hooks: they run as glue on every rank, and only its forward is the unit."""
        forward = self.module.__dict__.get("forward")
        if forward is None:
            self.module.__dict__["forward"] = _ForwardBorder(self)
        elif not isinstance(forward, _ForwardBorder):
            return self._run_as_glue(args, kwargs)
        return self.module._call_impl(*args, **kwargs)


class _ForwardBorder:
    """Stands in front of `forward` while the module has hooks of its own."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit
        forward = type(unit.module).forward.__get__(unit.module)
        frame = current_frame()
        if frame is None:
            return forward(*args, **kwargs)
        return call_unit(frame, unit, forward, args, kwargs)


def _is_hooked(attributes: dict[str, Any]) -> bool:
    """Has this module forward hooks, or a forward of its own, that Python code may be looking at?"""
    forward = attributes.get("forward")
    if forward is not None and not isinstance(forward, _ForwardBorder):
        return True
    for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
        if hooks and not all(any(test(hook) for test in harmless_hooks) for hook in hooks.values()):
            return True
    return False


def call_unit(frame: Frame, unit: Unit, native: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One call of a unit in a microbatch, on every rank."""
    walker = Walker()
    root: Node = (
        "tuple",
        tuple,
        (*(walker.describe(a) for a in args), *(walker.describe(v) for v in kwargs.values())),
    )
    for read in ambient:
        collector = read()
        if collector is not None:
            walker.describe(collector)
    crossing = _Crossing(frame, unit, walker, root, tuple(kwargs))
    if not crossing.operands and not unit.has_state and not walker.cells:
        return unit._run_as_glue(args, kwargs)  # the same everywhere: nothing to place
    return crossing.run(native)


class _Crossing:
    """One call on its way over the border and back."""

    def __init__(self, frame: Frame, unit: Unit, walker: Walker, root: Node, keywords: tuple[str, ...]) -> None:
        self.frame = frame
        self.unit = unit
        self.root = root
        self.keywords = keywords
        self.cells = walker.cells
        self.contents = tuple(walker.contents)
        self.originals: list[Any] = [lifted(frame, t) for t in walker.tensors]
        self.operands = [i for i, t in enumerate(self.originals) if type(t) is PlacedTensor]
        self.values: list[Value] = [aliasing.resolve(frame, self.originals[i]) for i in self.operands]
        self.owner = unit.owner if unit.has_state or not self.values else choose_rank(self.values)
        self.result: Any = None
        self.made_tensors: list[torch.Tensor] = []
        self.made_cells: list[Any] = []

    def run(self, native: Callable[..., Any]) -> Any:
        frame, unit = self.frame, self.unit
        key = self._key()
        known = self._known(key)
        for value in self.values:
            frame.fetch(value, self.owner)
        leaves = None
        if frame.rank == self.owner:
            outcome, leaves = self._run_here(native, known)
            if known is None:
                frame.announce(self.owner, outcome)
            elif outcome != known:
                raise PipelineError(
                    f"module '{unit.name}' returned {_words(outcome)} where the same kind of call before returned"
                    f" {_words(known)}",
                    where=frame.where(unit.name),
                    remedy="mark it with smp.dynamic_shapes(module)",
                )
        else:
            outcome = known if known is not None else frame.announce(self.owner, None)
        if known is None:
            unit.outcomes[key] = outcome
            unit.being_told.pop(key, None)
        return self._settle(outcome, leaves)

    def _known(self, key: Any) -> UnitOutcome | None:
        """The cached outcome, or None if this call is announced; the same answer on all ranks.

        The first microbatch with a new key is told; where a later one comes by before the news has arrived, it waits.
        """
        unit = self.unit
        if unit.dynamic:
            return None
        while key not in unit.outcomes and unit.being_told.setdefault(key, self.frame) is not self.frame:
            self.frame.yield_turn()
        known = unit.outcomes.get(key)
        return None if known is None or known.volatile else known

    def _key(self) -> Any:
        specs = tuple(
            ("p", v._value.spec) if type(v) is PlacedTensor else ("t", spec_of(v)) for v in self.originals
        )
        frame = self.frame
        return (
            self.root,
            self.keywords,
            self.contents,
            specs,
            ambient_key(frame.device.type),
            self.unit.module.training,
            frame.checkpointing > 0,
        )

    # ------------------------------------------------------------------ on the owner

    def _run_here(self, native: Callable[..., Any], known: UnitOutcome | None) -> tuple[UnitOutcome, Any]:
        """Run the module on real tensors; describe what came back."""
        frame, unit = self.frame, self.unit
        cautious = known is None
        copied = set() if known is None else {number for number, _ in known.mutated}
        given: list[torch.Tensor] = list(self.originals)
        versions: dict[int, int] = {}

        def call(leaves: list[torch.Tensor]) -> Any:
            for number, leaf in zip(self.operands, leaves, strict=True):
                given[number] = leaf.clone() if cautious or number in copied else leaf
            versions.update({n: t._version for n, t in enumerate(given) if not t.is_inference()})
            inside = Builder(given, self.cells, self.contents)
            for number in range(len(self.cells)):
                inside.write(number)
            parts = inside.value(self.root)
            num_args = len(parts) - len(self.keywords)
            run = _checkpointed(native) if frame.checkpointing and torch.is_grad_enabled() else native
            return run(*parts[:num_args], **dict(zip(self.keywords, parts[num_args:], strict=True)))

        try:
            self.result, leaves = frame.run_here(call, self.values, rng.forked)
        except Exception as error:
            _name_in(error, frame.where(unit.name))
            raise
        if unit.buffers:
            unit.runtime.refresh_buffers(unit.buffers)
        after = Walker()
        for tensor in given:
            after.number(tensor)
        for cell in self.cells:
            after.adopt_cell(cell)
        after.reread()
        root = after.describe(self.result)
        changed = tuple(i for i in range(len(self.cells)) if after.contents[i] != self.contents[i])
        mutated = []
        for number, version in versions.items():
            if given[number]._version != version:
                mutated.append((number, len(after.tensors)))
                self._check_mutation(number)
                after.tensors.append(given[number])
        self.made_tensors = after.tensors[len(given) :]
        self.made_cells = after.cells
        outcome = self._outcome(root, after, changed, tuple(mutated), given, leaves)
        return outcome, leaves

    def _check_mutation(self, number: int) -> None:
        if type(self.originals[number]) is not PlacedTensor or self.originals[number]._parent is not None:
            raise UnsupportedOperationError(
                f"module '{self.unit.name}' changed an argument in place that is shared with other code"
                f" (tensor of shape {list(self.originals[number].shape)})",
                where=self.frame.where(self.unit.name),
                remedy="clone() the argument before the call",
            )

    def _outcome(
        self,
        root: Node,
        after: Walker,
        changed: tuple[int, ...],
        mutated: tuple[tuple[int, int], ...],
        given: list[torch.Tensor],
        leaves: list[torch.Tensor],
    ) -> UnitOutcome:
        num_cells = len(self.cells)
        fresh = [after.contents[i] for i in changed] + after.contents[num_cells:]
        seen = Skeleton(root, tuple(fresh))
        unseen = Skeleton(root, tuple(after.contents[num_cells:])).opaque
        if unseen is not None:
            raise UnsupportedOperationError(
                f"module '{self.unit.name}' returned an object of type {unseen}, which can't be seen on other ranks",
                where=self.frame.where(self.unit.name),
                remedy="return tensors in tuples, lists, dicts, dataclasses or objects with attributes",
            )
        specs, alias, depends = [], [], []
        for tensor in self.made_tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise UnsupportedOperationError(
                    f"module '{self.unit.name}' returned a tensor of layout {tensor.layout}",
                    where=self.frame.where(self.unit.name),
                    remedy="return dense tensors from modules, .to_dense() where needed",
                )
            specs.append(spec_of(tensor))
            shared = derive.alias_of(tensor, given)
            alias.append(None if shared is None else shared[0])
            depends.append(derive.reached_leaves(tensor, leaves))
        return UnitOutcome(
            root, tuple(after.contents), num_cells, changed, tuple(specs), tuple(alias), tuple(depends), mutated,
            seen.has_constants,
        )  # fmt: skip

    # ------------------------------------------------------------------ on every rank

    def _settle(self, outcome: UnitOutcome, leaves: Any) -> Any:
        """Record the call, and put placed tensors where its results and changes are."""
        frame, unit = self.frame, self.unit
        results = self.made_tensors if frame.rank == self.owner else None
        made = frame.record(
            unit.name, self.owner, self.values, outcome.specs, outcome.depends, results, leaves, unit
        )  # fmt: skip
        placed = [PlacedTensor.of(value) for value in made]
        for tensor, shared in zip(placed, outcome.alias, strict=True):
            if shared is not None:
                tensor._untracked = f"module '{unit.name}' returned memory of its argument"
                if type(self.originals[shared]) is PlacedTensor:
                    self.originals[shared]._untracked = f"module '{unit.name}' returned memory of it"
        for number, new in outcome.mutated:
            target = self.originals[number]
            target._value = placed[new - len(self.originals)]._value
            target._version_count += 1
            target._untracked = None
        cells = self.made_cells if frame.rank == self.owner else self.cells
        for buffer in unit.registered_buffers:
            frame.forget_leaf(buffer)
        builder = Builder([*self.originals, *placed], cells, outcome.contents)
        for number in range(len(cells)) if frame.rank == self.owner else outcome.changed:
            builder.write(number)
        return builder.value(outcome.root)


def _checkpointed(native: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute in backward: the model's own checkpointing around this unit, as checkpointing of the unit."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(native, *args, use_reentrant=False, **kwargs)

    return run


def _name_in(error: BaseException, where: str) -> None:
    """Remember the innermost place where an error of the user's code arose."""
    if not hasattr(error, "shardwright_where"):
        error.shardwright_where = where  # type: ignore[attr-defined]


def _words(outcome: UnitOutcome) -> str:
    return ", ".join(str(s) for s in outcome.specs) or "no new tensor"


def units_of(runtime: Runtime, model: nn.Module, stage_of: dict[str, int]) -> Iterator[Unit]:
    """A unit for every module whose whole subtree one stage owns; at run time the outermost one called counts."""
    owners: dict[str, set[int]] = {}
    for name, stage in stage_of.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            owners.setdefault(".".join(parts[:depth]), set()).add(stage)
    for name, module in model.named_modules():
        has_forward = type(module).forward is not nn.Module.forward
        if name and has_forward and len(owners[name]) == 1:
            yield Unit(runtime, name, module, stage_of[name])
