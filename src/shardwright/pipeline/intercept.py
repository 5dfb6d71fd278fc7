"""Calls that bypass torch functions, caught while a step over several stages runs.

`autograd.Function.apply` on placed tensors becomes one glue call that runs natively, with its `ctx`, on the rank that
holds the data. `torch.utils.checkpoint` around glue becomes checkpointing of every unit called inside: nothing
re-enters a transfer during backward. `torch.autograd.backward` is refused by name (`grad` is a torch function, and
is refused in `glue_rules`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import Function
from torch.overrides import handle_torch_function

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.placed import PlacedTensor, current_frame

_lock = threading.Lock()
_depth = 0
_apply: Any = Function.__dict__["apply"]
_plain_generator: Callable[..., Any] = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_plain_backward: Callable[..., Any] = torch.autograd.backward
_as_functions: dict[type, Callable[..., Any]] = {}


@contextmanager
def installed() -> Iterator[None]:
    """While open, the calls above are caught on threads that run glue; other threads notice nothing."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            Function.apply = classmethod(_apply_in_glue)  # type: ignore[method-assign, assignment]
            torch.utils.checkpoint._checkpoint_without_reentrant_generator = _checkpoint_in_glue
            torch.autograd.backward = _backward_in_glue
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                Function.apply = _apply  # type: ignore[method-assign]
                torch.utils.checkpoint._checkpoint_without_reentrant_generator = _plain_generator
                torch.autograd.backward = _plain_backward


def _apply_in_glue(cls: type, *args: Any, **kwargs: Any) -> Any:
    frame = current_frame()
    if frame is None:
        return _apply.__func__(cls, *args, **kwargs)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        function, _preserve_rng_state, *inputs = args
        frame.checkpointing += 1
        try:
            return function(*inputs)
        finally:
            frame.checkpointing -= 1
    return handle_torch_function(_as_function(cls), (), *args, **kwargs)


def _as_function(cls: type) -> Callable[..., Any]:
    """`cls.apply` as one function object per class, with the class's name."""
    known = _as_functions.get(cls)
    if known is None:

        def apply(*args: Any, **kwargs: Any) -> Any:
            return _apply.__func__(cls, *args, **kwargs)

        apply.__name__ = f"{cls.__name__}.apply"
        known = _as_functions[cls] = apply
    return known


def _checkpoint_in_glue(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    frame = current_frame()
    if frame is None:
        yield from _plain_generator(function, *args, **kwargs)
        return
    frame.checkpointing += 1
    try:
        yield
    finally:
        frame.checkpointing -= 1


def _backward_in_glue(tensors: Any, *args: Any, **kwargs: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if current_frame() is not None and any(type(t) is PlacedTensor for t in given):
        raise UnsupportedOperationError(
            "torch.autograd.backward on a tensor that is placed on a pipeline stage",
            remedy="call model.backward(loss) inside the step function",
        )
    _plain_backward(tensors, *args, **kwargs)
