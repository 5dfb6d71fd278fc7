"""How a module runs on its owner and elsewhere.

A unit is a module whose whole subtree one stage owns. Its border is its outermost `__call__`, hooks included. On
the owner it runs natively, on detached real tensors; elsewhere the call only yields placed tensors, whose specs
the owner announces once per key and never guesses (see `crossing`).

Where Python code looks into a unit (forward hooks on modules inside, a patched forward), its forward runs as glue on
every rank, and the modules inside are the units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as torch_module

from shardwright.errors import UsageError
from shardwright.pipeline.crossing import Crossing
from shardwright.pipeline.kept import Kept
from shardwright.pipeline.placed import current_frame
from shardwright.pipeline.runtime import Registered, Runtime, harmless_hooks
from shardwright.pipeline.spec_cache import SpecCache
from shardwright.topology import rng

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame


Call = Callable[..., Any]

_DYNAMIC = "_shardwright_dynamic_shapes"


def mark_dynamic(module: nn.Module) -> None:
    """Let the owner of a module announce its results at every call."""
    module.__dict__[_DYNAMIC] = True


def carry_marks(module: nn.Module, successor: nn.Module) -> None:
    """Let what was said of a module hold for the one that takes its place."""
    if _DYNAMIC in module.__dict__:
        mark_dynamic(successor)


class Unit:
    """The border of one module: stands in front of its `__call__`.

    path: where the module hangs in the model, if that is not its name.
    num_streams: on how many random streams a call runs.
    recompute: makes its calls recompute their activations in backward, if they should.   recompute_within: the same for
        calls within a module that should, but runs as glue.
    """

    num_streams = 1

    def __init__(self, runtime: Runtime, name: str, module: nn.Module, owner: int, path: str | None = None) -> None:
        self.runtime = runtime
        self.name = name
        self.path = name if path is None else path
        self.module = module
        self.owner = owner
        self.recompute: Callable[[Call], Call] | None = None
        self.recompute_within: Callable[[Call], Call] = _as_torch_does
        self.cache = SpecCache(runtime)
        self._call: Callable[..., Any] = module._compiled_call_impl or module._call_impl

    @property
    def dynamic(self) -> bool:
        """Was it marked with `smp.dynamic_shapes`?"""
        return _DYNAMIC in self.module.__dict__

    @functools.cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(self.module.parameters())

    @property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)

    @property
    def tied(self) -> tuple[nn.Parameter, ...]:
        """Trainable parameters that modules outside may use as well."""
        tied = self.runtime.tied
        return tuple(p for p in self.parameters if id(p) in tied and p.requires_grad) if tied else ()

    @functools.cached_property
    def buffers(self) -> list[tuple[str, nn.Module, str]]:
        """(full name, module, key) of every buffer inside."""
        return [
            (f"{path}.{key}" if path else key, m, key)
            for path, m in self.module.named_modules(prefix=self.path)
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
    def kept(self) -> Kept:
        return Kept(list(self.module.modules()))

    @functools.cached_property
    def _states(self) -> list[dict[str, Any]]:
        """The attributes of all modules inside; the module itself comes first."""
        return [m.__dict__ for m in self.module.modules()]

    @property
    def mode(self) -> tuple[Any, ...]:
        """What decides which specs come out, besides the arguments: training flags, frozen parameters."""
        return tuple([s["training"] for s in self._states]), tuple([p.requires_grad for p in self.parameters])

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
            return self.recomputed(self._call)(*args, **kwargs)
        hooked = self._hooked()
        if hooked is None:
            return call_unit(frame, self, self._native(frame), args, kwargs)
        return self._run_as_glue(args, kwargs) if hooked == "inside" else self._run_with_hooks(args, kwargs)

    def _native(self, frame: Frame) -> Call:
        """What runs on the owner when the microbatch calls the unit."""
        return self._call

    def _hooked(self) -> Literal["root", "inside"] | None:
        """Where Python code looks into this unit, if it does."""
        everywhere = _has_global_hooks()
        if everywhere and len(self._states) > 1:
            return "inside"
        root_is_hooked = everywhere
        for number, state in enumerate(self._states):
            # The common case first: this runs for every module of the unit at every call.
            if not ("forward" in state or state["_forward_hooks"] or state["_forward_pre_hooks"]):
                continue
            if _is_hooked(state):
                if number > 0:
                    return "inside"
                root_is_hooked = True
        return "root" if root_is_hooked else None

    def _demand_owner(self) -> None:
        if self.has_state and self.runtime.rank != self.owner:
            raise UsageError(
                f"module '{self.name}' was called outside a step on pipeline rank {self.runtime.rank}, but lives on"
                f" pipeline rank {self.owner}",
                remedy="call the model inside a function decorated with @smp.step",
            )

    def recomputed(self, native: Call, *, within: bool = False) -> Call:
        """`native` with activations recomputed in backward, if the unit should, or is called `within` such glue."""
        if self.recompute is not None:
            return self.recompute(native)
        return self.recompute_within(native) if within else native

    def _run_as_glue(self, args: Any, kwargs: Any) -> Any:
        """A module inside has hooks that Python sees: every rank runs this forward, its children are units."""
        frame = current_frame()
        if self.recompute is None or frame is None:
            return self.module._call_impl(*args, **kwargs)
        with frame.within_checkpoint():
            return self.module._call_impl(*args, **kwargs)

    def _run_with_hooks(self, args: Any, kwargs: Any) -> Any:
        """The module itself has hooks: they run as glue on every rank, and only its forward is the unit."""
        forward = self.module.__dict__.get("forward")
        if forward is None:
            self.module.__dict__["forward"] = _ForwardBorder(self)
        elif not isinstance(forward, _ForwardBorder):
            return self._run_as_glue(args, kwargs)
        return self.module._call_impl(*args, **kwargs)


class Group(Unit):
    """Consecutive children of an `nn.Sequential` on one stage, called as one; each on a stream of its own, as alone.

    name: in words.   path: of the Sequential.
    """

    def __init__(self, runtime: Runtime, name: str, children: Mapping[str, nn.Module], owner: int, path: str) -> None:
        chain = nn.Sequential()
        for key, child in children.items():
            chain.add_module(key, child)
        super().__init__(runtime, name, chain, owner, path)
        self._children = tuple(children.values())
        self.num_streams = len(children)

    def remove(self) -> None:
        """The whole model is on this rank now, and its Sequential goes on calling this."""
        self.owner = self.runtime.rank

    def _native(self, frame: Frame) -> Call:
        seeds = [frame.stream(number) for number in range(self.num_streams)]

        def run(value: Any) -> Any:
            for child, seed in zip(self._children, seeds, strict=True):
                with rng.forked(seed):
                    value = child(value)
            return value

        return run


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


def _has_global_hooks() -> bool:
    """Are there hooks on the calls of all modules?"""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _is_hooked(attributes: dict[str, Any]) -> bool:
    """Has this module forward hooks, or a forward of its own, that Python code may be looking at?"""
    forward = attributes.get("forward")
    if forward is not None and not isinstance(forward, _ForwardBorder) and not hasattr(forward, "runs_natively"):
        plain = getattr(type(getattr(forward, "__self__", None)), "forward", None)
        if getattr(forward, "__func__", forward) is not plain:  # a patch that was taken back leaves the method itself
            return True
    for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
        if hooks and not all(any(test(hook) for test in harmless_hooks) for hook in hooks.values()):
            return True
    return False


def _as_torch_does(native: Call) -> Call:
    """The model's own checkpointing around a unit, as checkpointing of the unit."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(native, *args, use_reentrant=False, **kwargs)

    return run


def call_unit(frame: Frame, unit: Unit, native: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One call of a unit in a microbatch, on every rank."""
    crossing = Crossing(frame, unit, args, kwargs)
    if not crossing.is_needed:
        return unit._run_as_glue(args, kwargs)  # the same everywhere: nothing to place
    return crossing.run(native)


def units_of(runtime: Runtime, model: nn.Module, stage_of: dict[str, int]) -> Iterator[Unit]:
    """A unit for every module whose whole subtree one stage owns; at run time the outermost one called counts."""
    stage_of_module = {id(module): stage_of[name] for name, module in model.named_modules()}
    for name, module in model.named_modules():
        has_forward = type(module).forward is not nn.Module.forward
        # By the modules themselves: one that hangs in several places has only one name in `stage_of`.
        if name and has_forward and len({stage_of_module[id(m)] for m in module.modules()}) == 1:
            yield Unit(runtime, name, module, stage_of[name])
