"""Run a model's forward and leave everything as it was.

Restored: random state, every attribute of every module (parameters, buffers, hooks, flags), the entries of lists, dicts
and sets and the attributes of other objects within reach of them, values written into parameters and buffers, `.grad`
and `requires_grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from shardwright.topology import rng

# Hooks on the calls of all modules.
_GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
)


@contextmanager
def untouched(module: nn.Module, *, keep_values: bool) -> Iterator[None]:
    """Everything the body does to `module` and to random state is undone, however the body ends.

    keep_values: also put back what is written in place to parameters and buffers (not needed where the body works on
    stand-ins of them).
    Called by: one rank, before its first step. Collectives: none.
    """
    random_state = rng.capture()
    everywhere = [(hooks, hooks.copy()) for hooks in _GLOBAL_HOOKS]
    attributes = [(found, vars(found).copy()) for found in module.modules()]
    things, loose = _within_reach([value for _, remembered in attributes for value in remembered.values()])
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    written = [*loose, *_written(module)] if keep_values else loose
    values = [(tensor, tensor.detach().clone()) for tensor in written]
    try:
        yield
    finally:
        for hooks, before in everywhere:
            hooks.update(before)
        for thing, before in things:
            _put_back(thing, before)
        for found, remembered in attributes:
            _put_back(vars(found), remembered)
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
    for everywhere in _GLOBAL_HOOKS:
        everywhere.clear()
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


_DEPTH = 4
_NOT_LOOKED_INTO = (Tensor, nn.Module, type, str, bytes, int, float, ModuleType, FunctionType, MethodType)


def _within_reach(values: Iterable[Any]) -> tuple[list[tuple[Any, Any]], list[Tensor]]:
    """Plain collections and attributes of other objects, with a shallow copy of each; and tensors among them."""
    found: list[tuple[Any, Any]] = []
    tensors: list[Tensor] = []
    met: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if type(value) is Tensor and not value.is_meta:  # nothing is written where there is no memory
            tensors.append(value)
        if depth == 0 or value is None or isinstance(value, _NOT_LOOKED_INTO) or id(value) in met:
            return
        met.add(id(value))
        inside: Iterable[Any] = ()
        if isinstance(value, list | set | dict) and type(value).__module__ in ("builtins", "collections"):
            found.append((value, value.copy()))
            inside = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            inside = value
        else:
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                found.append((attributes, attributes.copy()))
                inside = attributes.values()
        for part in inside:
            visit(part, depth - 1)

    for value in values:
        visit(value, _DEPTH)
    return found, tensors


def _put_back(thing: Any, before: Any) -> None:
    """Give a collection the entries it had. One that has not changed is left alone."""
    if isinstance(thing, dict):
        same = [*thing] == [*before] and all(thing[key] is before[key] for key in before)
    else:
        same = len(thing) == len(before) and all(a is b for a, b in zip(thing, before, strict=True))
    if same:
        return
    thing.clear()
    if isinstance(thing, list):
        thing.extend(before)
    else:
        thing.update(before)
