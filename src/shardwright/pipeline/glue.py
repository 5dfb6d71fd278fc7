"""The rule for glue: what happens to each torch function called between units.

A function mode sees every call that the step body and the forwards of split modules make.

- No placed operand: it runs as it is, on every rank, for it is the same there.
- A question about the spec (shape, dtype, ...) is answered from the spec.
- A value that Python must see is computed by its holder and announced.
- Anything else runs on one rank, the one to which the fewest bytes must travel; elsewhere only the spec of the
  result is derived, from a run on fake tensors, or announced where fake tensors can't tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from shardwright.errors import PipelineError, UnsupportedOperationError
from shardwright.pipeline import aliasing, glue_rules
from shardwright.pipeline.derive import CannotDeriveError, Outcome, derive, describe
from shardwright.pipeline.placed import PlacedTensor, Value, current_frame
from shardwright.pipeline.spec import ambient_key, spec_of
from shardwright.transport.structure import Builder

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame

_UNKNOWN = object()


class GlueMode(TorchFunctionMode):
    """Active while a microbatch's glue runs on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = current_frame()
        if frame is None:
            return func(*args, **(kwargs or {}))
        return run(frame, func, args, kwargs or {})


def run(frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call made by glue."""
    tensors: list[torch.Tensor] = []
    _gather(args, tensors)
    if kwargs:
        _gather(kwargs, tensors)
    registered = frame.runtime.registered
    if not any(type(t) is PlacedTensor or id(t) in registered for t in tensors):
        return func(*args, **kwargs)
    answer = glue_rules.META.get(func)
    if answer is not None:
        subject = args[0]
        if type(subject) is PlacedTensor:
            return answer(frame, aliasing.resolve(frame, subject).spec, *args[1:], **kwargs)
        if func in glue_rules.DEVICE_GETTERS and id(subject) in registered:
            return answer(frame, spec_of(subject))
        return func(*args, **kwargs)
    name = glue_rules.name_of(func)
    refusal = glue_rules.REFUSED.get(name)
    if refusal is not None:
        raise UnsupportedOperationError(
            f"'{name}' on a tensor that is placed on a pipeline stage", where=frame.where("glue"), remedy=refusal
        )
    if name in glue_rules.PLAIN_ON_PARAMETERS and type(args[0]) is not PlacedTensor:
        return func(*args, **kwargs)
    target = glue_rules.in_place_target(func, name, args, kwargs)
    if target is not None and type(target) is not PlacedTensor and id(target) in registered:
        return _change_registered(frame, func, name, args, kwargs, target)
    if target is not None:
        return _change(frame, func, name, target, args, kwargs)
    args, kwargs = _lift(frame, args, kwargs)
    if name in glue_rules.MOVES:
        moved = glue_rules.retarget_move(name, args, kwargs)
        if moved is None:
            return args[0]
        func, args, kwargs = torch.Tensor.to, (args[0], *moved[0]), moved[1]
    elif name == "iter":
        return iter(run(frame, torch.Tensor.unbind, (args[0],), {}))
    elif name == "data.get":
        func, args = torch.Tensor.detach, args[:1]
    elif name == "T.get":
        func, args = torch.Tensor.t, args[:1]
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": frame.device}
    return call(frame, func, name, args, kwargs)


def call(frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` as one call on one rank; its placed operands may be nested in lists, tuples, dicts and slices."""
    if name in glue_rules.INDEXING:
        args = glue_rules.masks_to_indices(args)
    operands: list[PlacedTensor] = []
    key_parts: list[Any] = []
    cacheable = _key_of(args, operands, key_parts) and _key_of(kwargs, operands, key_parts)
    key = (func, tuple(key_parts)) if cacheable else None

    def run_with(reals: list[Any]) -> Any:
        table = {id(p): r for p, r in zip(operands, reals, strict=True)}
        return func(*_swap(args, table), **_swap(kwargs, table))

    return apply(frame, name, run_with, operands, key, cacheable, values_only=name in glue_rules.VALUE_OPS)


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
    outcome = None if values_only else _outcome(frame, run_with, values, key, cacheable)
    for value in values:
        frame.fetch(value, owner)
    result = leaves = None
    if outcome is not None and outcome.alias and all(a is not None and a[1] for a in outcome.alias):
        placed = [operands[a[0]] for a in outcome.alias if a is not None]
        return Builder(placed, [], outcome.skeleton.cells).value(outcome.skeleton.root)
    tensors = None
    if frame.rank == owner:
        result, leaves = frame.run_here(run_with, values, streams)
        real = describe(result, leaves)
        if outcome is None:
            if real.skeleton.opaque is not None:
                outcome = _opaque_result(frame, name, result)
            else:
                outcome = real
            frame.announce(owner, outcome)
        else:
            _check(frame, name, outcome, real)
        tensors = _tensors_of(result)
    elif outcome is None:
        outcome = frame.announce(owner, None)
    if isinstance(outcome, _Opaque):
        frame.record(name, owner, values, (), (), None, None)
        return outcome.value
    made = frame.record(name, owner, values, outcome.specs, outcome.depends, tensors, leaves)
    return _wrap(name, run_with, key, operands, outcome, made)


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
    frame: Frame, run_with: Callable[[list[Any]], Any], values: Sequence[Value], key: Any, cacheable: bool
) -> Outcome | None:
    """The op's outcome from the cache or a fake run; None if only the holder can tell."""
    cache = frame.runtime.glue_cache
    full_key = None
    if cacheable:
        full_key = (key, tuple(v.spec for v in values), ambient_key(frame.device.type))
        known = cache.get(full_key, _UNKNOWN)
        if known is not _UNKNOWN:
            return known  # type: ignore[no-any-return]
    outcome: Outcome | None
    try:
        outcome = derive(run_with, [v.spec for v in values], frame.device)
        if outcome.skeleton.opaque is not None:
            outcome = None
    except CannotDeriveError:
        outcome = None
    if full_key is not None:
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
    for i, value in enumerate(made):
        alias = outcome.alias[i]
        if alias is not None and alias[1]:
            placed.append(operands[alias[0]])
            continue
        view = PlacedTensor.of(value)
        if alias is not None:
            if len(operands) == 1:
                aliasing.link_view(view, operands[0], _step(run_with, i), None if key is None else (key, i))
            else:
                view._untracked = f"'{name}' made it a view of one of several placed operands"
                operands[alias[0]]._untracked = f"'{name}' made a view of it that can't be followed"
        placed.append(view)
    return Builder(placed, [], outcome.skeleton.cells).value(outcome.skeleton.root)


