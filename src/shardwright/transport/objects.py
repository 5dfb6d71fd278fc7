"""Python values between ranks: what the library itself sends, and the public communication functions.

A message is one header of fixed size; a value of up to about 1 KiB travels inside it, so that it is a single
transfer. A larger one follows: first its head, then its bulk (`transport.pickling`). All of it goes by gloo.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.topology import context
from shardwright.topology.accessors import CommGroup, RankType
from shardwright.topology.groups import Groups
from shardwright.topology.ranks import AXES, Axis
from shardwright.transport import collectives, pickling
from shardwright.transport.p2p import FIRST_CHANNEL_TAG, Sent, post_receive, post_send, wait_for

_INLINE_BYTES: Final = 1024
_HEADER_BYTES: Final = 8 + _INLINE_BYTES

_PUBLIC_TAGS: Final = 16
_BROADCAST_TAGS: Final = 32
_CHANNEL_TAGS: Final = 64
"""First tags of the public functions and of `broadcast_object`, by axis, and of `send_object`, by channel."""

_DIRECT_RANKS: Final = 16
"""Up to this size a group's broadcast goes from its source to every member directly; beyond, along a tree."""

_MOST_OUTSTANDING: Final = 32
"""How many transfers a source of `broadcast_object` may be ahead of its slowest member."""

_outstanding: WeakKeyDictionary[Groups, deque[Sent]] = WeakKeyDictionary()


# -- for the library -------------------------------------------------------------------------------------


def send_object(obj: Any, dst: int, channel: int) -> None:
    """Send a value; returns when the receiver has asked for it.

    Called by: one rank; pairs with `recv_object` on `dst` (a global rank) on the same channel.
    """
    here = context.world()
    doing = f"send an object to rank {dst}, channel {channel}"
    for sent in _start(here, obj, (dst,), _channel_tag(channel), doing):
        sent.wait()


def recv_object(src: int, channel: int) -> Any:
    """Receive a value; pairs with `send_object` on `src` (a global rank) on the same channel."""
    doing = f"receive an object from rank {src}, channel {channel}"
    return _receive(context.world(), src, _channel_tag(channel), doing)


def broadcast_object(obj: Any, axis: Axis, src_group_rank: int = 0) -> Any:
    """Return the value of `src_group_rank` on every rank of the group.

    Called by: every rank of the group, in the same order. obj: looked at on the source only, which doesn't
    wait for the others as long as they are not far behind.
    """
    here = context.world()
    ranks = here.groups.ranks(axis)
    src = ranks[src_group_rank]
    if len(ranks) == 1:
        return obj
    if len(ranks) > _DIRECT_RANKS:
        return _broadcast_along_tree(here, obj, axis, src_group_rank)
    tag = _BROADCAST_TAGS + AXES.index(axis)
    if here.rank != src:
        return _receive(here, src, tag, f"receive a broadcast over {axis} from rank {src}")
    others = tuple(rank for rank in ranks if rank != src)
    outstanding = _outstanding.setdefault(here.groups, deque())
    outstanding.extend(_start(here, obj, others, tag, f"broadcast an object over {axis}"))
    while len(outstanding) > _MOST_OUTSTANDING:
        outstanding.popleft().wait()
    return obj


def allgather_object(obj: Any, axis: Axis) -> list[Any]:
    """Return the values of all ranks of the group, in rank order; the own one is the very object.

    Called by: every rank of the group, in the same order.
    """
    here = context.world()
    ranks = here.groups.ranks(axis)
    if len(ranks) == 1:
        return [obj]
    head, bulk = pickling.encode(obj)
    headers = collectives.all_gather(_header(head), axis)
    mine = here.coordinates.position(axis)
    values = []
    for position, header in enumerate(headers):
        if position == mine:
            _share(head, bulk, axis, position)
            values.append(obj)
        else:
            values.append(_take(here, header, partial(_shared, axis=axis, src=position)))
    return values


