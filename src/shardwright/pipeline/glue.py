"""The rule for glue: what happens to each torch function called between units.

A function mode sees every call that the step body and the forwards of split modules make.

- No placed operand: it runs as it is, on every rank, for it is the same there.
- A question about the spec (shape, dtype, ...) is answered from the spec.
- A change in place goes through `changes`.
- A value that Python must see is computed by its holder and announced.
- Anything else runs on one rank, the one to which the fewest bytes must travel; elsewhere only the spec of the
  result is derived, from a run on fake tensors, or announced where fake tensors can't tell.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from shardwright.errors import PipelineError, UnsupportedOperationError
from shardwright.pipeline import aliasing, glue_rules
from shardwright.pipeline.derive import CannotDeriveError, ChangesOperandError, NotDenseError, Outcome, derive, describe
from shardwright.pipeline.operands import Keyed, gather, lift, swap, tensors_of
from shardwright.pipeline.placed import PlacedTensor, Value, current_frame, glue_off
from shardwright.pipeline.spec import ambient_key, carries_grad, spec_of
from shardwright.transport.structure import Builder

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame

_UNKNOWN = object()
_MOST_CACHED = 8192


class GlueMode(TorchFunctionMode):
    """Active while a microbatch's glue runs on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = current_frame()
        if frame is None:
            return func(*args, **(kwargs or {}))
        return run(frame, func, args, kwargs or {})


glue_off.mode = GlueMode


