"""Python values over the pipeline's wire: one fixed-size message for small ones, two for larger ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from shardwright.pipeline.runtime import Wire

_HEADER_BYTES = 1024
_LENGTH_BYTES = 8


def pack(value: Any) -> bytes:
    """A value as `send_bytes` takes it. Raises: what pickle raises."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def send_value(wire: Wire, value: Any, to: list[int], channel: int) -> list[Any]:
    """Send a picklable value to the pp ranks `to`; returns the handles of the sends."""
    return send_bytes(wire, pack(value), to, channel)


def send_bytes(wire: Wire, data: bytes, to: list[int], channel: int) -> list[Any]:
    """Send a packed value to the pp ranks `to`; returns the handles of the sends."""
    room = _HEADER_BYTES - _LENGTH_BYTES
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    _fill(header, len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room])
    rest = torch.empty(max(0, len(data) - room), dtype=torch.uint8)
    _fill(rest, data[room:])
    handles = []
    for rank in to:
        handles.append(wire.send(header, rank, channel))
        if len(rest):
            handles.append(wire.send(rest, rank, channel))
    return handles


def receive_value(wire: Wire, source: int, channel: int, wait: Callable[[Any], torch.Tensor]) -> Any:
    """Receive a value from pp rank `source`. wait: how to wait for the first message (others may run)."""
    header = wait(wire.receive(torch.empty(_HEADER_BYTES, dtype=torch.uint8), source, channel)).numpy().tobytes()
    length = int.from_bytes(header[:_LENGTH_BYTES], "little")
    data = header[_LENGTH_BYTES : _LENGTH_BYTES + length]
    missing = length - len(data)
    if missing > 0:
        rest = torch.empty(missing, dtype=torch.uint8)
        data += wire.receive(rest, source, channel).wait().numpy().tobytes()
    return pickle.loads(data)


def _fill(target: torch.Tensor, data: bytes) -> None:
    if data:
        target[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
