"""A microbatch without processes: a frame of pipeline rank 0 or 1, whose messages are kept in a list.

Rank 0 holds every value; a run as rank 1 afterwards receives what rank 0 sent, and must make the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.pipeline import aliasing
from shardwright.pipeline.frame import Frame
from shardwright.pipeline.glue import GlueMode
from shardwright.pipeline.intercept import installed
from shardwright.pipeline.placed import PlacedTensor, enter_frame
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.shared import SharedUses
from shardwright.pipeline.spec import spec_of
from shardwright.pipeline.tape import Entry


class Kept:
    """A message that has arrived, or is on its way to nobody."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class KeptWire:
    """Messages of rank 0 in order; rank 1 takes them from the front."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []

    def send(self, tensor: Tensor, to: int, channel: int) -> Kept:
        self.messages.append(tensor.detach().clone())
        return Kept(tensor)

    def receive(self, buffer: Tensor, source: int, channel: int) -> Kept:
        return Kept(buffer.copy_(self.messages.pop(0)))


class Alone:
    """The only microbatch: it never waits for others."""

    def __init__(self) -> None:
        self.uses = SharedUses()

    def wait_turn(self, frame: Frame) -> None: ...

    def in_order(self, frame: Frame) -> None: ...

    def stay_in_line(self, frame: Frame) -> None: ...

    def forward_done(self, frame: Frame) -> None: ...


def make_frame(rank: int = 0, wire: KeptWire | None = None, index: int = 0, turns: Any = None, size: int = 2) -> Frame:
    """A frame of a pipeline of two ranks, or of one (`size`), where nothing is ever sent."""
    runtime = Runtime(rank, size, torch.device("cpu"), wire or KeptWire())
    return Frame(runtime, index, turns or Alone(), seed=0)


@contextmanager
def glue(frame: Frame) -> Iterator[None]:
    """Run the code inside as glue of the frame."""
    enter_frame(frame)
    try:
        with installed(), GlueMode():
            yield
    finally:
        enter_frame(None)


def placed_leaf(frame: Frame, tensor: Tensor) -> PlacedTensor:
    """A placed tensor held by rank 0; the gradient, if `tensor` requires it, is added to `tensor.grad`."""
    value = frame.new_value(spec_of(tensor), 0, tensor.detach() if frame.rank == 0 else None)
    if tensor.requires_grad:

        def accumulate(gradient: Tensor) -> None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

        frame.tape.record(Entry("leaf", 0, (), (value.id,), ((),), sink=accumulate), [value])
    return PlacedTensor.of(value)


def real(frame: Frame, placed: Any) -> Tensor:
    """The value of a placed tensor on the rank that holds it, or the ordinary tensor itself."""
    if type(placed) is not PlacedTensor:
        return placed
    tensor = aliasing.resolve(frame, placed).tensor
    assert tensor is not None
    return tensor