# -- the public functions (api.md 2.4) -------------------------------------------------------------------


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Send a value to every other member of a group; returns when all have received it.

    Called by: the sender only; every other member calls `recv_from` with the sender's rank in that group and
    the rank type of the group.
    Raises: CommunicationTimeout naming the ranks that didn't.
    """
    here = context.world()
    ranks = here.groups.ranks(group.axis)
    others = tuple(rank for rank in ranks if rank != here.rank)
    doing = f"smp.broadcast on {group.name}, which rank(s) {_list(others)} must match by recv_from"
    for sent in _start(here, obj, others, _PUBLIC_TAGS + AXES.index(group.axis), doing):
        sent.wait()


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Send a value to one rank; returns when it has called `recv_from`.

    dest_rank: counted as `rank_type` says.
    Raises: CommunicationTimeout naming the rank if it doesn't.
    """
    here = context.world()
    dst = _global_rank(here, dest_rank, rank_type)
    doing = f"smp.send to {rank_type.name} {dest_rank} (rank {dst}), which must call recv_from"
    for sent in _start(here, obj, (dst,), _PUBLIC_TAGS + AXES.index(rank_type.axis), doing):
        sent.wait()


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Return the next value that a rank sends here by `send` or `broadcast` with the same kind of rank.

    Raises: CommunicationTimeout naming the rank if nothing comes.
    """
    here = context.world()
    src = _global_rank(here, src_rank, rank_type)
    doing = f"smp.recv_from {rank_type.name} {src_rank} (rank {src}), which must call send or broadcast"
    return _receive(here, src, _PUBLIC_TAGS + AXES.index(rank_type.axis), doing)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Return the values of all members of a group, in rank order. Called by: every member."""
    return allgather_object(obj, group.axis)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Return when every member of a group has called it."""
    collectives.barrier(group.axis)


def mp_barrier() -> None:
    """Wait for the ranks of this model replica."""
    collectives.barrier("mp")


def dp_barrier() -> None:
    """Wait for the ranks that hold the same stage."""
    collectives.barrier("dp")


def pp_barrier() -> None:
    """Wait for the ranks of this pipeline."""
    collectives.barrier("pp")


def tp_barrier() -> None:
    """Wait for the ranks of this tensor parallel group."""
    collectives.barrier("tp")


def rdp_barrier() -> None:
    """Wait for the ranks that hold exactly the same parameters."""
    collectives.barrier("rdp")


# -- messages --------------------------------------------------------------------------------------------


def _start(here: context.World, obj: Any, ranks: tuple[int, ...], tag: int, doing: str) -> list[Sent]:
    """Begin to send one value to several ranks."""
    head, bulk = pickling.encode(obj)
    pieces = [_header(head)]
    if len(head) > _INLINE_BYTES:
        pieces.append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    return [post_send(here, piece, rank, tag, doing) for piece in pieces + bulk for rank in ranks]


def _receive(here: context.World, src: int, tag: int, doing: str) -> Any:
    def take(size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        work = post_receive(here, memory, src, tag, doing)
        if work is not None:
            wait_for(work, here.board, doing, (src,))
        return memory

    return _take(here, take(_HEADER_BYTES), take)


def _take(here: context.World, header: Tensor, take: Callable[[int], Tensor]) -> Any:
    """Return the value that a header begins; `take` receives what follows it, piece by piece."""
    view = pickling.memory_of(header)
    (size,) = struct.unpack_from("<Q", view)
    head = view[8 : 8 + size] if size <= _INLINE_BYTES else pickling.memory_of(take(size))
    bulk = [take(piece) for piece in pickling.bulk_sizes(head)]
    return pickling.decode(head, bulk, here.device)


def _header(head: bytes) -> Tensor:
    header = bytearray(_HEADER_BYTES)
    struct.pack_into("<Q", header, 0, len(head))
    if len(head) <= _INLINE_BYTES:
        header[8 : 8 + len(head)] = head
    return torch.frombuffer(header, dtype=torch.uint8)


def _share(head: bytes, bulk: list[Tensor], axis: Axis, src: int) -> None:
    """Broadcast what doesn't fit into the header, piece by piece, over the group's collectives."""
    if len(head) > _INLINE_BYTES:
        collectives.broadcast_tensor(torch.frombuffer(bytearray(head), dtype=torch.uint8), axis, src)
    for piece in bulk:
        collectives.broadcast_tensor(piece, axis, src)


def _shared(size: int, axis: Axis, src: int) -> Tensor:
    """Receive one piece that `_share` sends."""
    memory = torch.empty(size, dtype=torch.uint8)
    collectives.broadcast_tensor(memory, axis, src)
    return memory


def _broadcast_along_tree(here: context.World, obj: Any, axis: Axis, src: int) -> Any:
    if here.coordinates.position(axis) != src:
        return _take(here, _shared(_HEADER_BYTES, axis, src), partial(_shared, axis=axis, src=src))
    head, bulk = pickling.encode(obj)
    collectives.broadcast_tensor(_header(head), axis, src)
    _share(head, bulk, axis, src)
    return obj


def _channel_tag(channel: int) -> int:
    tag = _CHANNEL_TAGS + channel
    if not _CHANNEL_TAGS <= tag < FIRST_CHANNEL_TAG:
        raise UsageError(f"there is no channel {channel} for objects")
    return tag


def _global_rank(here: context.World, rank: int, rank_type: RankType) -> int:
    ranks = here.groups.ranks(rank_type.axis)
    if not 0 <= rank < len(ranks):
        raise UsageError(
            f"{rank_type.name} {rank} doesn't exist: the group has {len(ranks)} rank(s)",
            where=here.describe(),
        )
    if ranks[rank] == here.rank:
        raise UsageError(f"{rank_type.name} {rank} is this rank itself", where=here.describe())
    return ranks[rank]


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks)
