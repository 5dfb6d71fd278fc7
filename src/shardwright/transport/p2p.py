"""Tensors of a known spec from rank to rank, in a known order.

Messages between two ranks on one channel arrive in the order in which they were sent; channels don't wait for
each other. A channel is a tag on gloo. NCCL has no tags: there each channel is a communicator of its own,
named at `init` for all `microbatches` and connected when a pair first uses it. A send is complete when its
receive is posted, for gloo keeps no copies. A receive on gloo can't be asked whether it is complete: wait, in
a known order.

Only memory travels: a tensor that fills its memory densely keeps its strides; any other arrives contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import ShapeError, UsageError
from shardwright.topology import context
from shardwright.topology.failure import FailureBoard

FIRST_CHANNEL_TAG: Final = 1 << 16
"""Tags from here on are channels of `isend`; lower ones belong to `transport.objects`."""
_SIZE_BITS: Final = 12


class HasSpec(Protocol):
    """What `irecv` must know of a tensor, besides optional `strides`. A tensor is received into."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class TensorSpec:
    """The form in which a tensor travels.

    strides: those of the tensor if it is dense, else of a contiguous one (`of` sees to that).
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
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def travelling_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a tensor has on arrival."""
    if is_dense(tensor):
        return tuple(tensor.stride())
    return tuple(torch.empty(tensor.shape, device="meta").stride())


class Sent:
    """A message under way. It holds the tensor's memory: keep it until it is waited for."""

    __slots__ = ("_board", "_doing", "_dst", "_memory", "_work")

    def __init__(
        self, work: dist.Work | None, memory: Tensor, dst: int, doing: str, board: FailureBoard
    ) -> None:
        self._work = work
        self._memory: Tensor | None = memory
        self._dst = dst
        self._doing = doing
        self._board = board

    def wait(self) -> None:
        """Return when the receiver has posted its receive and the memory may be written again.

        Raises: CommunicationTimeout after `timeout_s`, RemoteRankError, LostRankError.
        """
        work, self._work = self._work, None
        if work is not None:
            on_device = self._memory is not None and self._memory.is_cuda
            wait_for(work, self._board, self._doing, (self._dst,), on_device=on_device)
        self._memory = None


class Received:
    """A message to come."""

    __slots__ = ("_board", "_doing", "_memory", "_src", "_staged", "_tensor", "_work")

    def __init__(
        self,
        work: dist.Work | None,
        tensor: Tensor,
        memory: Tensor,
        staged: Tensor | None,
        src: int,
        doing: str,
        board: FailureBoard,
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._memory = memory
        self._staged = staged
        self._src = src
        self._doing = doing
        self._board = board

    def wait(self) -> Tensor:
        """Return the tensor, when it has come. May be called again.

        Raises: CommunicationTimeout after `timeout_s`, RemoteRankError, LostRankError.
        """
        work, self._work = self._work, None
        if work is not None:
            on_device = self._memory.is_cuda and self._staged is None
            wait_for(work, self._board, self._doing, (self._src,), on_device=on_device)
            if self._staged is not None:
                self._memory.copy_(self._staged)
                self._staged = None
        return self._tensor


def isend(tensor: Tensor, dst: int, channel: int) -> Sent:
    """Begin to send a tensor; don't write to it before `wait`.

    Called by: one rank; pairs with `irecv` on `dst` (a global rank) on the same channel.
    """
    here = context.world()
    memory = _memory_of(tensor)
    if memory.is_cuda and not here.devices.has_nccl:
        memory = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True).copy_(memory)
    doing = f"send to rank {dst}, channel {channel}"
    if memory.is_cuda:
        group, peer, tag = _channel(here, dst, channel)
        return post_send(here, memory, dst, tag, doing, group=group, peer=peer)
    return post_send(here, memory, dst, _tag(channel, memory), doing)


