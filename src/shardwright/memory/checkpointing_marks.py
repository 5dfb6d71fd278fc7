"""Which modules should recompute their activations: marks beside modules, and what they mean once stages are known.

Nothing is wrapped, so names never change. A mark is a note on an instance; the engine carries it out when the model's
part of this rank is settled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import nn

from shardwright.errors import UsageError

_MARK = "_shardwright_recompute"
_TORCH_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_INSIDE = "_checkpoint_wrapped_module"
_GROUP = re.compile(r"group_([1-9]\d*)")


@dataclass(frozen=True)
class Mark:
    """What the script asked for. strategy: of an `nn.Sequential`, "each", "contiguous" or "group_N"."""

    preserve_rng_state: bool = True
    strategy: str = "each"


@dataclass(frozen=True)
class Target:
    """Something to recompute as one: a module, or consecutive children of an `nn.Sequential`.

    name: of the module, or of the Sequential.   keys: of the children; () for the module itself.
    """

    name: str
    module: nn.Module
    mark: Mark
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Straddling:
    """A marked module that lies on several stages, so that it can't be recomputed."""

    name: str
    kind: str
    stages: tuple[int, ...]


def set_mark(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Mark a module; the last call for an instance counts.

    Raises: TypeError for anything but a module; UsageError for `strategy` or `pack_args_as_tuple` where they mean
        nothing, or a strategy that there isn't.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"activation checkpointing takes a torch.nn.Module, not {type(module).__name__}")
    group = _GROUP.fullmatch(strategy) if isinstance(strategy, str) else None
    if strategy not in ("each", "contiguous") and group is None:
        raise UsageError(
            f"activation checkpointing: 'strategy' is {strategy!r}, expected 'each', 'contiguous' or 'group_N', N >= 1",
            remedy="choose one of them",
        )
    if not isinstance(module, nn.Sequential) and (pack_args_as_tuple or strategy != "each"):
        raise UsageError(
            f"activation checkpointing: 'strategy' and 'pack_args_as_tuple' are for nn.Sequential, and this is a"
            f" {type(module).__name__}",
            remedy="leave them out",
        )
    if strategy != "each" and type(module).forward is not nn.Sequential.forward:
        raise UsageError(
            f"activation checkpointing: {type(module).__name__} has a forward of its own, so its children can't be grouped",
            remedy='use strategy "each"',
        )
    module.__dict__[_MARK] = Mark(preserve_rng_state, strategy)


def without_wrappers(root: nn.Module) -> nn.Module:
    """The model with marks in the place of torch's own wrappers for recomputation, which change the names of what is in them.

    Replaces the children that `torch.distributed.algorithms._checkpoint.checkpoint_wrapper` made. What was asked of a wrapper,
    such as a stage, holds for what is in it. A `checkpoint_fn` or `context_fn` that the script gave has no say any more: all
    activations of such a module are recomputed.
    """
    if _TORCH_WRAPPERS not in sys.modules:
        return root
    wrapper = sys.modules[_TORCH_WRAPPERS].CheckpointWrapper

    def inside(module: nn.Module) -> nn.Module:
        while isinstance(module, wrapper):
            asked = {key: value for key, value in vars(module).items() if key.startswith("_shardwright")}
            function = module.checkpoint_fn
            module = module.get_submodule(_INSIDE)
            set_mark(module, getattr(function, "keywords", {}).get("preserve_rng_state", True))
            module.__dict__.update(asked)
        return module

    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, wrapper):
                parent._modules[name] = inside(child)
    return inside(root)


def mark_of(module: nn.Module) -> Mark | None:
    """What was asked for this very instance."""
    mark = vars(module).get(_MARK)
    return mark if isinstance(mark, Mark) else None


def carry_mark(module: nn.Module, successor: nn.Module) -> list[str]:
    """Let a mark hold for the module that takes its place; returns the names below whose marks are lost."""
    mark = mark_of(module)
    if mark is not None:
        successor.__dict__[_MARK] = mark if isinstance(successor, nn.Sequential) else Mark(mark.preserve_rng_state)
        return []
    return [name for name, found in module.named_modules() if mark_of(found) is not None]


def targets(
    root: nn.Module, stages_of: Callable[[str], Collection[int]]
) -> tuple[list[Target], list[Straddling]]:
    """What is to be recomputed, the outermost of nested marks only; and what can't be, for it lies on several stages.

    stages_of: the stages of all modules from a name down. Pure, and the same on all ranks.
    """
    found: list[Target] = []
    straddling: list[Straddling] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, above: Mark | None) -> None:
        """above: the mark of a list of layers around it, of which it is one."""
        if id(module) in seen:
            return
        seen.add(id(module))
        mark = above or mark_of(module)
        if above is None and mark is not None and isinstance(module, nn.Sequential):
            found.extend(_of_sequential(name, module, mark, stages_of, straddling, visit))
            return
        if mark is not None and type(module).forward is not nn.Module.forward:
            stages = tuple(sorted(set(stages_of(name))))
            if len(stages) <= 1:
                found.append(Target(name, module, mark))
                return
            straddling.append(Straddling(name, type(module).__name__, stages))
            mark = None
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child, mark)

    visit("", root, None)
    return found, straddling


def _of_sequential(
    name: str,
    module: nn.Sequential,
    mark: Mark,
    stages_of: Callable[[str], Collection[int]],
    straddling: list[Straddling],
    visit: Callable[[str, nn.Module, Mark | None], None],
) -> Iterator[Target]:
    """Its layers one by one, or in groups of consecutive ones on one stage."""
    start = f"{name}." if name else ""
    if mark.strategy == "each":
        for key, child in module.named_children():
            visit(start + key, child, Mark(mark.preserve_rng_state))
        return
    size = _GROUP.fullmatch(mark.strategy)
    limit = int(size.group(1)) if size else len(module)
    group: list[str] = []
    stage: int | None = None
    for key, child in module._modules.items():
        stages = tuple(sorted(set(stages_of(start + key))))
        if len(stages) > 1:
            straddling.append(Straddling(start + key, type(child).__name__, stages))
        if group and (len(stages) > 1 or stages[0] != stage or len(group) == limit):
            yield Target(name, module, mark, tuple(group))
            group = []
        if len(stages) == 1:
            group.append(key)
            stage = stages[0]
    if group:
        yield Target(name, module, mark, tuple(group))