def _step(run_with: Callable[[list[Any]], Any], index: int) -> Callable[[Any], Any]:
    return lambda base: _tensors_of(run_with([base]))[index]


def _tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    tensors: list[torch.Tensor] = []
    _gather(result, tensors)
    unique: dict[int, torch.Tensor] = {id(t): t for t in tensors}
    return list(unique.values())


class _Opaque:
    """A Python value that an op returned, announced as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _opaque_result(frame: Frame, name: str, result: Any) -> Any:
    tensors: list[torch.Tensor] = []
    _gather(result, tensors)
    if tensors:
        raise UnsupportedOperationError(
            f"'{name}' returned a {type(result).__name__} that holds tensors in a form that can't be seen",
            where=frame.where("glue"),
            remedy="return tensors in tuples, lists, dicts or dataclasses",
        )
    return _Opaque(result)


def _check(frame: Frame, name: str, derived: Outcome, real: Outcome) -> None:
    """The real op must return what was derived; a difference is a fault of the op's fake version."""
    for d, r in zip(derived.specs, real.specs, strict=True):
        if d.shape != r.shape or d.dtype != r.dtype or d.requires_grad != r.requires_grad:
            raise PipelineError(
                f"'{name}' returned {r}, but its description for other ranks is {d}",
                where=frame.where("glue"),
                remedy="put the operation into an nn.Module, whose results are announced by its owner",
            )


# ---------------------------------------------------------------------- in place


