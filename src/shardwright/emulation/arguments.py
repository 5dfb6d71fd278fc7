"""Devices among the arguments of torch functions: what names a CUDA device is read as the CPU.

A function mode at the bottom of every thread's stack. So it comes after the modes of the library and the script, and
sees what they pass on; and the functions themselves stay what they are, for those who look them up in tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def on_cpu(device: Any) -> Any:
    """Return the CPU for whatever names a CUDA device (number, string or `torch.device`), and all else as it is."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


class CudaIsCpu(TorchFunctionMode):
    """While entered, this thread's torch functions take CUDA devices for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        if not kwargs:
            return func(*args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args:
        args = (on_cpu(args[0]), *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = on_cpu(kwargs["device"])
    return tensor.to(*args, **kwargs)


def _cuda(
    tensor: Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    return tensor.to(_CPU, non_blocking=non_blocking, memory_format=memory_format)


def _type(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return tensor.type(dtype, non_blocking, **kwargs) if dtype is not None else tensor.type()


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.type: _type,
    Tensor.pin_memory: lambda tensor, device=None: tensor,
}


def cover_backward() -> None:
    """Stay entered in what autograd calls (hooks, recomputed forwards): `Tensor.backward` is itself seen by the mode,
    which is not active while it handles a call."""
    run = torch.autograd._engine_run_backward

    def run_covered(*args: Any, **kwargs: Any) -> Any:
        with CudaIsCpu():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_covered


def cover_threads() -> None:
    """Enter the mode on this thread for good, and on every thread that is started from now on."""
    CudaIsCpu().__enter__()
    start = threading.Thread.start

    def start_covered(self: threading.Thread) -> None:
        run = self.run

        def run_covered() -> None:
            with CudaIsCpu():
                run()

        self.run = run_covered  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_covered  # type: ignore[method-assign]
