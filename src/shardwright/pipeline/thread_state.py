"""What torch and Python keep per thread, copied from the caller of a step to the threads of its
microbatches."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

_Result = TypeVar("_Result")


class ThreadState:
    """The state of the thread that makes this: grad and inference mode, autocast, saved-tensor hooks,
    function modes (such as `with torch.device(...)`), CUDA device and stream, and context variables."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._modes: list[Any] = _get_current_function_mode_stack()
        self._context = contextvars.copy_context()
        self._cuda_stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` on the current thread under this state; what it changes ends with it."""
        with self._applied():
            return self._context.copy().run(function)

    def _applied(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        if not self._inference:
            stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, enabled, dtype in self._autocast:
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            stack.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(self._autocast_cache)
        if self._saved_tensors_hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._saved_tensors_hooks)
            stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
        stack.callback(_pop_modes_down_to, _len_torch_function_stack())
        for mode in self._modes:
            # Not by `with mode`: some modes keep what they found in themselves, and they are entered already.
            _push_mode(mode)
        if self._cuda_stream is not None:
            stack.enter_context(torch.cuda.stream(self._cuda_stream))  # of its device, too
        return stack


def _pop_modes_down_to(number: int) -> None:
    """Remove function modes from this thread, and those that were left behind."""
    while _len_torch_function_stack() > number:
        _pop_mode()
