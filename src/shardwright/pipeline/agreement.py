"""Did all ranks of the pipeline group run the same program?

Each rank keeps what its microbatches called; at the end of a step one number per rank is compared. If they
differ, the ranks exchange their calls and raise an error that shows the first one that is not the same. If
ranks wait for each other in vain before they come to the end, they publish their calls on the failure board.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shardwright.errors import AgreementError, CommunicationTimeout
from shardwright.pipeline import messages
from shardwright.pipeline.frame import Frame
from shardwright.pipeline.runtime import Runtime
from shardwright.topology import context

_CHANNEL = 0
_MASK = (1 << 63) - 1
_TOPIC = "pipeline calls"
_PATIENCE_S = 4.0
"""How long a rank that waited in vain waits for the others to notice that, and to publish their calls."""

_REMEDY = (
    "make every rank of a pipeline group run the same code in the step: no branches on"
    " torch.distributed.get_rank(), the likely cause, nor on the rank's own clock, files or environment"
    " (smp.rank() answers alike on all of them)"
)

_digests: dict[Any, int] = {}


def digest(frames: Sequence[Frame]) -> int:
    """A number that two ranks share only if they made the same calls and messages in every microbatch."""
    total = len(frames)
    for frame in frames:
        for part in (*frame.calls, *frame.program):
            known = _digests.get(part)
            if known is None:
                known = _digests[part] = xxhash.xxh64_intdigest(repr(part).encode())
            total = (total * 1_000_003 + known) & _MASK
        total = (total * 31 + frame.index + 1) & _MASK
    return total


def check(runtime: Runtime, frames: Sequence[Frame]) -> None:
    """Compare this step's calls over the pipeline group.

    Called by: every rank of the group, at the end of a step. Messages: 8 bytes from each rank to each other.
    Raises: AgreementError on all ranks, with the first call that differs.
    """
    ordered = sorted(frames, key=lambda f: f.index)
    mine = torch.tensor([digest(ordered)], dtype=torch.int64)
    others = [r for r in range(runtime.size) if r != runtime.rank]
    sent = [runtime.wire.send(mine, r, _CHANNEL) for r in others]
    received = {r: runtime.wire.receive(torch.empty(1, dtype=torch.int64), r, _CHANNEL) for r in others}
    numbers = {runtime.rank: int(mine.item())} | {r: int(h.wait().item()) for r, h in received.items()}
    for handle in sent:
        handle.wait()
    if len(set(numbers.values())) == 1:
        return
    record = Record.of(frames, finished=True)
    handles = messages.send_value(runtime.wire, record, others, _CHANNEL)
    records = {runtime.rank: record}
    for rank in others:
        records[rank] = messages.receive_value(runtime.wire, rank, _CHANNEL, lambda handle: handle.wait())
    for handle in handles:
        handle.wait()
    difference = first_difference(records)
    raise AgreementError(difference or "ranks of a pipeline group ran different programs", remedy=_REMEDY)


def explain(runtime: Runtime, frames: Sequence[Frame], error: BaseException) -> None:
    """After a step failed: publish its calls, and if ranks waited in vain, say why if their calls differ.

    Called by: each rank whose step failed. Raises: AgreementError with the first call that differs.
    """
    board = context.world().board
    record = Record.of(frames, finished=False)
    board.publish(_TOPIC, record.to_text())
    if not (isinstance(error, CommunicationTimeout) or board.failure_is_timeout):
        return
    ranks = context.world().groups.ranks("pp")
    records = {runtime.rank: record}
    deadline = time.monotonic() + _PATIENCE_S
    while len(records) < runtime.size and time.monotonic() < deadline:
        for pp_rank, rank in enumerate(ranks):
            text = None if pp_rank in records else board.published(_TOPIC, rank)
            if text is not None:
                records[pp_rank] = Record.from_text(text)
        difference = first_difference(records)
        if difference is not None:
            raise AgreementError(f"{difference}\n{error}", remedy=_REMEDY) from error
        time.sleep(0.2)


@dataclass(frozen=True)
class Record:
    """What a rank called in a step, by microbatch, in words; `finished`: those that came to their end."""

    calls: Mapping[int, Sequence[str]]
    finished: frozenset[int]

    @staticmethod
    def of(frames: Sequence[Frame], *, finished: bool) -> Record:
        calls = {f.index: [_words(*c) for c in f.calls] for f in frames}
        return Record(calls, frozenset(f.index for f in frames if finished or f.finished))

    def to_text(self) -> str:
        data = json.dumps([sorted(self.calls.items()), sorted(self.finished)]).encode()
        return base64.b85encode(zlib.compress(data, 1)).decode()

    @staticmethod
    def from_text(text: str) -> Record:
        calls, finished = json.loads(zlib.decompress(base64.b85decode(text)))
        return Record(dict(calls), frozenset(finished))


def first_difference(records: Mapping[int, Record]) -> str | None:
    """Words for the first call that isn't the same on all pp ranks that came so far; None if there is
    none."""
    for microbatch in sorted({m for record in records.values() for m in record.calls}):
        begun = {rank: record for rank, record in records.items() if microbatch in record.calls}
        for index in range(max(len(record.calls[microbatch]) for record in begun.values())):
            here: dict[int, str] = {}
            for rank, record in begun.items():
                calls = record.calls[microbatch]
                if index < len(calls):
                    here[rank] = calls[index]
                elif microbatch in record.finished:
                    here[rank] = "nothing (it was at the end)"
            if len(set(here.values())) > 1:
                lines = "".join(f"\n  pipeline rank {rank}: {words}" for rank, words in sorted(here.items()))
                return (
                    "ranks of a pipeline group ran different programs; the first difference is in microbatch"
                    f" {microbatch}, call {index}:{lines}"
                )
    return None


def _words(label: str, owner: int, outputs: Sequence[Any]) -> str:
    return f"'{label}' on stage {owner} -> {', '.join(map(str, outputs)) or 'no tensor'}"
