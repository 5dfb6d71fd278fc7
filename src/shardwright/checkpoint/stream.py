"""Whole tensors on world rank 0, one at a time, straight from the ranks that hold parts of them.

What ranks hold is described as in a manifest, with ranks in the place of files, so that the plan of reads (`plan`) says who
sends what: each element travels once, from one of its holders to rank 0, however tensors are cut and replicated.
No rank needs memory for more than a message, rank 0 for one tensor besides. All meet now and then, so that no wait is longer than
writing what lies between two meetings takes, however large the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import plan, reader
from shardwright.checkpoint.manifest import Entry
from shardwright.checkpoint.plan import Box, Copy
from shardwright.topology.context import world
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives, p2p

_MESSAGE_BYTES = 16 << 20
_MEETING_BYTES = 1 << 30
_CHANNEL = 0

Take = Callable[[Entry, Tensor], None]


def source_name(kind: str) -> str:
    """What the slices of this rank's entries call their "file". kind: tells several contents of a rank apart."""
    return f"{world().rank}:{kind}"


def send_whole(entries: Sequence[Entry], held: Mapping[str, Any], take: Take, axis: Axis = "world") -> None:
    """Bring together all tensors on world rank 0, in the order of `entries`.

    Called by: every rank of the axis, with the same entries. Collectives: messages to rank 0, and a barrier after each GiB.
    held: this rank's contents by the name that slices call them.
    take: gets each tensor, on the CPU, on rank 0. If it raises, the remaining messages are received before that is passed on,
        so that no sender waits in vain.
    Raises: CheckpointError if nobody has a part of a tensor, on every rank.
    """
    plans = [_copies(entry) for entry in entries]
    meetings = _meetings(entries)
    if world().rank == 0:
        _receive(entries, plans, meetings, held, take, axis)
        return
    here = f"{world().rank}:"
    try:
        for number, copies in enumerate(plans):
            for copy in copies:
                if copy.source.file.startswith(here):
                    part = reader.taken(reader.follow(held[copy.source.file], copy.source.key), copy)
                    p2p.isend(part.detach().cpu().contiguous(), 0, _CHANNEL).wait()
            if number in meetings:
                collectives.barrier(axis)
    except Exception as error:
        world().board.report(error)  # rank 0 waits for the next message
        raise


def _receive(
    entries: Sequence[Entry],
    plans: Sequence[list[Copy]],
    meetings: Set[int],
    held: Mapping[str, Any],
    take: Take,
    axis: Axis,
) -> None:
    failure: Exception | None = None
    for number, (entry, copies) in enumerate(zip(entries, plans, strict=True)):
        zeros = (0,) * len(entry.shape)
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for copy in copies:
            source = int(copy.source.file.partition(":")[0])
            if source == 0:
                reader.fill(whole, zeros, copy, reader.follow(held[copy.source.file], copy.source.key))
                continue
            target = whole[reader.relative(copy.box, zeros)]
            if target.is_contiguous():
                p2p.irecv(target, source, _CHANNEL).wait()
            else:
                target.copy_(p2p.irecv(torch.empty(target.shape, dtype=target.dtype), source, _CHANNEL).wait())
        if failure is None:
            try:
                take(entry, whole)
            except Exception as error:
                failure = error
        del whole  # before the next one is made
        if number in meetings:
            collectives.barrier(axis)
    if failure is not None:
        raise failure


def _meetings(entries: Sequence[Entry]) -> Set[int]:
    """After which entries all ranks meet."""
    found, size = set(), 0
    for number, entry in enumerate(entries):
        size += math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
        if size >= _MEETING_BYTES:
            found.add(number)
            size = 0
    return found


def _copies(entry: Entry) -> list[Copy]:
    """Who sends which box of a tensor, in messages of limited size."""
    whole = plan.box_of((0,) * len(entry.shape), entry.shape)
    most = max(1, _MESSAGE_BYTES // getattr(torch, entry.dtype).itemsize)
    return [replace(copy, box=box) for copy in plan.plan(entry, [whole]) for box in _messages(copy, most)]


def _messages(copy: Copy, most_elements: int) -> list[Box]:
    return list(plan.cut_up(copy.box, most_elements))
