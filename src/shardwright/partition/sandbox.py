"""Run a model's forward and leave everything as it was.

Restored: random state, every attribute of every module (parameters, buffers, hooks, flags, and the entries of
lists, dicts and sets kept as attributes), values written into parameters and buffers, `.grad` and
`requires_grad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.topology import rng


@contextmanager
def untouched(module: nn.Module, *, keep_values: bool) -> Iterator[None]:
    """Everything the body does to `module` and to random state is undone, however the body ends.

    keep_values: also put back what is written in place (not needed where the body works on stand-ins).
    Called by: one rank, before its first step. Collectives: none.
    """
    random_state = rng.capture()
    attributes = [(found, _remember(vars(found))) for found in module.modules()]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    values = [(tensor, tensor.detach().clone()) for tensor in _written(module)] if keep_values else []
    try:
        yield
    finally:
        for found, remembered in attributes:
            _restore(vars(found), remembered)
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, requires_grad, grad in flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad
        rng.restore(random_state)


def silence_hooks(module: nn.Module) -> None:
    """Take away forward hooks, which may write to places that nobody can restore, such as a list in the script.

    Kept are torch's own that compute a weight before each call. `untouched` puts the others back.
    """
    for found in module.modules():
        for hooks in (found._forward_hooks, found._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if not type(hook).__module__.startswith("torch.nn.utils.")]:
                del hooks[key]


def stand_in(value: Tensor, device: torch.device) -> Tensor:
    """A fresh tensor (or parameter) like `value` but without its data; called inside a fake tensor mode."""
    with torch.no_grad():
        empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty.requires_grad_(value.requires_grad)


def replace_tensors(module: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """Put stand-ins in place of all parameters and buffers; the same object where the same object was.

    Returns: stand-ins by id of the original. `untouched` puts the originals back.
    """
    made: dict[int, Tensor] = {}
    for found in module.modules():
        for table in (found._parameters, found._buffers):
            for name, value in table.items():
                if value is not None:
                    if id(value) not in made:
                        made[id(value)] = stand_in(value, device)
                    table[name] = made[id(value)]  # type: ignore[assignment]
    return made


def _written(module: nn.Module) -> list[Tensor]:
    """What a forward writes in place: buffers, and the weights of embeddings that renormalise what they look
    up."""
    renormalised = [
        found.weight for found in module.modules() if getattr(found, "max_norm", None) is not None
    ]
    return [*module.buffers(), *(weight for weight in renormalised if isinstance(weight, Tensor))]


def _remember(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (value, _entries(value)) for name, value in attributes.items()}


def _entries(value: Any) -> Any:
    """A shallow copy of a plain collection, else None."""
    if isinstance(value, list | set | dict) and type(value).__module__ in ("builtins", "collections"):
        return value.copy()
    return None


def _restore(attributes: dict[str, Any], remembered: dict[str, tuple[Any, Any]]) -> None:
    attributes.clear()
    for name, (value, entries) in remembered.items():
        if entries is not None:
            value.clear()
            if isinstance(value, list):
                value.extend(entries)
            else:
                value.update(entries)
        attributes[name] = value
