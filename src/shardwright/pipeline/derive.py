"""What a glue op returns, before it is computed: a run of the op on fake tensors.

The fake tensors live on the real device, not on meta: under CPU autocast meta says fp32 where the real op
gives bf16. Results are cached by the caller; this module only computes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.pipeline.spec import Spec, spec_of
from shardwright.transport.structure import Skeleton, Walker


@dataclass(frozen=True)
class Outcome:
    """The results of a call: their structure, and a spec per tensor.

    alias: per tensor, None or (operand, same): it shares memory with that operand; `same`: it *is* the operand.
    depends: per tensor, the operands that its gradient reaches.
    """

    skeleton: Skeleton
    specs: tuple[Spec, ...]
    alias: tuple[tuple[int, bool] | None, ...]
    depends: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def single(self) -> bool:
        """Is it just one tensor?"""
        return self.skeleton.root == ("tensor", 0)

    @functools.cached_property
    def same(self) -> bool:
        """Does the call only hand back operands?"""
        return bool(self.alias) and all(a is not None and a[1] for a in self.alias)


class ChangesOperandError(Exception):
    """The op writes to an operand."""


class NotDenseError(Exception):
    """The op returns a tensor that is not an array in memory (sparse, nested): it can't be sent or described."""


class CannotDeriveError(Exception):
    """The op's result depends on values, or has no fake version: its holder must tell."""


_mode: FakeTensorMode | None = None
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def fake_mode() -> FakeTensorMode:
    """The process's one fake mode (real constants may be mixed in)."""
    global _mode
    if _mode is None:
        _mode = FakeTensorMode(allow_non_fake_inputs=True)
    return _mode


def derive(run: Callable[[list[Any]], Any], operands: Sequence[Spec], device: torch.device) -> Outcome:
    """Run `run` on fake operands of these specs and describe what comes out.

    Raises: ChangesOperandError; NotDenseError; CannotDeriveError for whatever else: the real run on the holder then
        tells, or raises the real error.
    """
    state = torch.get_rng_state()
    mode = fake_mode()
    quiet, _fake_log.disabled = _fake_log.disabled, True  # what can't be derived is no error
    try:
        with mode:
            fakes = [
                torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=device, requires_grad=s.requires_grad)
                for s in operands
            ]
            versions = [f._version for f in fakes]
            result = run(fakes)
            if versions != [f._version for f in fakes]:
                raise ChangesOperandError
        return describe(result, fakes)
    except (ChangesOperandError, NotDenseError):
        raise
    except Exception as error:
        raise CannotDeriveError(str(error)) from error
    finally:
        _fake_log.disabled = quiet
        torch.set_rng_state(state)


def describe(result: Any, operands: Sequence[torch.Tensor]) -> Outcome:
    """Describe the result of a run on `operands` (fake ones, or the leaves of a real run). Raises: NotDenseError."""
    walker = Walker()
    root = walker.describe(result)
    tensors = walker.tensors
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise NotDenseError(str(tensor.layout))
    return Outcome(
        walker.skeleton(root),
        tuple(spec_of(t) for t in tensors),
        tuple(alias_of(t, operands) for t in tensors),
        tuple(reached_leaves(t, operands) for t in tensors),
    )


def alias_of(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> tuple[int, bool] | None:
    """Which operand the result shares memory with, and whether it is that very tensor."""
    for i, operand in enumerate(operands):
        if result is operand:
            return (i, True)
    try:
        storage = result.untyped_storage()._cdata
        for i, operand in enumerate(operands):
            if operand.untyped_storage()._cdata == storage:
                return (i, False)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other storage-free tensors share no memory
    return None


def reached_leaves(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Positions of the operands that the gradient of `result` reaches (a walk over its graph)."""
    wanted = {id(t): i for i, t in enumerate(operands) if t.requires_grad}
    if not result.requires_grad or not wanted:
        return ()
    if result.grad_fn is None:
        return (wanted[id(result)],) if id(result) in wanted else ()
    found: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [result.grad_fn]
    while stack and len(found) < len(wanted):
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in wanted:
            found.add(wanted[id(leaf)])
        stack += [fn for fn, _ in node.next_functions]
    return tuple(sorted(found))
