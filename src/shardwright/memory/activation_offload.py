"""Inputs of checkpointed modules wait in host memory, and come back shortly before backward needs them.

After a checkpointed call its inputs are copied out on a stream of their own, and their device memory is free as soon as
the copy is done. Backward needs them in the reverse order of the calls, microbatch by microbatch. While it recomputes
one call, the inputs of the next `horizon` calls that it will come to are on their way back already, those of the
next microbatch included.

What is worth copying is the business of the transfers: `CudaTransfers` takes floating-point tensors on a CUDA device.
Nothing is copied on a machine whose device is its CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.memory.activation_checkpointing import Here

_WORTHWHILE_BYTES = 1 << 14


class Transfers(Protocol):
    """Copies between device and host. Handles are the transfers' own."""

    def wants(self, tensor: Tensor) -> bool:
        """Is it worth copying?"""

    def out(self, tensor: Tensor) -> Any:
        """Begin to copy a tensor to the host; returns a handle of the copy."""

    def back(self, copy: Any) -> Any:
        """Begin to copy it to the device again; returns a handle of that."""

    def arrived(self, coming: Any) -> Tensor:
        """The tensor on the device, for use on the current stream."""


class Offloader:
    """The inputs of all checkpointed calls of a step, on one rank.

    In order: `begin` at each microbatch's start, on its thread; `hold` for every checkpointed call; `backward_begins`
    when a microbatch starts backward; `Held.take` as backward comes to the calls; `clear` when the step is over.
    horizon: how many checkpointed calls ahead inputs are brought back.
    """

    def __init__(self, transfers: Transfers, horizon: int) -> None:
        self._transfers = transfers
        self._horizon = horizon
        self._calls: dict[int, list[_Away]] = {}
        self._here = threading.local()

    def begin(self, microbatch: int) -> None:
        """This thread runs this microbatch from here on."""
        self._here.microbatch = microbatch
        self._calls[microbatch] = []

    def hold(self, tensors: Sequence[Tensor]) -> Here | _Away:
        """Take the inputs of a call that this thread has made."""
        if not any(self._is_wanted(t) for t in tensors):
            return Here(tensors)
        calls = self._calls.setdefault(getattr(self._here, "microbatch", 0), [])
        away = _Away(self, [_Slot(self._transfers, t) if self._is_wanted(t) else t for t in tensors])
        calls.append(away)
        return away

    def backward_begins(self) -> None:
        """This thread's microbatch starts backward: its last calls come first."""
        self._load(self._coming(getattr(self._here, "microbatch", 0), None))

    def clear(self) -> None:
        """The step is over."""
        self._calls.clear()

    def taken(self, call: _Away) -> None:
        """Backward recomputes this call now."""
        for microbatch, calls in self._calls.items():
            if call in calls:
                self._load(self._coming(microbatch, call))
                return

    def _is_wanted(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter) and self._transfers.wants(tensor)

    def _coming(self, microbatch: int, after: _Away | None) -> list[_Away]:
        """The calls that backward will come to, the next first."""
        own = self._calls.get(microbatch, [])
        order = list(reversed(own if after is None else own[: own.index(after)]))
        for later in sorted(m for m in self._calls if m > microbatch):
            order += reversed(self._calls[later])
        return [call for call in order if not call.used]

    def _load(self, calls: list[_Away]) -> None:
        for call in calls[: self._horizon]:
            call.load()


class _Away:
    """The inputs of one call: some of them away, some here."""

    def __init__(self, owner: Offloader, parts: list[_Slot | Tensor]) -> None:
        self._owner = owner
        self._parts = parts
        self.used = False

    def load(self) -> None:
        """Begin to bring them back."""
        for part in self._parts:
            if isinstance(part, _Slot):
                part.load()

    def take(self) -> list[Tensor]:
        """All of them, on the device."""
        self.used = True
        self.load()
        self._owner.taken(self)
        return [part.take() if isinstance(part, _Slot) else part for part in self._parts]


class _Slot:
    """One tensor that is away, on its way back, or was taken."""

    def __init__(self, transfers: Transfers, tensor: Tensor) -> None:
        self._transfers = transfers
        self._copy = transfers.out(tensor)
        self._coming: Any = None

    def load(self) -> None:
        if self._coming is None:
            self._coming = self._transfers.back(self._copy)

    def take(self) -> Tensor:
        """The copy in host memory stays, for a second backward through the same call."""
        coming, self._coming = self._coming, None
        return self._transfers.arrived(coming)


class CudaTransfers:
    """Copies through pinned memory on a stream of their own; the current stream never waits for the host."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def wants(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and tensor.is_floating_point() and tensor.nbytes >= _WORTHWHILE_BYTES

    def out(self, tensor: Tensor) -> tuple[Tensor, torch.device]:
        stream = self._side(tensor.device)
        # The memory format is kept, so that the second run sees the same strides.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory may be used again once the copy is done, not before
        return host, tensor.device

    def back(self, copy: tuple[Tensor, torch.device]) -> tuple[Tensor, torch.cuda.Event]:
        host, device = copy
        stream = self._side(device)
        with torch.no_grad(), torch.cuda.stream(stream):  # after the copy out, which ran on the same stream
            tensor = torch.empty_like(host, device=device, pin_memory=False)
            tensor.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return tensor, event

    def arrived(self, coming: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        tensor, event = coming
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(event)
        tensor.record_stream(current)
        return tensor

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream
