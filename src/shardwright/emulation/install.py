"""Put the emulation in place, in this process, for good."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import DeviceContext

from shardwright.emulation import arguments, cuda_functions

active = False
"""Is CUDA emulated in this process?"""

unneeded = False
"""Was it asked for where there are real devices?"""


def install() -> None:
    """Emulate CUDA, unless there are real devices.

    Called by: `startup.begin`, once torch is imported.
    """
    global active, unneeded
    if active or unneeded:
        return
    if torch.cuda.is_available():
        unneeded = True
        return
    active = True
    _replace_functions()
    _replace_tensor_types()
    _replace_generator()
    _let_default_devices_be_the_cpu()
    _widen_autocast()
    _read_files_to_cpu()
    _use_gloo()
    arguments.cover_backward()
    arguments.cover_threads()
    # Data loaders don't pin on a machine without accelerators, and say so at each start.
    warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true")


def _replace_functions() -> None:
    places = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
    for name, replacement in vars(cuda_functions).items():
        if name.startswith("_"):
            continue
        for place in places:
            if hasattr(place, name) and not inspect.ismodule(getattr(place, name)):
                setattr(place, name, replacement)
    # Refuses a stream that isn't torch's own before any function mode can see it.
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]
    for name in ("mark", "range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)


def _replace_tensor_types() -> None:
    for name in dir(torch.cuda):
        if name.endswith("Tensor") and hasattr(torch, name):
            setattr(torch.cuda, name, getattr(torch, name))


def _replace_generator() -> None:
    real = torch.Generator

    class _Kind(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=_Kind):  # type: ignore[misc, valid-type]
        """A generator of the CPU, also where one of a CUDA device is asked for."""

        def __new__(cls, device: Any = None) -> Any:
            return real() if device is None else real(arguments.on_cpu(device))

    torch.Generator = Generator  # type: ignore[misc]


def _let_default_devices_be_the_cpu() -> None:
    """`with torch.device("cuda"):` and `torch.set_default_device`, which act below all other function modes."""
    prepare = DeviceContext.__init__

    @functools.wraps(prepare)
    def prepare_for_cpu(self: Any, device: Any) -> None:
        prepare(self, arguments.on_cpu(device))

    DeviceContext.__init__ = prepare_for_cpu  # type: ignore[method-assign]


def _widen_autocast() -> None:
    """`autocast("cuda")` casts on the CPU as well, to the same dtype."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    @functools.wraps(enter)
    def enter_both(self: Any) -> Any:
        result = enter(self)
        if self.device == "cuda":
            on_cpu = torch.autocast("cpu", self.fast_dtype, self._enabled, self._cache_enabled)
            self.__dict__.setdefault("_on_cpu", []).append(on_cpu)
            on_cpu.__enter__()
        return result

    @functools.wraps(leave)
    def leave_both(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            self._on_cpu.pop().__exit__(*error)
        return leave(self, *error)

    torch.autocast.__enter__ = enter_both  # type: ignore[method-assign]
    torch.autocast.__exit__ = leave_both  # type: ignore[method-assign]


def _read_files_to_cpu() -> None:
    """`torch.load`: what was on a CUDA device, or is to get there, comes to the CPU."""
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, place: storage if place.startswith("cuda") else None
    )
    stay: Callable[..., Any] = lambda self, device=None, non_blocking=False: self  # noqa: E731
    torch.storage.UntypedStorage.cuda = torch.storage.TypedStorage.cuda = stay  # type: ignore[method-assign]


def _use_gloo() -> None:
    """Groups that a script makes by itself for NCCL are made for gloo."""
    make, make_another, barrier = dist.init_process_group, dist.new_group, dist.barrier

    def by_gloo(backend: Any) -> Any:
        return backend.replace("nccl", "gloo") if isinstance(backend, str) else backend

    @functools.wraps(make)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make(by_gloo(backend), *args, **kwargs)

    @functools.wraps(make_another)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = by_gloo(kwargs["backend"])
        return make_another(*args, **kwargs)

    @functools.wraps(barrier)
    def barrier_without_devices(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return barrier(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist.new_group = new_group
    dist.barrier = barrier_without_devices
