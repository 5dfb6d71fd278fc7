"""Views and in-place changes of placed tensors: the functionalisation rule.

A view remembers the object it views and how it was made. An in-place op computes a new value of that object from
a copy; the object points to the new value, its version counts up, and each live view is made again when it is
next read. Tape entries hold value ids, so what was recorded before still means the old value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.placed import PlacedTensor, Value, adopt
from shardwright.pipeline.spec import spec_of

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame


class Make:
    """How a view is made from its base; `key` says the same in comparable form (None: not cacheable)."""

    __slots__ = ("key", "steps")

    def __init__(self, steps: tuple[Callable[[Any], Any], ...], key: Any) -> None:
        self.steps = steps
        self.key = key

    def __call__(self, base: Any) -> Any:
        for step in self.steps:
            base = step(base)
        return base

    def then(self, step: Callable[[Any], Any], key: Any) -> Make:
        joined = None if self.key is None or key is None else (self.key, key)
        return Make((*self.steps, step), joined)


_NOTHING = Make((), ())


def resolve(frame: Frame, placed: PlacedTensor) -> Value:
    """The value that an object stands for now, usable in this microbatch."""
    parent = placed._parent
    if parent is not None and placed._parent_version != parent._version_count:
        from shardwright.pipeline.glue import apply

        assert placed._make is not None
        make = placed._make
        fresh = apply(frame, "view", lambda xs: make(xs[0]), [parent], ("view", make.key), make.key is not None)
        placed._value = fresh._value
        placed._parent_version = parent._version_count
    value = placed._value
    return value if value.frame is frame else frame.adopt_foreign(placed)


def link_view(view: PlacedTensor, base: PlacedTensor, step: Callable[[Any], Any], key: Any) -> None:
    """Record that `view` is `step(base)`."""
    root, make = (base, _NOTHING) if base._parent is None else (base._parent, base._make)
    assert make is not None
    view._parent = root
    view._make = make.then(step, key)
    view._parent_version = root._version_count
    view._untracked = base._untracked
    root._views.add(view)


def change(
    frame: Frame, label: str, op: Callable[[Any, list[Any]], Any], target: PlacedTensor, others: list[Any], key: Any
) -> None:
    """Apply the in-place `op(target, others)`: the target, its base and every live view see the new value."""
    from shardwright.pipeline.glue import apply

    if target._untracked is not None:
        raise UnsupportedOperationError(
            f"in-place '{label}' on a tensor whose memory is shared: {target._untracked}",
            where=frame.where("glue"),
            remedy=f"use the out-of-place form of '{label}', or clone() the tensor first",
        )
    root = target if target._parent is None else target._parent
    make = _NOTHING if target._parent is None else target._make
    assert make is not None

    def changed(operands: list[Any]) -> Any:
        whole = operands[0].clone()
        op(make(whole), operands[1:])
        return whole

    cacheable = key is not None and make.key is not None
    fresh = apply(frame, label, changed, [root, *others], ("change", key, make.key), cacheable)
    root._value = fresh._value
    root._version_count += 1


def replace(target: PlacedTensor, fresh: PlacedTensor, label: str) -> None:
    """Let `target` become `fresh` (in-place changes of shape or of requires_grad)."""
    if len(target._views) and label != "requires_grad_":
        raise UnsupportedOperationError(
            f"in-place '{label}' on a tensor that has views", remedy=f"use the out-of-place form of '{label}'"
        )
    target._value = fresh._value
    target._parent, target._make = fresh._parent, fresh._make
    target._parent_version = fresh._parent_version
    target._version_count += 1


def convert(frame: Frame, tensor: torch.Tensor, label: str) -> PlacedTensor:
    """An ordinary tensor is changed in place by a placed one: from now on it is placed itself.

    Every rank holds its value. When the step ends it is an ordinary tensor again, with the new value everywhere.
    """
    shared = tensor._is_view() or _num_users(tensor) > 2 or type(tensor) is not torch.Tensor
    if shared or tensor.requires_grad:
        raise UnsupportedOperationError(
            f"in-place '{label}' writes a placed tensor into an ordinary one of shape {list(tensor.shape)} that is a"
            " view, has views, or requires grad",
            where=frame.where("glue"),
            remedy=f"use the out-of-place form of '{label}'",
        )
    value = frame.new_value(spec_of(tensor), 0, tensor.detach().clone())
    value.copies = set(range(frame.runtime.size))
    value.born = frozenset(value.copies)
    tensor.__class__ = PlacedTensor
    adopt(tensor, value)
    frame.runtime.converted.append(tensor)
    return tensor  # type: ignore[return-value]


def restore(tensor: Any, final: torch.Tensor) -> None:
    """Undo `convert`: an ordinary tensor again, holding `final`."""
    for name in ("_value", "_parent", "_make", "_parent_version", "_version_count", "_untracked", "_views"):
        tensor.__dict__.pop(name, None)
    tensor.__class__ = torch.Tensor
    if tensor.shape == final.shape and tensor.dtype == final.dtype:
        tensor.copy_(final)
    else:
        tensor.data = final


def _num_users(tensor: torch.Tensor) -> int:
    """How many tensors use this memory; a tensor of its own counts 2 (itself and the storage asked here)."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