def irecv(what: HasSpec | Tensor, src: int, channel: int) -> Received:
    """Begin to receive a tensor.

    Called by: one rank; pairs with `isend` on `src` (a global rank) on the same channel.
    what: a spec (shape, dtype, and strides if not contiguous), or a dense tensor to receive into.
    """
    here = context.world()
    tensor = what if isinstance(what, Tensor) else _empty(what, here.device)
    if not is_dense(tensor):
        raise ShapeError(
            f"cannot receive into a tensor of strides {tuple(tensor.stride())}: it has gaps or overlaps",
            remedy="receive into a contiguous tensor, then copy",
        )
    memory = _memory_of(tensor)
    doing = f"receive from rank {src}, channel {channel}"
    if memory.is_cuda and here.devices.has_nccl:
        group, peer, tag = _channel(here, src, channel)
        work = post_receive(here, memory, src, tag, doing, group=group, peer=peer)
        return Received(work, tensor, memory, None, src, doing, here.board)
    staged = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True) if memory.is_cuda else None
    work = post_receive(here, memory if staged is None else staged, src, _tag(channel, memory), doing)
    return Received(work, tensor, memory, staged, src, doing, here.board)


def reap(sent: list[Sent]) -> None:
    """Wait for messages in the order in which they were sent, and empty the list.

    Called where their receivers must have posted their receives by the program's order, such as the end of
    a step.
    """
    for message in sent:
        message.wait()
    sent.clear()


# -- shared with `transport.objects` ---------------------------------------------------------------------


def post_send(
    here: context.World,
    memory: Tensor,
    dst: int,
    tag: int,
    doing: str,
    *,
    group: dist.ProcessGroup | None = None,
    peer: int | None = None,
) -> Sent:
    """Begin to send flat memory under a tag; over the world's group unless another is given.

    peer: the receiver's rank inside that group.   An empty message isn't sent: both ends know its size.
    """
    _check_peer(here, dst)
    here.board.raise_if_failed()
    work = None
    if memory.numel():
        over = group or here.groups.process_group("world")
        try:
            work = over.send([memory], dst if peer is None else peer, tag)
        except RuntimeError as error:
            here.board.raise_comm_error(error, ranks=(dst,), doing=doing)
    return Sent(work, memory, dst, doing, here.board)


def post_receive(
    here: context.World,
    memory: Tensor,
    src: int,
    tag: int,
    doing: str,
    *,
    group: dist.ProcessGroup | None = None,
    peer: int | None = None,
) -> dist.Work | None:
    """Begin to receive flat memory under a tag; see `post_send`."""
    _check_peer(here, src)
    here.board.raise_if_failed()
    if not memory.numel():
        return None
    over = group or here.groups.process_group("world")
    try:
        return over.recv([memory], src if peer is None else peer, tag)
    except RuntimeError as error:
        here.board.raise_comm_error(error, ranks=(src,), doing=doing)


def wait_for(
    work: dist.Work, board: FailureBoard, doing: str, ranks: Sequence[int], *, on_device: bool = False
) -> None:
    """Wait for a message or collective, no longer than `timeout_s`; errors say which ranks did what.

    on_device: carried by NCCL. Then only the current stream waits, and NCCL's own watchdog bounds the wait:
    to give a bound here would make this thread wait for the device.
    """
    board.waiting(doing, ranks)
    try:
        if on_device:
            work.wait()
        else:
            work.wait(board.patience)
    except RuntimeError as error:
        board.raise_comm_error(error)
    board.answered()


def _channel(here: context.World, rank: int, channel: int) -> tuple[dist.ProcessGroup, int, int]:
    """Return the communicator of a channel, the rank's place in it, and the (unused) tag."""
    return here.groups.channel_group(channel), here.groups.ranks("pp").index(rank), 0


def _tag(channel: int, memory: Tensor) -> int:
    """Return the tag of a message on gloo: its channel, and a hash of its size.

    If two ranks disagree on what comes next, the receiver waits in vain, and that can be explained; gloo itself would
    abort the process when a message is larger than expected, and say nothing when it is smaller.
    """
    nbytes = memory.numel() * memory.element_size()
    return FIRST_CHANNEL_TAG + (channel << _SIZE_BITS) + (nbytes * 0x9E3779B1 >> 8) % (1 << _SIZE_BITS)


def _check_peer(here: context.World, rank: int) -> None:
    if rank == here.rank or not 0 <= rank < here.size:
        raise UsageError(
            f"rank {here.rank} can't exchange a message with rank {rank} in a world of {here.size}",
            where=here.describe(),
        )


def _memory_of(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor's memory, or a flat copy of another's elements."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def _empty(spec: HasSpec, device: torch.device) -> Tensor:
    strides: Sequence[int] | None = getattr(spec, "strides", None)
    if strides is None:
        return torch.empty(tuple(spec.shape), dtype=spec.dtype, device=device)
    return torch.empty_strided(tuple(spec.shape), tuple(strides), dtype=spec.dtype, device=device)
