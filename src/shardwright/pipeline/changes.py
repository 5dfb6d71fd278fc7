"""Glue that writes: in-place ops, item assignment, `out=`, setters of `data` and `requires_grad`.

Three kinds of target. A placed tensor is changed as `aliasing` says. An ordinary tensor becomes placed until the
step ends. A parameter or buffer is changed at once by its owner, on the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline import aliasing, glue_rules
from shardwright.pipeline.glue import run
from shardwright.pipeline.operands import Keyed, gather, lift, swap
from shardwright.pipeline.placed import PlacedTensor

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame
    from shardwright.pipeline.runtime import Registered


def change(frame: Frame, func: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The in-place call `func(*args, **kwargs)`, which writes to `target`, one of its arguments."""
    if not isinstance(target, torch.Tensor):
        raise UnsupportedOperationError(
            f"'{name}' changes a list of tensors in place", where=frame.where("glue"), remedy="change them one by one"
        )
    registered = frame.runtime.registered.get(id(target))
    if registered is not None:
        return _change_registered(frame, func, name, args, kwargs, registered)
    args, kwargs = lift(frame, args, kwargs)
    if type(target) is not PlacedTensor:
        target = aliasing.convert(frame, target, name)
    if name == "requires_grad_" or name == "requires_grad.set":
        return _set_requires_grad(frame, target, *args[1:], **kwargs)
    if name == "detach_":
        return _detach(frame, target)
    if name in glue_rules.METADATA_IN_PLACE:
        return _change_shape(frame, name, target, args[1:], kwargs)
    if name == "data.set":
        _check_data(frame, target, args[1])
    if name in glue_rules.INDEXING:
        args = glue_rules.plain_indices(args)
    keyed = Keyed(args, kwargs, skip=target, plain_numbers=name in glue_rules.ANY_NUMBER)
    others = keyed.operands

    def op(view: Any, reals: list[Any]) -> Any:
        table = {id(p): r for p, r in zip(others, reals, strict=True)}
        table[id(target)] = view
        return func(*swap(args, table), **swap(kwargs, table))

    aliasing.change(frame, name, op, target, others, (func, keyed.key) if keyed.cacheable else None)
    return None if name in ("setitem", "data.set") else target


def write_out(frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with `out=`: its results, copied into the tensors named there."""
    out = kwargs["out"]
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    targets = [out] if isinstance(out, torch.Tensor) else list(out)
    operands: list[torch.Tensor] = []
    gather((args, rest), operands)
    if torch.is_grad_enabled() and any(run(frame, _wants_grad, (t,), {}) for t in operands):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation,"
            " but one of the arguments requires grad."
        )
    with torch.no_grad():
        result = run(frame, func, args, rest)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for target, fresh in zip(targets, results, strict=True):
            have, want = run(frame, _shape, (target,), {}), run(frame, _shape, (fresh,), {})
            if have != want:
                if have.numel() > 0:
                    raise UnsupportedOperationError(
                        f"'{name}' with an out= tensor of shape {list(have)}, where the result is {list(want)}",
                        where=frame.where("glue"),
                        remedy="give it an out= tensor of the right shape",
                    )
                _become(frame, target, fresh)
            else:
                run(frame, torch.Tensor.copy_, (target, fresh), {})
    return out if isinstance(out, torch.Tensor) else type(result)(targets)


_wants_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


def _become(frame: Frame, target: Any, fresh: Any) -> None:
    """An empty tensor given as `out=` takes the shape of the result."""
    if type(target) is not PlacedTensor:
        target = aliasing.convert(frame, target, "out=")
    copy = run(frame, torch.Tensor.clone, (fresh,), {})
    aliasing.become(target, run(frame, torch.Tensor.to, (copy, target._value.spec.dtype), {}))


def _change_shape(frame: Frame, name: str, target: PlacedTensor, rest: Any, kwargs: dict[str, Any]) -> PlacedTensor:
    out_of_place = getattr(torch.Tensor, name[:-1])

    def step(base: Any) -> Any:
        return out_of_place(base, *rest, **kwargs)

    keyed = Keyed(rest, kwargs)
    if keyed.operands:
        raise UnsupportedOperationError(
            f"in-place '{name}' with a placed argument", where=frame.where("glue"), remedy=f"use '{name[:-1]}'"
        )
    aliasing.reshape(frame, name, step, target, (out_of_place, keyed.key) if keyed.cacheable else None)
    return target


def _set_requires_grad(frame: Frame, target: PlacedTensor, requires_grad: bool = True) -> PlacedTensor:
    value = aliasing.resolve(frame, target)
    if value.spec.requires_grad == requires_grad:
        return target
    if not requires_grad:
        raise UnsupportedOperationError(
            "requires_grad_(False) on an activation", where=frame.where("glue"), remedy="use detach()"
        )
    aliasing.become(target, frame.new_leaf(value))
    return target


def _detach(frame: Frame, target: PlacedTensor) -> PlacedTensor:
    value = aliasing.resolve(frame, target)
    if not value.spec.requires_grad:
        return target
    if target._parent is not None or aliasing.live_views(target):
        raise UnsupportedOperationError(
            "detach_() on a tensor that is a view or has views", where=frame.where("glue"), remedy="use detach()"
        )
    aliasing.become(target, frame.detached(value))
    return target


def _check_data(frame: Frame, target: PlacedTensor, data: Any) -> None:
    spec = run(frame, _shape, (data,), {})
    if target._parent is not None or aliasing.live_views(target) or spec != torch.Size(target._value.spec.shape):
        raise UnsupportedOperationError(
            "'.data = ...' on a tensor that is a view, has views, or had another shape",
            where=frame.where("glue"),
            remedy="use copy_() under torch.no_grad(), or a new name",
        )


def _change_registered(
    frame: Frame, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], registered: Registered
) -> Any:
    """In-place change of a parameter or buffer by glue: done at once by its owner on the real one."""
    target = registered.tensor
    if name in ("requires_grad_", "requires_grad.set", "data.set"):
        return func(*args, **kwargs)
    tracked = torch.is_grad_enabled()
    if registered.tensor.requires_grad and tracked:
        raise UnsupportedOperationError(
            f"in-place '{name}' on the parameter '{registered.name}' with gradients enabled",
            where=frame.where("glue"),
            remedy="do it under torch.no_grad(), or outside the step",
        )
    lifted_args, lifted_kwargs = lift(frame, tuple([None if a is target else a for a in args]), kwargs)
    operands = Keyed(lifted_args, lifted_kwargs).operands
    values = [aliasing.resolve(frame, p) for p in operands]
    if tracked and any(v.spec.requires_grad for v in values):
        raise UnsupportedOperationError(
            f"in-place '{name}' writes values that require grad into the buffer '{registered.name}'",
            where=frame.where("glue"),
            remedy="detach() them, or do it under torch.no_grad()",
        )
    frame.buffer_changes(registered)
    for value in values:
        frame.fetch(value, registered.owner)

    def write(reals: list[torch.Tensor]) -> list[torch.Tensor]:
        table = {id(p): r for p, r in zip(operands, reals, strict=True)}
        filled = [target if a is target else b for a, b in zip(args, swap(lifted_args, table), strict=True)]
        func(*filled, **swap(lifted_kwargs, table))
        return []

    if frame.rank == registered.owner:
        frame.run_here(write, values)
    frame.record(name, registered.owner, values, (), (), None, None)
    frame.forget_leaf(registered)
    return None if name == "setitem" else target
