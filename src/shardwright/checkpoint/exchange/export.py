"""Writing a checkpoint in the form of somebody else: a file of torch or safetensors, or a DCP folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwright.checkpoint import safe_loading, state
from shardwright.checkpoint.exchange import dcp
from shardwright.checkpoint.exchange.safetensors_files import SafetensorsFile
from shardwright.checkpoint.exchange.source import Source, dtype_of
from shardwright.checkpoint.exchange.spooled import Spooled
from shardwright.checkpoint.manifest import OBJECT, Entry
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.checkpoint.storage.attempts import attempt
from shardwright.checkpoint.torch_stream import StreamedTorchFile
from shardwright.errors import UsageError

Advance = Callable[[int], None]
_T = TypeVar("_T")


def to_torch(source: Source, out: Place, *, with_optimizer: bool, advance: Advance) -> int:
    """One file for torch.load: the state dict, or with the optimizer {"model": ..., "optimizer": ...}; tensors are held one at
    a time, tied ones are written once.

    The optimizer is in torch's form with names of parameters beside their indices. Returns: number of tensors.
    """
    first = {name: names[0] for names in source.manifest.ties for name in names}

    def work(path: Place) -> int:
        file = StreamedTorchFile(path)
        stored: dict[str, Any] = {}

        def put_in(entry: Entry) -> Any:
            value = _read(source, entry, advance)
            return file.add(value) if isinstance(value, torch.Tensor) else value

        def once(entry: Entry) -> Any:
            name = first.get(entry.name, entry.name)
            if name not in stored:
                stored[name] = put_in(entry)
            return stored[name]

        try:
            model = {entry.name: once(entry) for entry in source.entries("model")}
            content: dict[str, Any] = model
            if with_optimizer:
                content = {"model": model, "optimizer": _indexed(_optimizer(source, put_in))}
            file.finish(content, out.name)
        finally:
            file.close()
        safe_loading.check_readable(path, trust=source.trust, name=out.name)
        return len(model)

    if isinstance(out, RemotePath):  # it is there when it is whole; what is lost of an upload can't be sent again alone
        return attempt("write", out, lambda: work(out))
    return _publish(out, work)


def to_safetensors(source: Source, out: Place, *, with_optimizer: bool, advance: Advance) -> int:
    """One safetensors file with the tensors of the model, which are held one at a time. Tied ones are written once for each
    name. Returns: how many.
    """
    if with_optimizer:
        raise UsageError(
            "a safetensors file holds tensors only, and optimizer state is more", remedy="--format dcp or torch"
        )
    tensors = {entry.name: entry for entry in source.entries("model") if entry.dtype != OBJECT}
    outlines = {n: torch.empty(e.shape, dtype=dtype_of(e), device="meta") for n, e in tensors.items()}

    def work(path: Path) -> int:
        file = SafetensorsFile(path, outlines)
        try:
            for name, entry in tensors.items():
                file.write(name, _read(source, entry, advance))
            file.finish()
        finally:
            file.close()
        return len(tensors)

    return _publish(out, work)


def to_dcp(source: Source, out: Place, *, with_optimizer: bool, advance: Advance) -> int:
    """A folder for torch.distributed.checkpoint.load, see `dcp`; tensors are held one at a time. Returns: number of tensors
    of the model.
    """

    def later(entry: Entry) -> Any:
        if entry.dtype == OBJECT:
            return source.whole(entry)
        return dcp.Later(entry.shape, dtype_of(entry), lambda: _read(source, entry, advance))

    model = {entry.name: later(entry) for entry in source.entries("model")}
    content: dict[str, Any] = {dcp.MODEL: model}
    if with_optimizer:
        content[dcp.OPTIMIZER] = _optimizer(source, later)
    _publish(out, lambda path: dcp.write(path, content), last=dcp.METADATA)
    return len(model)


FORMATS: dict[str, Callable[..., int]] = {"torch": to_torch, "safetensors": to_safetensors, "dcp": to_dcp}


def num_bytes(source: Source, *, with_optimizer: bool) -> int:
    """Bytes of all tensors that are to be written."""
    roles = ("model", "optimizer", "fp16_states") if with_optimizer else ("model",)
    chosen = (e for e in source.manifest.entries if e.role in roles and e.dtype != OBJECT)
    return sum(math.prod(e.shape) * dtype_of(e).itemsize for e in chosen)


def _read(source: Source, entry: Entry, advance: Advance) -> Any:
    value = source.whole(entry)
    if isinstance(value, torch.Tensor):
        advance(value.numel() * value.element_size())
    return value


def _optimizer(source: Source, value_of: Callable[[Entry], Any]) -> dict[str, Any]:
    """State and groups by names of parameters; fp32 masters as one more value of their parameter, the scaler beside it."""
    groups = [
        {**options, "params": list(names)}
        for options, names in zip(source.groups(), source.manifest.param_groups, strict=True)
    ]
    states: dict[str, dict[Any, Any]] = {}
    for role in ("optimizer", "fp16_states"):
        for entry in source.entries(role):
            put(states.setdefault(entry.name, {}), state.path_of(entry), value_of(entry))
    return {"state": states, "param_groups": groups, **source.scaler()}


def put(values: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Set a value inside nested dicts."""
    for step in path[:-1]:
        values = values.setdefault(step, {})
    values[path[-1]] = value


def _indexed(named: Mapping[str, Any]) -> dict[str, Any]:
    """torch's form: indices over all groups in place of names, which each group lists under "param_names"."""
    names = [name for group in named["param_groups"] for name in group["params"]]
    index = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [index[n] for n in group["params"]], state.PARAM_NAMES: group["params"]}
        for group in named["param_groups"]
    ]
    return {**named, "state": {index[n]: values for n, values in named["state"].items()}, "param_groups": groups}


def _publish(out: Place, write: Callable[[Path], _T], last: str = "") -> _T:
    spooled = Spooled(out, last=last)
    try:
        result = write(spooled.path)
        spooled.publish()
    finally:
        spooled.discard()
    return result
