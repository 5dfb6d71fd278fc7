"""Activation checkpointing of the wrapped model: the three entry points, and what they lead to once stages are known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwright.engine.part import Part
from shardwright.engine.state import state
from shardwright.errors import PartitionError, UsageError
from shardwright.log import get_logger, once, rank_zero
from shardwright.memory.activation_checkpointing import Border, Chain, GroupedForward, Here, Hold, Recompute
from shardwright.memory.activation_offload import CudaTransfers, Offloader
from shardwright.memory.checkpointing_marks import Straddling, Target, mark_of, set_mark, targets
from shardwright.partition.trace import is_tracing
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.unit import Group
from shardwright.topology import context

_log = get_logger(__name__)


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Keep only the inputs of a module for backward, and compute the rest again there.

    module: of the model, or the wrapped model itself. A list of layers, or an `nn.Sequential` with strategy "each",
        stands for each layer; "contiguous" and "group_N" recompute consecutive layers of one stage together.
    preserve_rng_state: draw the same dropout masks again.   pack_args_as_tuple: accepted; layers of a Sequential take
        what they return, tuples included, as in torch.
    Called by: every rank alike, before or after the wrap; nothing is communicated.
    Raises: UsageError and TypeError as `memory.checkpointing_marks.set_mark`. PartitionError, on every rank in the first
        step, if a module lies on several stages and the partition is by hand; else it is left out with a warning.
    """
    wrapped = state.model
    set_mark(module.get_module() if module is wrapped and wrapped is not None else module, preserve_rng_state,
             pack_args_as_tuple, strategy)  # fmt: skip
    if wrapped is not None and wrapped.partitioned:
        wrapped.carry_out_marks()


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call a module of the model with its activations recomputed in backward, now and from now on.

    Called by: the model's forward or the step function. Raises: TypeError if `module` is a function.
    """
    _mark_for_call(module, preserve_rng_state)
    return module(*args, **kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call an `nn.Sequential` of the model, which may lie on several stages, with its layers recomputed in backward.

    See `set_activation_checkpointing`. Called by: the model's forward or the step function.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise TypeError(f"checkpoint_sequential takes a torch.nn.Sequential, not {type(sequential_module).__name__}")
    _mark_for_call(sequential_module, preserve_rng_state, pack_args_as_tuple, strategy)
    return sequential_module(input)


def _mark_for_call(module: nn.Module, *how: Any) -> None:
    before = mark_of(module) if isinstance(module, nn.Module) else None
    set_mark(module, *how)
    if mark_of(module) == before or is_tracing():
        return
    wrapped = state.model
    if wrapped is None:
        Recomputation(Part(module, 0, 1), None).carry_out()
        return
    if not any(m is module for m in wrapped.get_module().modules()):
        raise UsageError(
            f"activation checkpointing: this {type(module).__name__} is not part of the wrapped model",
            remedy="call modules of the model, or use torch.utils.checkpoint",
        )
    wrapped.carry_out_marks()


class Recomputation:
    """Carries out the marks of one model on this rank, once its part is settled, and again when there are new ones.

    hold: where inputs wait for backward.
    """

    def __init__(self, part: Part, runtime: Runtime | None) -> None:
        self._part = part
        self._runtime = runtime
        self._done: dict[int, Any] = {}
        self._warned: set[str] = set()
        self.offloader = _offloader()
        self._hold: Hold = Here if self.offloader is None else self.offloader.hold

    def check(self) -> list[Target]:
        """What the marks ask for, given the partition.

        Raises: PartitionError for a marked module on several stages, if the partition is by hand.
        """
        found, straddling = targets(self._part.module, self._stages_below)
        self._refuse(straddling)
        return found

    def carry_out(self) -> None:
        """Called by: every rank of the pipeline group, or one rank for modules within a unit; with the same marks.

        Raises: see `check`.
        """
        found = self.check()
        grouped: dict[str, list[Target]] = {}
        for target in found:
            if target.keys:
                grouped.setdefault(target.name, []).append(target)
            elif self._done.get(id(target.module)) != target.mark:
                self._done[id(target.module)] = target.mark
                self._recompute(target)
        for targets_of_one in grouped.values():
            module, mark = targets_of_one[0].module, targets_of_one[0].mark
            if self._done.get(id(module)) != mark:
                self._done[id(module)] = mark
                self._group(targets_of_one)

    def check_offloading(self) -> None:
        """Warn if activations should be offloaded, but there are none to offload. Called by: every rank, before its first step."""
        if context.world().config.offload_activations and not any(map(mark_of, self._part.module.modules())):
            once(_log, logging.WARNING, "'offload_activations' has no effect: no module is checkpointed. Mark some with"
                 " smp.set_activation_checkpointing()")  # fmt: skip

    def _stages_below(self, name: str) -> set[int]:
        plan = self._part.plan
        if plan is None:
            return {0}
        below = f"{name}." if name else ""
        return {stage for other, stage in plan.stage_of.items() if other == name or other.startswith(below)}

    def _refuse(self, straddling: Sequence[Straddling]) -> None:
        plan = self._part.plan
        news = [s for s in straddling if s.name not in self._warned]
        if not news or plan is None:
            return
        said = ", ".join(f"'{s.name or '(root)'}' ({s.kind}) on stages {', '.join(map(str, s.stages))}" for s in news)
        if plan.origin == "manual":
            raise PartitionError(
                f"activation checkpointing: a module must lie on one stage, but the partition by hand puts {said}",
                remedy="mark the modules inside it, or put it on one stage",
            )
        self._warned.update(s.name for s in news)
        if rank_zero():
            _log.warning("activation checkpointing: these modules lie on several stages, and are not recomputed: %s", said)

    def _recompute(self, target: Target) -> None:
        recompute = self._made(target.name, [target.module], target)
        if self._runtime is None:
            Border(target.module, recompute).install()
            return
        self._recompute_inside([target.module], target)
        for unit in self._runtime.units:
            if unit.module is target.module:
                unit.recompute = recompute

    def _recompute_inside(self, modules: Sequence[nn.Module], target: Target) -> None:
        """Where hooks that Python sees make a module run as glue, the units in it are recomputed one by one."""
        assert self._runtime is not None
        inside = {id(found) for module in modules for found in module.modules()}
        for unit in self._runtime.units:
            if id(unit.module) in inside:
                unit.recompute_within = self._made(unit.name, [unit.module], target)

    def _group(self, groups: Sequence[Target]) -> None:
        """Let an `nn.Sequential` call its children in groups."""
        sequential, name = groups[0].module, groups[0].name
        first_of = {target.keys[0]: target for target in groups}
        inside = {key for target in groups for key in target.keys}
        calls: list[Any] = []
        for key, child in sequential._modules.items():
            if key in first_of:
                calls.append(self._call_of(name, sequential, first_of[key]))
            elif key not in inside and child is not None:
                calls.append(child)
        sequential.__dict__["forward"] = GroupedForward(calls)

    def _call_of(self, name: str, sequential: nn.Module, target: Target) -> Any:
        """What runs one group: at its border, if there are stages."""
        children = {key: sequential.get_submodule(key) for key in target.keys}
        modules = list(children.values())
        title = f"{name}[{target.keys[0]}:{target.keys[-1]}]"
        recompute = self._made(title, modules, target)
        if self._runtime is None:
            return recompute(Chain(modules))
        owner = min(self._stages_below(f"{name}.{target.keys[0]}" if name else target.keys[0]))
        unit = Group(self._runtime, title, children, owner, path=name)
        unit.recompute = recompute
        self._recompute_inside(modules, target)
        cost, start = self._runtime.cost, f"{name}." if name else ""
        cost[title] = sum(cost.get(start + key, 0.0) for key in target.keys)
        self._runtime.units.append(unit)
        return unit

    def _made(self, name: str, modules: Sequence[nn.Module], target: Target) -> Recompute:
        return Recompute(name, modules, preserve_rng_state=target.mark.preserve_rng_state, hold=self._hold)


def _offloader() -> Offloader | None:
    if not context.is_initialized() or not context.world().config.offload_activations:
        return None
    world = context.world()
    if world.device.type != "cuda":
        once(_log, logging.INFO, "'offload_activations' has no effect on a CPU: its memory is the host's")
        return None
    return Offloader(CudaTransfers(), world.config.activation_loading_horizon)
