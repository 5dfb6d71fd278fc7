"""Did all ranks of the pipeline group run the same program?

Each rank keeps what its microbatches called; at the end of a step one number per rank is compared. If they differ,
the ranks exchange their calls and raise an error that shows the first one that is not the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from shardwright.errors import AgreementError
from shardwright.pipeline import messages
from shardwright.pipeline.frame import Call, Frame
from shardwright.pipeline.runtime import Runtime

_CHANNEL = 0
_MASK = (1 << 63) - 1
_REMEDY = (
    "make every rank of a pipeline group run the same code in the step: no branches on torch.distributed.get_rank(),"
    " on the rank's own clock, files or environment (smp.rank() answers alike on all of them)"
)

_digests: dict[Call, int] = {}


def digest(frames: Sequence[Frame]) -> int:
    """A number that two ranks share only if they made the same calls in every microbatch."""
    total = len(frames)
    for frame in frames:
        for call in frame.calls:
            known = _digests.get(call)
            if known is None:
                known = _digests[call] = xxhash.xxh64_intdigest(repr(call).encode())
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
    calls = [[(str(c.label), c.owner, [str(s) for s in c.outputs]) for c in f.calls] for f in ordered]
    handles = messages.send_value(runtime.wire, calls, others, _CHANNEL)
    all_calls = {runtime.rank: calls}
    for rank in others:
        all_calls[rank] = messages.receive_value(runtime.wire, rank, _CHANNEL, lambda handle: handle.wait())
    for handle in handles:
        handle.wait()
    raise AgreementError(first_difference(all_calls), remedy=_REMEDY)


def first_difference(calls: dict[int, list[list[tuple[str, int, list[str]]]]]) -> str:
    """Words for the first call that is not the same on all pp ranks. Pure."""
    num_microbatches = max(len(c) for c in calls.values())
    for microbatch in range(num_microbatches):
        per_rank = {r: c[microbatch] if microbatch < len(c) else [] for r, c in calls.items()}
        for index in range(max(len(c) for c in per_rank.values())):
            here = {r: c[index] if index < len(c) else None for r, c in per_rank.items()}
            if len({repr(c) for c in here.values()}) > 1:
                lines = "; ".join(f"pipeline rank {r}: {_words(c)}" for r, c in sorted(here.items()))
                return f"ranks of a pipeline group ran different programs: microbatch {microbatch}, call {index}: {lines}"
    return "ranks of a pipeline group ran different programs, though their calls look the same"


def _words(call: tuple[str, int, list[str]] | None) -> str:
    if call is None:
        return "nothing (its step ended before)"
    label, owner, outputs = call
    return f"'{label}' on stage {owner} -> {', '.join(outputs) or 'no tensor'}"
