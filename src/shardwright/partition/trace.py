"""A dry run of the model: call order, output sizes, FLOPs, bytes kept for backward - for every module.

First choice is a forward on fake tensors: no memory, no device, any model size. Where that fails (a branch on
a value, a kernel that fake tensors don't know) the model runs once for real, without gradient, where it lies.
Where that fails too, module order and parameter bytes must do. What was used is in `Trace.how`, why in
`Trace.reason`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from shardwright.log import get_logger
from shardwright.partition.recorder import Recorder, storage_key
from shardwright.partition.records import Trace, TraceKind
from shardwright.partition.sandbox import replace_tensors, silence_hooks, stand_in, untouched

_log = get_logger(__name__)
_depth = 0


def is_tracing() -> bool:
    """True only while a model's forward runs for the partition's sake."""
    return _depth > 0


def trace(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    how: TraceKind = "fake",
    may_run: bool = True,
) -> Trace:
    """Run one forward on the inputs of one microbatch and return what each module did.

    how: where to begin in the order fake, real, none; each falls back to the next.
    may_run: False leaves out the real forward, for models whose forward communicates. Never raises for what the
    model
    does: a forward that fails everywhere gives `Trace(how="none")`, and the script's own call will show the
    error. Leaves no trace itself: see `sandbox`. Called by: one rank per model. Collectives: none.
    """
    kwargs = dict(kwargs or {})
    attempts: dict[TraceKind, Callable[..., Trace]] = {"fake": _fake, "real": _real}
    reasons: list[str] = []
    for kind in ("fake", "real"):
        if how == "none" or (how == "real" and kind == "fake") or (kind == "real" and not may_run):
            continue
        try:
            with _tracing():
                found = attempts[kind](module, args, kwargs)
        except Exception as error:
            reasons.append(f"{kind}: {type(error).__name__}: {_first_line(error)}")
            _log.debug("tracing by a %s forward failed", kind, exc_info=True)
        else:
            return Trace(how=kind, records=found.records, borrowed=found.borrowed, reason="; ".join(reasons))
    return Trace(how="none", reason="; ".join(reasons) if reasons else "switched off")


@contextmanager
def on_fake_tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inside, the model's tensors are stand-ins without memory; gives stand-ins of the inputs. All is undone."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of(args, kwargs)
    with _tracing(), untouched(module, keep_values=False), _quiet_fake_tensors(), mode, torch.enable_grad():
        silence_hooks(module)
        replace_tensors(module, device)
        yield tree_map(lambda leaf: _copy_leaf(leaf, lambda t: stand_in(t, device)), (args, dict(kwargs)))


def _fake(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    with on_fake_tensors(module, args, kwargs) as (args, kwargs):
        return _record(module, args, kwargs)


def _real(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    devices = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    if any(device.type == "meta" for device in devices):
        raise RuntimeError("the model lies on the meta device")
    device = min(devices, key=str) if devices else torch.device("cpu")
    with untouched(module, keep_values=True), torch.no_grad():
        silence_hooks(module)
        args, kwargs = tree_map(
            lambda leaf: _copy_leaf(leaf, lambda t: t.detach().to(device, copy=True)), (args, kwargs)
        )
        return _record(module, args, kwargs)


def _record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    homes: dict[int, tuple[str, ...]] = {}
    for name, found in module.named_modules():
        for buffer in found._buffers.values():
            if buffer is not None:
                homes.setdefault(storage_key(buffer), ())
        for parameter in found._parameters.values():
            if parameter is not None:
                homes[storage_key(parameter)] = (*homes.get(storage_key(parameter), ()), name)
    recorder = Recorder(bearing_modules(module), homes)
    with recorder.watching(module):
        output = module(*args, **kwargs)
    recorder.assume_loss(output)
    return Trace(how="none", records=recorder.records(), borrowed=tuple(recorder.borrowed))


def bearing_modules(module: nn.Module) -> dict[int, str]:
    """Name by id of the modules that a trace tells apart: the root, and all with a parameter in them or below."""
    return {
        id(found): name for name, found in module.named_modules() if not name or any(True for _ in found.parameters())
    }


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """PyTorch logs a traceback for each operation it can't fake; the fallback says it in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextmanager
def _tracing() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _copy_leaf(leaf: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Tensors through `make`; other mutable objects as copies, so that the forward can't change the
    caller's."""
    if isinstance(leaf, Tensor):
        return make(leaf)
    if leaf is None or isinstance(
        leaf, str | bytes | int | float | complex | nn.Module | torch.device | torch.dtype
    ):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # any class may refuse, in its own way; the forward then gets the caller's own object
        return leaf


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Stand-ins live where the inputs do, so that code which asks for the device takes its usual path."""
    found: list[torch.device] = []
    tree_map(lambda leaf: found.append(leaf.device) if isinstance(leaf, Tensor) else None, (args, kwargs))
    real = [device for device in found if device.type != "meta"]
    return real[0] if real else torch.device("cpu")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""
