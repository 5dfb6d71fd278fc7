"""Calls that bypass torch functions, caught while a step over several stages runs.

`autograd.Function.apply` on placed tensors becomes one glue call that runs natively, with its `ctx`, on the rank that
holds the data; so does a function compiled by `torch.jit`. `torch.utils.checkpoint` around glue becomes checkpointing
of every unit called inside: nothing re-enters a transfer during backward. `torch.autograd.backward` is refused by name
(`grad` is a torch function, and is refused in `glue_rules`). A compiled function called in glue runs as it was written,
as glue; inside units it stays compiled. An assignment to a module's attribute counts for its microbatch (`overlay`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import Function
from torch.overrides import handle_torch_function

from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.placed import PlacedTensor, current_frame

_lock = threading.Lock()
_depth = 0
_apply: Any = Function.__dict__["apply"]
_plain_generator: Callable[..., Any] = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_plain_backward: Callable[..., Any] = torch.autograd.backward
_plain_setattr: Any = nn.Module.__setattr__
_plain_init: Any = nn.Module.__init__
_plain_compile: Callable[..., Any] = torch.compile
_plain_callback: Callable[..., Any] | None = None
_plain_script: Callable[..., Any] = torch._C.ScriptFunction.__call__
_as_functions: dict[Any, Callable[..., Any]] = {}


@contextmanager
def installed() -> Iterator[None]:
    """While open, the calls above are caught on threads that run glue; other threads notice nothing."""
    global _depth, _plain_init, _plain_setattr
    with _lock:
        _depth += 1
        if _depth == 1:
            # as they are now: others wrap them too, at import or later
            _plain_init, _plain_setattr = nn.Module.__init__, nn.Module.__setattr__
            Function.apply = classmethod(_apply_in_glue)  # type: ignore[method-assign, assignment]
            torch.utils.checkpoint._checkpoint_without_reentrant_generator = _checkpoint_in_glue  # type: ignore[assignment]
            torch.autograd.backward = _backward_in_glue
            nn.Module.__setattr__ = _setattr_in_glue  # type: ignore[method-assign, assignment]
            nn.Module.__init__ = _init_in_glue  # type: ignore[method-assign, assignment]
            torch.compile = _compile_in_step
            torch._C.ScriptFunction.__call__ = _script_in_glue  # type: ignore[method-assign, assignment]
            _watch_compiled()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                Function.apply = _apply  # type: ignore[method-assign]
                torch.utils.checkpoint._checkpoint_without_reentrant_generator = _plain_generator
                torch.autograd.backward = _plain_backward
                nn.Module.__setattr__ = _plain_setattr  # type: ignore[method-assign]
                nn.Module.__init__ = _plain_init  # type: ignore[method-assign]
                torch.compile = _plain_compile
                torch._C.ScriptFunction.__call__ = _plain_script  # type: ignore[method-assign]
                _unwatch_compiled()


def _init_in_glue(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    frame = current_frame()
    if frame is not None:
        frame.runtime.overlay.is_new(module)
    _plain_init(module, *args, **kwargs)


def _setattr_in_glue(module: nn.Module, name: str, value: Any) -> None:
    frame = current_frame()
    if frame is None or name in module._buffers:  # buffers are kept in order by `shared`
        _plain_setattr(module, name, value)
    else:
        frame.runtime.overlay.assign(frame.index, module, name, value, _plain_setattr)


def _apply_in_glue(cls: type, *args: Any, **kwargs: Any) -> Any:
    frame = current_frame()
    if frame is None or _is_plain_within_vmap(args):
        return _apply.__func__(cls, *args, **kwargs)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        function, _preserve_rng_state, *inputs = args
        with frame.within_checkpoint():
            return function(*inputs)
    function = _as_function(cls, f"{cls.__name__}.apply", _apply.__func__)
    return handle_torch_function(function, (), *args, **kwargs)


def _is_plain_within_vmap(args: tuple[Any, ...]) -> bool:
    """Is this a call within `torch.vmap` (which switches function modes off), on ordinary tensors only?"""
    return not torch._C._is_torch_function_mode_enabled() and not any(type(a) is PlacedTensor for a in args)


def _script_in_glue(script: Any, *args: Any, **kwargs: Any) -> Any:
    if current_frame() is None:
        return _plain_script(script, *args, **kwargs)
    return handle_torch_function(_as_function(script, script.name, _plain_script), (), *args, **kwargs)


def _as_function(owner: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(owner, ...)` as one function object per owner, so that outcomes can be kept by it."""
    known = _as_functions.get(owner)
    if known is None:

        def function(*args: Any, **kwargs: Any) -> Any:
            return call(owner, *args, **kwargs)

        function.__name__ = name
        known = _as_functions[owner] = function
    return known


def _checkpoint_in_glue(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    frame = current_frame()
    if frame is None:
        yield from _plain_generator(function, *args, **kwargs)
        return
    with frame.within_checkpoint():
        yield


def _backward_in_glue(tensors: Any, *args: Any, **kwargs: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if current_frame() is not None and any(type(t) is PlacedTensor for t in given):
        raise UnsupportedOperationError(
            "torch.autograd.backward on a tensor that is placed on a pipeline stage",
            remedy="call model.backward(loss) inside the step function",
        )
    _plain_backward(tensors, *args, **kwargs)


def _watch_compiled() -> None:
    """Catch calls of compiled functions, if there can be any: torch imports what runs them with the first one."""
    global _plain_callback
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and hasattr(dynamo, "_callback_from_stance") and _plain_callback is None:
        _plain_callback = dynamo._callback_from_stance
        dynamo._callback_from_stance = _callback_in_step  # type: ignore[attr-defined]


def _unwatch_compiled() -> None:
    global _plain_callback
    if _plain_callback is not None:
        sys.modules["torch._dynamo.eval_frame"]._callback_from_stance = _plain_callback  # type: ignore[attr-defined]
        _plain_callback = None


def _callback_in_step(callback: Any) -> Any:
    """What a compiled function that is being called runs with: None stands for no compiler."""
    assert _plain_callback is not None
    return _plain_callback(callback) if current_frame() is None else None


def _compile_in_step(*args: Any, **kwargs: Any) -> Any:
    compiled = _plain_compile(*args, **kwargs)
    _watch_compiled()
    return compiled
