"""The hops between the wrapped model and the user's module, and what may be wrapped at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.errors import UsageError


class ForwardingModule(nn.Module):
    """A hop around another module that passes unknown attributes on to it."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


class DataParallelModule(ForwardingModule):
    """The hop between the wrapper and the user's module; it is there without data parallelism too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user module's forward."""
        return self.module(*args, **kwargs)


def check_can_wrap(module: nn.Module, wrapper: type[nn.Module], wrapped_already: object) -> None:
    """Raise UsageError unless this is a plain module, and the first one that is wrapped.

    wrapper: the class that wraps.   wrapped_already: the wrapped model of this process, or None.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"smp.DistributedModel takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, (wrapper, nn.parallel.DistributedDataParallel)):
        raise UsageError(f"the module is a {type(module).__name__} already", remedy="wrap the plain module, once")
    if wrapped_already is not None:
        raise UsageError("a model is wrapped already; one per process", remedy="train one model per script")
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise UsageError("script modules can't be split", remedy="wrap the module before torch.jit.script")