def _change(
    frame: Frame, func: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    args, kwargs = _lift(frame, args, kwargs)
    if type(target) is not PlacedTensor:
        target = aliasing.convert(frame, target, name)
    if name == "requires_grad_" or name == "requires_grad.set":
        return _set_requires_grad(frame, target, *args[1:], **kwargs)
    if name in glue_rules.METADATA_IN_PLACE:
        out_of_place = getattr(torch.Tensor, name[:-1])
        fresh = call(frame, out_of_place, name[:-1], (target, *args[1:]), kwargs)
        aliasing.replace(target, fresh, name)
        return target
    if name in glue_rules.INDEXING:
        args = glue_rules.masks_to_indices(args)
    others: list[PlacedTensor] = []
    key_parts: list[Any] = []
    probe = [a if a is not target else None for a in args]
    cacheable = _key_of(tuple(probe), others, key_parts) and _key_of(
        {k: v for k, v in kwargs.items() if v is not target}, others, key_parts
    )
    key = (func, tuple(key_parts)) if cacheable else None

    def op(view: Any, reals: list[Any]) -> Any:
        table = {id(p): r for p, r in zip(others, reals, strict=True)}
        table[id(target)] = view
        return func(*_swap(args, table), **_swap(kwargs, table))

    aliasing.change(frame, name, op, target, list(others), key)
    return None if name in ("setitem", "data.set") else target


def _set_requires_grad(frame: Frame, target: PlacedTensor, requires_grad: bool = True) -> PlacedTensor:
    value = aliasing.resolve(frame, target)
    if value.spec.requires_grad == requires_grad:
        return target
    if not requires_grad:
        raise UnsupportedOperationError(
            "requires_grad_(False) on an activation", where=frame.where("glue"), remedy="use detach()"
        )
    aliasing.replace(target, frame.new_leaf(value), "requires_grad_")
    return target


def _change_registered(
    frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.Tensor
) -> Any:
    """In-place change of a parameter or buffer by glue: done at once by its owner on the real one."""
    registered = frame.runtime.registered[id(target)]
    if registered.tensor.requires_grad and torch.is_grad_enabled() and name != "requires_grad_":
        raise UnsupportedOperationError(
            f"in-place '{name}' on the parameter '{registered.name}' with gradients enabled",
            where=frame.where("glue"),
            remedy="do it under torch.no_grad(), or outside the step",
        )
    if name in ("requires_grad_", "requires_grad.set", "data.set"):
        return func(*args, **kwargs)
    operands: list[PlacedTensor] = []
    parts: list[Any] = []
    lifted_args, lifted_kwargs = _lift(frame, tuple(None if a is target else a for a in args), kwargs)
    _key_of(lifted_args, operands, parts)
    _key_of(lifted_kwargs, operands, parts)
    values = [aliasing.resolve(frame, p) for p in operands]
    for value in values:
        frame.fetch(value, registered.owner)

    def change(reals: list[torch.Tensor]) -> list[torch.Tensor]:
        table = {id(p): r for p, r in zip(operands, reals, strict=True)}
        filled = [target if a is target else b for a, b in zip(args, _swap(lifted_args, table), strict=True)]
        func(*filled, **_swap(lifted_kwargs, table))
        return []

    if frame.rank == registered.owner:
        registered.before_change(frame.index)
        frame.run_here(change, values)
    frame.record(name, registered.owner, values, (), (), None, None)
    frame.forget_leaf(registered)
    return None if name == "setitem" else target


# ---------------------------------------------------------------------- nested operands


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            _gather(item, found)
        elif type(item) is slice:
            _gather((item.start, item.stop, item.step), found)


def _swap(value: Any, table: dict[int, Any]) -> Any:
    """`value` with every tensor whose id is in `table` replaced."""
    if isinstance(value, torch.Tensor):
        return table.get(id(value), value)
    if isinstance(value, tuple):
        if type(value) is tuple:
            return tuple(_swap(v, table) for v in value)
        if hasattr(value, "_fields"):
            return type(value)(*(_swap(v, table) for v in value))
        return value
    if isinstance(value, list):
        return [_swap(v, table) for v in value]
    if isinstance(value, dict):
        return {k: _swap(v, table) for k, v in value.items()}
    if type(value) is slice:
        return slice(_swap(value.start, table), _swap(value.stop, table), _swap(value.step, table))
    return value


def _lift(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Parameters, buffers and ordinary tensors that require grad become placed leaves."""
    tensors: list[torch.Tensor] = []
    _gather(args, tensors)
    _gather(kwargs, tensors)
    table: dict[int, Any] = {}
    for t in tensors:
        if type(t) is PlacedTensor or id(t) in table:
            continue
        registered = frame.runtime.registered.get(id(t))
        if registered is not None:
            table[id(t)] = frame.parameter_leaf(registered)
        elif t.requires_grad and torch.is_grad_enabled():
            table[id(t)] = frame.script_leaf(t)
    if not table:
        return args, kwargs
    return _swap(args, table), _swap(kwargs, table)


def _key_of(value: Any, operands: list[PlacedTensor], parts: list[Any]) -> bool:
    """Append a comparable description of `value` to `parts`; False if a part of it has none."""
    if type(value) is PlacedTensor:
        for i, known in enumerate(operands):
            if known is value:
                parts.append(("p", i))
                return True
        parts.append(("p", len(operands)))
        operands.append(value)
        return True
    if isinstance(value, torch.Tensor):
        parts.append(("t", spec_of(value)))
        return True
    if isinstance(value, (tuple, list)):
        parts.append((type(value), len(value)))
        ok = True
        for v in value:
            ok = _key_of(v, operands, parts) and ok
        return ok
    if isinstance(value, dict):
        parts.append((dict, tuple(value)))
        ok = True
        for v in value.values():
            ok = _key_of(v, operands, parts) and ok
        return ok
    if type(value) is slice:
        return _key_of((value.start, value.stop, value.step), operands, parts)
    parts.append((type(value), value))
    return value is None or isinstance(value, glue_rules.KEYABLE)
