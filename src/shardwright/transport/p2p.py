"""Tensors of a known spec from rank to rank, in a known order.

Messages between two ranks on one channel arrive in the order in which they were sent; channels don't wait for each
other. A channel is a tag on gloo; NCCL has no tags, so there each channel is a communicator of its own, made for all
`microbatches` at `init` and connected when a pair first uses it. A send is complete when its receive was posted:
gloo keeps no copies. On gloo a receive can't be asked whether it is complete: wait, in a known order.

Only memory travels: a tensor that fills its memory densely keeps its strides; any other arrives contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.topology import context
from shardwright.topology.failure import FailureBoard

_P2P_TAGS = 1 << 20
"""Tags from here on are channels of `isend`; lower ones belong to `transport.objects`."""


class HasSpec(Protocol):
    """What `irecv` must know of a tensor. A tensor has it too, but is received into."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class TensorSpec:
    """The form in which a tensor travels.

    strides: of the tensor if its memory is dense, else those of a contiguous one (`of` sees to that).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Return the spec under which a tensor arrives."""
        return TensorSpec(tuple(tensor.shape), travelling_strides(tensor), tensor.dtype)


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one piece of memory without gaps or overlap, in whatever order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def travelling_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a tensor has on arrival."""
    if is_dense(tensor):
        return tuple(tensor.stride())
    return contiguous_strides(tensor.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))


class Sent:
    """A message under way. Keep it, or hand it to `reap`, until it is waited for: it holds the tensor's memory."""

    __slots__ = ("_board", "_channel", "_dst", "_memory", "_work")

    def __init__(
        self, work: dist.Work | None, memory: Tensor | None, dst: int, channel: int, board: FailureBoard
    ):
        self._work = work
        self._memory = memory
        self._dst = dst
        self._channel = channel
        self._board = board

    def wait(self) -> None:
        """Return when the receiver has posted its receive and the memory may be written again.

        Raises: CommunicationTimeout after `timeout_s`, RemoteRankError, LostRankError.
        """
        work, self._work = self._work, None
        if work is not None:
            _wait(work, self._board, "send", self._channel, self._dst)
        self._memory = None

    @property
    def done(self) -> bool:
        """True if `wait` would return at once."""
        return self._work is None or self._work.is_completed()


class Received:
    """A message to come."""

    __slots__ = ("_board", "_channel", "_memory", "_src", "_staged", "_tensor", "_work")

    def __init__(
        self,
        work: dist.Work | None,
        tensor: Tensor,
        memory: Tensor | None,
        staged: Tensor | None,
        src: int,
        channel: int,
        board: FailureBoard,
    ):
        self._work = work
        self._tensor = tensor
        self._memory = memory
        self._staged = staged
        self._src = src
        self._channel = channel
        self._board = board

    def wait(self) -> Tensor:
        """Return the tensor, when it has come. May be called again.

        Raises: CommunicationTimeout after `timeout_s`, RemoteRankError, LostRankError.
        """
        work, self._work = self._work, None
        if work is not None:
            _wait(work, self._board, "receive", self._channel, self._src)
            if self._staged is not None and self._memory is not None:
                self._memory.copy_(self._staged)
            self._staged = self._memory = None
        return self._tensor


def isend(tensor: Tensor, dst: int, channel: int) -> Sent:
    """Begin to send a tensor; don't write to it before `wait`.

    Called by: one rank, which pairs with `irecv` on `dst` (a global rank) with the same channel.
    """
    here = context.world()
    here.board.raise_if_failed()
    memory = _memory_of(tensor)
    if memory.numel() == 0:
        return Sent(None, None, dst, channel, here.board)  # the receiver knows the size too
    if memory.is_cuda and not here.devices.has_nccl:
        staged = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        memory = staged.copy_(memory)
    try:
        work = _group_for(here, memory, channel).send([memory], *_address(here, memory, dst, channel))
    except RuntimeError as error:
        raise here.board.wrap_comm_error(error, ranks=(dst,), doing=f"send, channel {channel}") from error
    return Sent(work, memory, dst, channel, here.board)


def irecv(what: HasSpec, src: int, channel: int) -> Received:
    """Begin to receive a tensor.

    Called by: one rank, which pairs with `isend` on `src` (a global rank) with the same channel.
    what: a spec (shape, dtype, and strides if not contiguous), or a dense tensor to receive into.
    """
    here = context.world()
    here.board.raise_if_failed()
    tensor = what if isinstance(what, Tensor) else _empty(what, here.device)
    memory = _memory_of(tensor, to_fill=True)
    if memory.numel() == 0:
        return Received(None, tensor, None, None, src, channel, here.board)
    target, staged = memory, None
    if memory.is_cuda and not here.devices.has_nccl:
        target = staged = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
    try:
        work = _group_for(here, target, channel).recv([target], *_address(here, target, src, channel))
    except RuntimeError as error:
        raise here.board.wrap_comm_error(error, ranks=(src,), doing=f"receive, channel {channel}") from error
    return Received(work, tensor, memory, staged, src, channel, here.board)


def reap(sent: list[Sent]) -> None:
    """Wait for messages in the order in which they were sent, and empty the list.

    Called at points where their receivers must have posted their receives, such as the end of a step.
    """
    for message in sent:
        message.wait()
    sent.clear()


def _wait(work: dist.Work, board: FailureBoard, verb: str, channel: int, rank: int) -> None:
    board.waiting(f"{verb}, channel {channel}, {'to' if verb == 'send' else 'from'} rank {rank}", (rank,))
    try:
        work.wait(board.patience)
    except RuntimeError as error:
        raise board.wrap_comm_error(error) from error
    board.answered()


def _memory_of(tensor: Tensor, *, to_fill: bool = False) -> Tensor:
    """Return a flat view of a dense tensor's memory, or a flat copy of another's elements."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    if to_fill:
        raise ValueError(
            f"cannot receive into a tensor with gaps or overlap: strides {tuple(tensor.stride())}"
        )
    return tensor.contiguous().view(-1)


def _empty(spec: HasSpec, device: torch.device) -> Tensor:
    shape = tuple(int(size) for size in spec.shape)
    strides: Any = getattr(spec, "strides", None)
    if strides is None:
        return torch.empty(shape, dtype=spec.dtype, device=device)
    return torch.empty_strided(shape, tuple(strides), dtype=spec.dtype, device=device)


def _group_for(here: context.World, memory: Tensor, channel: int) -> dist.ProcessGroup:
    if memory.is_cuda:
        return here.groups.channel_group(channel)
    return here.groups.process_group("world")


def _address(here: context.World, memory: Tensor, rank: int, channel: int) -> tuple[int, int]:
    """Return the peer's rank inside the group that carries the message, and the tag."""
    if memory.is_cuda:
        return here.groups.ranks("pp").index(rank), 0
    return rank, _P2P_TAGS + channel
