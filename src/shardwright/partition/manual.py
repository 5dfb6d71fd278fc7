"""Stages by hand: `with partition(i):` around the creation of modules, `set_partition` on existing ones.

Importing this file wraps `nn.Module.__init__` and `__setstate__` (for modules that come to be by copying), so
that a module created inside a context remembers its stage. Outside of contexts the wrappers do nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.errors import PartitionError
from shardwright.log import get_logger
from shardwright.partition.tree import is_indivisible

_log = get_logger(__name__)

_CREATED = "_shardwright_created_on"
_SET = "_shardwright_set_to"


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.stages: list[int] = []


_contexts = _Contexts()


@contextmanager
def partition(stage: int) -> Iterator[None]:
    """Modules created inside go to pipeline stage `stage`; the innermost context wins.

    Ignored with `auto_partition: true`. Called by: every rank alike. Collectives: none.
    Raises: PartitionError if `stage` is not a number from 0; one that is too large is found when the model is
    partitioned, or here if `smp.init` has been called.
    """
    _check(stage, "smp.partition")
    _contexts.stages.append(stage)
    try:
        yield
    finally:
        _contexts.stages.pop()


def set_partition(module: nn.Module, stage: int) -> None:
    """Put a module, and all below it without an assignment of their own, on pipeline stage `stage`.

    Ignored with `auto_partition: true`. Called by: every rank alike, before the first step; no collectives.
    Raises: PartitionError as `partition` does; TypeError if `module` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_partition takes a torch.nn.Module, not {type(module).__name__}")
    _check(stage, f"smp.set_partition({type(module).__name__}, ...)")
    object.__setattr__(module, _SET, stage)


def assigned_stage(module: nn.Module) -> int | None:
    """The stage this very module was given by hand, or None."""
    stage = vars(module).get(_SET, vars(module).get(_CREATED))
    return stage if isinstance(stage, int) else None


def assign_by_hand(module: nn.Module, num_stages: int, default_stage: int) -> dict[str, int]:
    """Give every module the stage the script asked for.

    A module's own assignment counts first (`set_partition` before its creation), then that of the nearest
    module above on which `set_partition` was called, then, if it holds no parameters, the stage of its
    parent, then the default. The root without assignment is on stage 0 unless it holds parameters or buffers
    itself. What is below an indivisible module goes with it, whatever its own assignment; a log line says so.
    Raises: PartitionError naming the module if a stage is out of range.
    """
    stage_of: dict[str, int] = {}
    inherited: dict[str, int | None] = {}
    welded: dict[str, str] = {}
    for name, found in module.named_modules():
        parent = name.rpartition(".")[0] if name else None
        if parent is not None and parent in welded:
            whole = welded[name] = welded[parent]
            stage_of[name] = stage_of[whole]
            if assigned_stage(found) not in (None, stage_of[whole]):
                _log.info(
                    "module '%s' stays on partition %d: it is part of '%s', which can't be divided",
                    name,
                    stage_of[whole],
                    whole,
                )
            continue
        if is_indivisible(found):
            welded[name] = name
        set_here = vars(found).get(_SET)
        above = inherited[parent] if parent is not None else None
        inherited[name] = set_here if set_here is not None else above
        stage = assigned_stage(found)
        if stage is None:
            stage = above
        if stage is None:
            if parent is None:
                stage = default_stage if _holds(found, recurse=False) else 0
            elif _holds(found, recurse=True):
                stage = default_stage
            else:
                stage = stage_of[parent]
        if not 0 <= stage < num_stages:
            raise PartitionError(
                f"module '{name}' ({type(found).__name__}) is assigned to partition {stage}, "
                f"expected 0 to {num_stages - 1}",
                remedy=f"use a smaller number, or raise pipeline_parallel_degree ({num_stages})",
            )
        stage_of[name] = stage
    return stage_of


def _holds(module: nn.Module, *, recurse: bool) -> bool:
    if any(True for _ in module.parameters(recurse=recurse)):
        return True
    return not recurse and any(True for _ in module.buffers(recurse=False))


def _check(stage: Any, call: str) -> None:
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise PartitionError(f"{call}: partition is {stage!r}, expected a whole number")
    limit = _known_limit()
    if stage < 0 or (limit is not None and stage >= limit):
        upper = "pipeline_parallel_degree - 1" if limit is None else str(limit - 1)
        raise PartitionError(
            f"{call}: partition is {stage}, expected 0 to {upper}",
            remedy="use a smaller number, or raise pipeline_parallel_degree",
        )


def _known_limit() -> int | None:
    """Number of stages, where it is settled and assignments by hand count."""
    from shardwright.topology import context

    if not context.is_initialized():
        return None
    config = context.world().config
    return None if config.auto_partition else int(config.pipeline_parallel_degree)


def _remember_creation(method: Any) -> Any:
    @functools.wraps(method)
    def remembering(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        if _contexts.stages:
            object.__setattr__(self, _CREATED, _contexts.stages[-1])

    remembering._shardwright_wrapped = method  # type: ignore[attr-defined]
    return remembering


def _install() -> None:
    for name in ("__init__", "__setstate__"):
        method = getattr(nn.Module, name)
        if not hasattr(method, "_shardwright_wrapped"):
            setattr(nn.Module, name, _remember_creation(method))


_install()
