"""Views and in-place changes of placed tensors: the functionalisation rule.

A view remembers the object it views and how it was made. An in-place op computes a new value of that object from
a copy; the object points to the new value, its version counts up, and each live view is made again when it is
next read. Tape entries hold value ids, so what was recorded before still means the old value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.placed import PlacedTensor, Value, adopt
from shardwright.pipeline.shared import resolve_foreign
from shardwright.pipeline.spec import spec_of

if TYPE_CHECKING:
    from shardwright.pipeline.frame import Frame


class Make:
    """How a view is made from its base; `key` says the same in comparable form (None: not cacheable).

    tracked: gradients flow through it (no step was made under no_grad, and none detaches).
    """

    __slots__ = ("key", "steps", "tracked")

    def __init__(self, steps: tuple[Callable[[Any], Any], ...], key: Any, tracked: bool) -> None:
        self.steps = steps
        self.key = key
        self.tracked = tracked

    def __call__(self, base: Any) -> Any:
        with torch.set_grad_enabled(self.tracked):
            for step in self.steps:
                base = step(base)
        return base

    def then(self, step: Callable[[Any], Any], key: Any, tracked: bool) -> Make:
        joined = None if self.key is None or key is None else (self.key, key, tracked)
        return Make((*self.steps, step), joined, self.tracked and tracked)


_NOTHING = Make((), (), True)


def resolve(frame: Frame, placed: PlacedTensor) -> Value:
    """The value that an object stands for now, usable in this microbatch."""
    parent = placed._parent
    if parent is not None and placed._parent_version != parent._version_count:
        from shardwright.pipeline.glue import apply

        make = placed._make
        assert make is not None
        # The mode that the view was made in counts, not that of the code that reads it.
        with torch.set_grad_enabled(make.tracked):
            fresh = apply(frame, "view", lambda xs: make(xs[0]), [parent], ("view", make.key), make.key is not None)
        placed._value = fresh._value
        placed._parent_version = parent._version_count
    value = placed._value
    if value.frame is frame:
        return value
    now = resolve_foreign(frame, placed)
    value = now._value
    return value if value.frame is frame else frame.adopt_foreign(now)


def detach_foreign(frame: Frame, placed: PlacedTensor) -> PlacedTensor:
    """What `detach` makes of a tensor that another microbatch has left."""
    now = resolve_foreign(frame, placed)
    if now._value.frame is frame:
        return PlacedTensor.of(frame.detached(now._value))
    return PlacedTensor.of(frame.adopt_foreign(now, detach=True))


def link_view(view: PlacedTensor, base: PlacedTensor, step: Callable[[Any], Any], key: Any, tracked: bool) -> None:
    """Record that `view` is `step(base)`."""
    root, make = (base, _NOTHING) if base._parent is None else (base._parent, base._make)
    assert make is not None
    view._parent = root
    view._make = make.then(step, key, tracked)
    view._parent_version = root._version_count
    view._untracked = base._untracked
    _add_view(root, view)


def cannot_follow(placed: PlacedTensor, why: str) -> None:
    """The memory of this object, and of what it is a view of, is shared in a way that in-place changes can't follow."""
    placed._untracked = why
    if placed._parent is not None:
        placed._parent._untracked = why


def _add_view(root: PlacedTensor, view: PlacedTensor) -> None:
    if root._views is None:
        root._views = weakref.WeakValueDictionary()
    root._views[id(view)] = view


def live_views(root: PlacedTensor) -> list[PlacedTensor]:
    """Views of an object that somebody still holds."""
    return [] if root._views is None else list(root._views.values())


def change(
    frame: Frame, label: str, op: Callable[[Any, list[Any]], Any], target: PlacedTensor, others: list[Any], key: Any
) -> None:
    """Apply the in-place `op(target, others)`: the target, its base and every live view see the new value.

    As in one process, a change under no_grad changes the value and leaves the gradient's way as it was.
    """
    from shardwright.pipeline.glue import apply

    root = target if target._parent is None else target._parent
    why = target._untracked or root._untracked
    if why is not None:
        raise UnsupportedOperationError(
            f"in-place '{label}' on a tensor whose memory is shared: {why}",
            where=frame.where("glue"),
            remedy=f"use the out-of-place form of '{label}', or clone() the tensor first",
        )
    make = _NOTHING if target._parent is None else target._make
    assert make is not None
    if not make.tracked and torch.is_grad_enabled() and any(resolve(frame, o).spec.requires_grad for o in others):
        raise UnsupportedOperationError(
            f"in-place '{label}' writes values that require grad into a detached view of another tensor",
            where=frame.where("glue"),
            remedy=f"use the out-of-place form of '{label}', or clone() the detached tensor first",
        )

    def changed(operands: list[Any]) -> Any:
        with torch.enable_grad():
            whole = operands[0].clone()
        op(make(whole), operands[1:])
        return whole

    cacheable = key is not None and make.key is not None
    fresh = apply(frame, label, changed, [root, *others], ("change", key, make.key, make.tracked), cacheable)
    root._value = fresh._value
    root._version_count += 1


def reshape(frame: Frame, label: str, step: Callable[[Any], Any], target: PlacedTensor, key: Any) -> None:
    """Change the shape of an object in place: it becomes a view of what it was, and shares its changes."""
    from shardwright.pipeline.glue import apply

    if any(t is target for t in frame.converted):
        raise UnsupportedOperationError(
            f"in-place '{label}' on an ordinary tensor that a placed one was written into",
            where=frame.where("glue"),
            remedy=f"use the out-of-place form of '{label}'",
        )
    base = PlacedTensor.of(resolve(frame, target))
    base._untracked = target._untracked
    if target._parent is not None:
        base._parent, base._make, base._parent_version = target._parent, target._make, target._parent_version
    for view in live_views(target):
        view._parent = base
        view._parent_version += base._version_count - target._version_count
        _add_view(base, view)
    target._views = None
    with torch.enable_grad():  # it is still the same tensor
        fresh = apply(frame, label, lambda xs: step(xs[0]), [base], ("reshape", key), key is not None)
    target._value = fresh._value
    link_view(target, base, step, key, tracked=True)


def become(target: PlacedTensor, fresh: PlacedTensor) -> None:
    """Let `target` point to the value of `fresh` from here on; its views stay what they are."""
    target._value = fresh._value
    target._parent, target._make = fresh._parent, fresh._make
    target._parent_version = fresh._parent_version


def convert(frame: Frame, tensor: torch.Tensor, label: str) -> PlacedTensor:
    """An ordinary tensor is changed in place by a placed one: from now on it is placed itself.

    Every rank holds its value. One that this microbatch didn't make may be shared by others, which take turns; when
    the step ends it is an ordinary tensor again, with the new value everywhere.
    """
    made_here = frame.made(tensor)
    if not made_here:
        frame.in_order(tensor)
        if type(tensor) is PlacedTensor:  # by a microbatch before this one
            return tensor
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
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))  # whoever reads it in a way that can't be seen shall not find the old value
    tensor.__class__ = PlacedTensor
    adopt(tensor, value)
    if not made_here:
        frame.converted.append(tensor)
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
