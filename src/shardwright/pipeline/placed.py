"""The placed tensor: what glue code sees of a value that one rank of the pipeline group holds.

A `Value` is immutable and has an id; a `PlacedTensor` is the Python object that points to one. In-place code
moves the object to a new value, so tape entries that refer to the old one stay right (the functionalisation
rule, see `aliasing`).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

from shardwright.errors import PipelineError, UnsupportedOperationError
from shardwright.pipeline.spec import Spec

if TYPE_CHECKING:
    from shardwright.pipeline.aliasing import Make
    from shardwright.pipeline.frame import Frame


class Value:
    """One immutable value of one microbatch.

    id: position in the order in which values appear in the program, equal on all ranks of the group.
    holder: pp rank that computed it.   copies: pp ranks that hold it (the holder, and whoever was sent it).
    tensor: the real tensor on ranks in `copies`, None elsewhere.
    born: `copies` at the start; what other microbatches, which may be further along, can rely on.
    """

    __slots__ = ("born", "copies", "frame", "holder", "id", "spec", "tensor")

    def __init__(self, frame: Frame, id: int, spec: Spec, holder: int, tensor: torch.Tensor | None) -> None:
        self.frame = frame
        self.id = id
        self.spec = spec
        self.holder = holder
        self.copies = {holder}
        self.born = frozenset(self.copies)
        self.tensor = tensor


class PlacedTensor(torch.Tensor):
    """A tensor whose value one rank holds; every rank of the pipeline group has this object.

    Ops on it are caught by the glue mode of the running step. Anywhere else it can't be used, and says so.
    """

    _value: Value
    # A view: the object it is a view of, how it was made, and the parent's version when it was last read.
    _parent: PlacedTensor | None
    _make: Make | None
    _parent_version: int
    # Counts in-place changes of this object.
    _version_count: int
    # Live views of this object, by id; None before the first.
    _views: weakref.WeakValueDictionary[int, PlacedTensor] | None
    # Why an in-place change would not be seen by everyone who should see it, or None.
    _untracked: str | None

    @staticmethod
    def of(value: Value) -> PlacedTensor:
        spec = value.spec
        placed = torch.Tensor._make_wrapper_subclass(
            PlacedTensor, spec.shape, dtype=spec.dtype, device=value.frame.device
        )
        adopt(placed, value)
        return placed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALWAYS_ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _misplaced(getattr(func, "__name__", str(func)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _misplaced(str(func))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedOperationError(
            "copy.deepcopy of a tensor that is placed on a pipeline stage", remedy="use tensor.clone()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedOperationError(
            "pickling a tensor that is placed on a pipeline stage",
            remedy="return it from the step function; StepOutput holds real tensors",
        )


def adopt(placed: Any, value: Value) -> None:
    """Make a tensor object point to `value`, with no view of another object behind it."""
    placed._value = value
    placed._parent = None
    placed._make = None
    placed._parent_version = 0
    placed._version_count = 0
    placed._untracked = None
    placed._views = None


class _Local(threading.local):
    frame: Frame | None = None
    native: bool = False


_local = _Local()


def current_frame() -> Frame | None:
    """The microbatch whose glue this thread runs, or None (outside a step, and inside units and ops)."""
    return None if _local.native else _local.frame


def enter_frame(frame: Frame | None) -> None:
    """Bind this thread to a microbatch (None: to no one)."""
    _local.frame = frame


class glue_off:
    """While open, this thread's calls go straight to torch: for real code, and for our own between its calls."""

    __slots__ = ("_mode",)

    mode: ClassVar[type | None] = None

    def __enter__(self) -> None:
        depth = _len_torch_function_stack()
        on_top = depth > 0 and type(_get_function_stack_at(depth - 1)) is glue_off.mode
        self._mode = _pop_torch_function_stack() if on_top else None

    def __exit__(self, *exc: object) -> None:
        if self._mode is not None:
            _push_on_torch_function_stack(self._mode)


class native(glue_off):
    """While open, this thread runs real code on real tensors: units and ops on the rank that owns them."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _local.native
        _local.native = True
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        _local.native = self._before
        super().__exit__(*exc)


_ALWAYS_ALLOWED = {torch.Tensor.__hash__}


def _misplaced(op: str) -> PipelineError:
    if _local.native:
        return UnsupportedOperationError(
            f"'{op}' met a tensor of another stage inside a module that runs as one unit: the tensor came in by a"
            " way that can't be seen (a closure, a global, an attribute set by another module)",
            remedy="pass it as an argument of the module's forward",
        )
    if _local.frame is not None:
        return UnsupportedOperationError(
            f"'{op}' reached a tensor of another stage in a way that torch functions don't see (torch.func, a compiled"
            " extension)",
            where=_local.frame.where("glue"),
            remedy="call it inside a module that runs on one stage",
        )
    return PipelineError(
        f"'{op}' was called on a tensor that belongs to a pipeline step, outside the step function",
        remedy="return the tensor from the step function and use the StepOutput, or .item() inside the step",
    )