def run(frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call made by glue."""
    registered = frame.runtime.registered
    answer = glue_rules.META.get(func)
    if answer is not None:
        subject = args[0]
        if type(subject) is PlacedTensor:
            return answer(frame, aliasing.resolve(frame, subject).spec, *args[1:], **kwargs)
        if func in glue_rules.DEVICE_GETTERS and id(subject) in registered:
            return answer(frame, spec_of(subject))
        return func(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    gather(args, tensors)
    if kwargs:
        gather(kwargs, tensors)
    for t in tensors:
        if type(t) is PlacedTensor or id(t) in registered:
            break
    else:
        return _run_everywhere(frame, func, args, kwargs, tensors)
    name = glue_rules.name_of(func)
    remedy = glue_rules.REFUSED.get(name)
    if name in glue_rules.PLAIN_ON_PARAMETERS and type(args[0]) is not PlacedTensor:
        return func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        remedy = "draw from the default generator, which is the same on all ranks"
    if peek_interpreter_stack() is not None:
        remedy = "use torch.func and vmap inside one module, or on tensors that don't come from the model"
    if glue_rules.keeps_statistics(func, args, kwargs):
        remedy = "use the nn.Module of it: it changes its running statistics, which have one owner"
    if remedy is not None:
        raise UnsupportedOperationError(
            f"'{name}' on a tensor that is placed on a pipeline stage", where=frame.where("glue"), remedy=remedy
        )
    if kwargs.get("out") is not None:
        from shardwright.pipeline import changes

        return changes.write_out(frame, func, name, args, kwargs)
    target = glue_rules.in_place_target(func, name, args, kwargs)
    if target is not None:
        from shardwright.pipeline import changes

        return changes.change(frame, func, name, target, args, kwargs)
    rewritten = glue_rules.without_other(name, args, kwargs)
    if rewritten is not None:
        return run(frame, *rewritten, {})
    args, kwargs = lift(frame, args, kwargs)
    if name in glue_rules.MOVES:
        moved = glue_rules.retarget_move(name, args, kwargs)
        if moved is None:
            return args[0]
        func, args, kwargs = torch.Tensor.to, (args[0], *moved[0]), moved[1]
    elif name == "iter":
        return iter(run(frame, torch.Tensor.unbind, (args[0],), {}))
    elif name == "data.get":
        func, name, args = torch.Tensor.detach, "detach", args[:1]
    if name == "detach" and args[0]._value.frame is not frame and args[0]._parent is None:
        return aliasing.detach_foreign(frame, args[0])
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": frame.device}
    return call(frame, func, name, args, kwargs)


def _run_everywhere(
    frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> Any:
    """No placed operand: every rank computes the same. The frame remembers that it made the result."""
    result = func(*args, **kwargs)
    if type(result) is torch.Tensor and not any(t is result for t in tensors):
        frame.has_made(result)
    return result


def call(frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` as one call on one rank; its placed operands may be nested in lists, tuples, dicts and slices."""
    if name in glue_rules.INDEXING:
        args = glue_rules.plain_indices(args)
    keyed = Keyed(args, kwargs, plain_numbers=name in glue_rules.ANY_NUMBER)
    operands, ordinary = keyed.operands, keyed.ordinary
    if not operands:
        return func(*args, **kwargs)

    def run_with(reals: list[Any]) -> Any:
        table = {id(p): r for p, r in zip(operands, reals, strict=True)}
        before = [t._version for t in ordinary if not t.is_inference()]
        result = func(*swap(args, table), **swap(kwargs, table))
        if before != [t._version for t in ordinary if not t.is_inference()]:
            raise UnsupportedOperationError(
                f"'{name}' changes an ordinary tensor in place, but runs on one pipeline stage only",
                where=frame.where("glue"),
                remedy="put it into an nn.Module that owns the tensor, or use an out-of-place form",
            )
        return result

    key = (func, keyed.key)
    return apply(frame, name, run_with, operands, key, keyed.cacheable, values_only=glue_rules.tells_value(func, name))


def apply(
    frame: Frame,
    name: str,
    run_with: Callable[[list[Any]], Any],
    operands: Sequence[PlacedTensor],
    key: Any,
    cacheable: bool,
    *,
    values_only: bool = False,
    streams: Any = None,
) -> Any:
    """Run `run_with(real operands)` on one rank and wrap what it returns."""
    values = [aliasing.resolve(frame, p) for p in operands]
    owner = choose_rank(values)
    outcome = None if values_only else _outcome(frame, name, run_with, values, key, cacheable)
    if outcome is not None and outcome.same:
        placed = [operands[a[0]] for a in outcome.alias if a is not None]
        return Builder(placed, [], outcome.skeleton.cells).value(outcome.skeleton.root)
    for value in values:
        frame.fetch(value, owner)
    tensors = leaves = None
    if frame.rank == owner:
        before = _versions(values)
        try:
            result, leaves = frame.run_here(run_with, values, streams)
        except Exception as error:
            if outcome is None:
                frame.announce(owner, _Raised(error))  # the script may catch it, on all ranks alike
            raise
        if _versions(values) != before:
            raise _changes_operand(frame, name)
        if outcome is None:
            outcome = _describe(frame, name, result, leaves)
            frame.announce(owner, outcome)
        else:
            _check(frame, name, outcome, result)
        tensors = tensors_of(result)
    elif outcome is None:
        outcome = frame.announce(owner, None)
    if isinstance(outcome, _Raised):
        raise outcome.error
    if isinstance(outcome, _Opaque):
        frame.record(name, owner, values, (), (), None, None)
        return outcome.value
    made = frame.record(name, owner, values, outcome.specs, outcome.depends, tensors, leaves)
    return _wrap(name, run_with, key if cacheable else None, operands, outcome, made)


def choose_rank(values: Sequence[Value]) -> int:
    """The rank to which the fewest bytes must travel; then the holder of the largest value, then of the latest."""
    if len(values) == 1:
        return values[0].holder
    candidates = {r for v in values for r in v.copies}
    if len(candidates) == 1:
        return next(iter(candidates))

    def cost(rank: int) -> tuple[int, int, int, int]:
        missing = sum(v.spec.nbytes for v in values if rank not in v.copies)
        held = [v for v in values if v.holder == rank]
        largest = max((v.spec.nbytes for v in held), default=-1)
        latest = max((v.id for v in held), default=-1)
        return (missing, -largest, -latest, rank)

    return min(candidates, key=cost)


def _outcome(
    frame: Frame, name: str, run_with: Callable[[list[Any]], Any], values: Sequence[Value], key: Any, cacheable: bool
) -> Outcome | None:
    """The op's outcome from the cache or a fake run; None if only the holder can tell."""
    cache = frame.runtime.glue_cache
    full_key = None
    if cacheable:
        full_key = (key, tuple([v.spec for v in values]), ambient_key(frame.device.type))
        known = cache.get(full_key, _UNKNOWN)
        if known is not _UNKNOWN:
            return known  # type: ignore[no-any-return]
    outcome: Outcome | None
    try:
        outcome = derive(run_with, [v.spec for v in values], frame.device)
        if outcome.skeleton.opaque is not None:
            outcome = None
    except ChangesOperandError:
        raise _changes_operand(frame, name) from None
    except NotDenseError as error:
        raise _not_dense(frame, name, error) from None
    except CannotDeriveError:
        outcome = None
    if full_key is not None:
        if len(cache) >= _MOST_CACHED:  # numbers that differ in every step; what is still used is derived again
            cache.clear()
        cache[full_key] = outcome
    return outcome


def _wrap(
    name: str,
    run_with: Callable[[list[Any]], Any],
    key: Any,
    operands: Sequence[PlacedTensor],
    outcome: Outcome,
    made: Sequence[Value],
) -> Any:
    placed: list[PlacedTensor] = []
    tracked = torch.is_grad_enabled() and name not in glue_rules.DETACHING
    for i, value in enumerate(made):
        alias = outcome.alias[i]
        if alias is not None and alias[1]:
            placed.append(operands[alias[0]])
            continue
        view = PlacedTensor.of(value)
        if alias is not None:
            if len(operands) == 1:
                step_key = None if key is None else (key, i)
                aliasing.link_view(view, operands[0], _step(run_with, i), step_key, tracked)
            else:
                view._untracked = f"'{name}' made it a view of one of several placed operands"
                aliasing.cannot_follow(operands[alias[0]], f"'{name}' made a view of it that can't be followed")
        placed.append(view)
    if outcome.single:
        return placed[0]
    return Builder(placed, [], outcome.skeleton.cells).value(outcome.skeleton.root)


def _step(run_with: Callable[[list[Any]], Any], index: int) -> Callable[[Any], Any]:
    return lambda base: tensors_of(run_with([base]))[index]


# ---------------------------------------------------------------------- on the rank that runs the op


class _Opaque:
    """A Python value that an op returned, announced as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Raised:
    """The error that an op ended with."""

    def __init__(self, error: Exception) -> None:
        try:
            self.error: Exception = pickle.loads(pickle.dumps(error))
        except Exception:
            self.error = RuntimeError(f"{type(error).__name__}: {error}")


def _describe(frame: Frame, name: str, result: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """The outcome to announce: a description of tensors, or a Python value."""
    try:
        outcome = describe(result, leaves)
    except NotDenseError as error:
        raise _not_dense(frame, name, error) from None
    if outcome.skeleton.opaque is None:
        return outcome
    if tensors_of(result):
        raise UnsupportedOperationError(
            f"'{name}' returned a {type(result).__name__} that holds tensors in a form that can't be seen",
            where=frame.where("glue"),
            remedy="return tensors in tuples, lists, dicts or dataclasses",
        )
    return _Opaque(result)


def _check(frame: Frame, name: str, derived: Outcome, result: Any) -> None:
    """The real op must return what was derived; a difference is a fault of the op's fake version."""
    real = tensors_of(result)
    for d, r in zip(derived.specs, real, strict=True):
        if d.shape != r.shape or d.dtype != r.dtype or d.requires_grad != carries_grad(r):
            raise PipelineError(
                f"'{name}' returned {spec_of(r)}, but its description for other ranks is {d}",
                where=frame.where("glue"),
                remedy="put the operation into an nn.Module, whose results are announced by its owner",
            )


def _versions(values: Sequence[Value]) -> list[int]:
    """Values are immutable: an op that writes to an operand without saying so by its name can't be followed."""
    return [v.tensor._version for v in values if v.tensor is not None and not v.tensor.is_inference()]


def _changes_operand(frame: Frame, name: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"'{name}' changes an operand in place in a way that can't be followed",
        where=frame.where("glue"),
        remedy="clone() the operand inside it, or put it into an nn.Module that runs on one stage",
    )


def _not_dense(frame: Frame, name: str, error: NotDenseError) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"'{name}' returned a tensor of layout {error}",
        where=frame.where("glue"),
        remedy="use such tensors inside one module, and return dense ones",
    )
