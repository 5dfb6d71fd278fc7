"""A user's own reduction of a gradient bucket, with the signature of torch's DistributedDataParallel hooks.

`hook(state, bucket) -> torch.futures.Future[Tensor]`; the ready-made hooks of
`torch.distributed.algorithms.ddp_comm_hooks` work unchanged. The hook owns averaging: the library neither
divides nor sums what it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.errors import CommunicationTimeout, UsageError


class Waitable(Protocol):
    """A reduction under way."""

    def wait(self) -> object: ...


class HookBucket:
    """What a hook sees of a bucket: the methods of torch.distributed.GradBucket."""

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[Tensor],
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """Return the position of the bucket in the fixed order of reduction."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat buffer with this rank's gradients, zeros where there is none."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """True for the bucket that is reduced last in a step."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the content of the buffer."""
        self._buffer.copy_(tensor.view_as(self._buffer))


@dataclass(frozen=True)
class CommHook:
    """A hook and the state that is passed to it with every bucket."""

    state: Any
    hook: Callable[[Any, HookBucket], torch.futures.Future[Any]]

    def start(self, bucket: HookBucket, timeout_s: float) -> PendingHook:
        """Call the hook and return the wait for its result.

        Raises: UsageError if it doesn't return a Future.
        """
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future; `then` returns it
            raise UsageError(
                f"the communication hook {_name(self.hook)} returned {type(future).__name__}, expected a "
                "torch.futures.Future",
                remedy="return work.get_future(), or a torch.futures.Future with set_result(tensor)",
            )
        return PendingHook(future, bucket, _name(self.hook), timeout_s)


class PendingHook:
    """Waits for a hook's future and puts the result into the bucket's buffer."""

    def __init__(
        self, future: torch.futures.Future[Any], bucket: HookBucket, name: str, timeout_s: float
    ) -> None:
        self._future = future
        self._bucket = bucket
        self._name = name
        self._timeout_s = timeout_s

    def wait(self) -> None:
        """Wait, at most `timeout_s`.

        Raises: CommunicationTimeout naming hook and bucket; UsageError for a result of the wrong size;
            whatever the hook's own communication raises.
        """
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())
        if not done.wait(self._timeout_s):
            raise CommunicationTimeout(
                f"the communication hook {self._name} did not finish bucket {self._bucket.index()} "
                f"within {self._timeout_s:g} s",
                remedy="check that every data-parallel rank runs the hook; raise 'timeout_s' if it is slow",
            )
        result = self._future.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        buffer = self._bucket.buffer()
        if not isinstance(result, Tensor) or result.numel() != buffer.numel():
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise UsageError(
                f"the communication hook {self._name} returned {got} for bucket {self._bucket.index()}, "
                f"expected a tensor of {buffer.numel()} elements",
                remedy="return a tensor of the size of bucket.buffer()",
            )
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result.reshape(buffer.shape))


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)
