"""Recompute what a module kept for backward, instead of keeping it: only its inputs stay alive.

`torch.utils.checkpoint` (without re-entrance) does the recomputation within backward: it drops every tensor that
autograd would save, and runs the module again when backward comes to the first of them. What is added here makes the
second run a mere copy of the first:

- all generators are where they were (Python's, NumPy's, torch's), and are put back afterwards;
- arguments are given as they were: nested, keyword, None, and objects such as a cache, of which the second run gets
  copies; an argument that the module changes in place is kept as it was before;
- attributes and buffers of the modules inside are as they were before the first run, and what the second run writes to
  them is undone. So running statistics and counters move once.

Hooks on modules inside run again with them; hooks on the checkpointed module itself don't (see `Border`).
Source: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from shardwright.errors import UsageError
from shardwright.memory.module_state import StateBefore
from shardwright.topology import rng
from shardwright.transport.structure import Builder, Walker

Call = Callable[..., Any]


class Held(Protocol):
    """Inputs that wait for the recomputation."""

    def take(self) -> Sequence[Tensor]:
        """The tensors as they were. Called once for each backward through the call."""


Hold = Callable[[Sequence[Tensor]], Held]
"""Takes the inputs of a call when its first run is over."""


class Here:
    """Inputs kept where they are, as long as nobody changes them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [(t, _version(t)) for t in tensors]

    def take(self) -> Sequence[Tensor]:
        if any(_version(t) != version for t, version in self._tensors):
            raise UsageError(
                "an argument of a checkpointed module was changed in place after the call, so the module's activations"
                " can't be recomputed",
                remedy="change a clone, or leave the module out of activation checkpointing",
            )
        return [t for t, _ in self._tensors]


class Recompute:
    """Runs the calls of one module, or of a chain of modules, so that their activations are recomputed in backward.

    modules: those that run, the outermost first.   name: in words.   preserve_rng_state: the second run draws what the
    first one drew.   hold: where inputs wait.
    Without gradients, and inside another recomputed call, calls just run.
    Called by: the rank that runs the module. Collectives: those of the module, again, in backward; in the same order on
        all tp ranks, whose backward goes through the same graph.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], *, preserve_rng_state: bool = True, hold: Hold = Here
    ) -> None:
        self.name = name
        self.modules = modules
        self.preserve_rng_state = preserve_rng_state
        self.hold = hold
        self.changing: set[int] | None = None  # positions of arguments that calls change in place, once known

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call(*args, **kwargs)`, recomputed."""
        if _local.inside or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        once = _Run(self, call, args, kwargs)
        return torch.utils.checkpoint.checkpoint(once, use_reentrant=False, preserve_rng_state=False)

    def __call__(self, call: Call) -> Call:
        """A function that runs `call` recomputed."""
        return functools.partial(self._call, call)  # copied along with a module that holds it

    def _call(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        return self.run(call, args, kwargs)


class _Run:
    """One call. The first time it runs on what it was given, later on what was kept of that."""

    def __init__(self, owner: Recompute, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner = owner
        self._call = call
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)

    def __call__(self) -> Any:
        return self._again() if self._given is None else self._first()

    def _first(self) -> Any:
        assert self._given is not None
        (args, kwargs), self._given = self._given, None
        walker = Walker()
        self._root = walker.describe((args, kwargs))
        self._contents = tuple(walker.contents)
        self._opaques = dict(enumerate(walker.opaques))
        tensors, changing = walker.tensors, self._owner.changing
        versions = [_version(t) for t in tensors]
        copies = {n: t.detach().clone() for n, t in enumerate(tensors) if changing is None or n in changing}
        self._random = rng.capture() if self._owner.preserve_rng_state else None
        self._before = StateBefore(self._owner.modules)
        with _inside():
            result = self._call(*args, **kwargs)
        self._before.settle()
        changed = {n for n, t in enumerate(tensors) if _version(t) != versions[n]}
        if not changed <= copies.keys():
            raise UsageError(
                f"checkpointed module '{self._owner.name}' changed an argument in place that its first call did not change,"
                " so its activations can't be recomputed",
                remedy="let it change a clone, or leave it out of activation checkpointing",
            )
        self._owner.changing = changed | (changing or set())
        self._changed = changed
        self._flags = [t.requires_grad for t in tensors]
        self._held = self._owner.hold(
            [copies[n] if n in changed else t if isinstance(t, nn.Parameter) else t.detach() for n, t in enumerate(tensors)]
        )
        return result

    def _again(self) -> Any:
        tensors: list[Tensor] = []
        for number, tensor in enumerate(self._held.take()):
            if not isinstance(tensor, nn.Parameter):
                tensor = tensor.detach().requires_grad_(self._flags[number])
            tensors.append(tensor.clone() if number in self._changed else tensor)
        args, kwargs = Builder(tensors, (), self._contents, self._opaques).value(self._root)
        with _streams(self._random), self._before.in_place(), _inside():
            return self._call(*args, **kwargs)


class Border:
    """Stands in front of a module's `__call__`, where no unit does, and runs it recomputed.

    Hooks on the module itself run once, around it, and only its forward is recomputed.
    """

    def __init__(self, module: nn.Module, recompute: Recompute) -> None:
        self._module = module
        self._call: Call = module._compiled_call_impl or module._call_impl
        self.recompute = recompute

    def install(self) -> None:
        self._module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if self._call != module._call_impl or not _has_hooks(module):
            return self.recompute.run(self._call, args, kwargs)
        own, forward = module.__dict__.get("forward"), module.forward
        module.__dict__["forward"] = self.recompute(forward)
        try:
            return self._call(*args, **kwargs)
        finally:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own


class Chain:
    """Consecutive children of an `nn.Sequential`, called as one."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def __call__(self, value: Any) -> Any:
        for module in self._modules:
            value = module(value)
        return value


class GroupedForward(Chain):
    """The forward of an `nn.Sequential` whose children are recomputed in groups; an attribute of the instance."""

    runs_natively = True
    """It is no patch that Python code watches: inside a unit it may run as it is (see `pipeline.unit`)."""


def _has_hooks(module: nn.Module) -> bool:
    everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or everywhere)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Local(threading.local):
    inside = False


_local = _Local()


@contextmanager
def _inside() -> Iterator[None]:
    """While open, this thread runs a checkpointed call: marks inside mean nothing."""
    before, _local.inside = _local.inside, True
    try:
        yield
    finally:
        _local.inside = before


@contextmanager
def _streams(state: rng.RngState | None) -> Iterator[None]:
    """Run on these streams, and leave all generators where they were."""
    if state is None:
        yield
        return
    now = rng.capture()
    rng.restore(state)
    try:
        yield
    finally:
        rng.restore(now)
