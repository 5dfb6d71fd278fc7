"""Why a wait ended badly, in words a user can act on."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

from shardwright.topology.bulletin import Bulletin, Sign, StoreGoneError

LOST_REMEDY = (
    "look for 'Killed', an out-of-memory line or a signal in that rank's log and in its host's system log"
)

_LISTEN_S = 1.3
"""More than two intervals of the watcher: a rank without a new sign by then doesn't live, or is frozen."""


@dataclass(frozen=True)
class Heard:
    """A rank's last sign of life, and whether it still gives new ones."""

    sign: Sign
    alive: bool


def is_timeout(error: BaseException) -> bool:
    """True if torch's error says that a wait ran out of time."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def is_broken_connection(error: BaseException) -> bool:
    """True if torch's error comes from a connection, not from a wrong argument."""
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "socket", "broken pipe"))


def listen(bulletin: Bulletin, ranks: Sequence[int]) -> dict[int, Heard]:
    """Return what the ranks waited for do, and, following the chain, the ranks that those wait for."""
    try:
        first: dict[int, Sign] = {}
        pending = set(ranks)
        while pending:
            found = bulletin.signs(sorted(pending))
            first.update(found)
            pending = {rank for sign in found.values() for rank in sign.waits_for} - first.keys()
        time.sleep(_LISTEN_S)
        again = bulletin.signs(sorted(first))
    except StoreGoneError:
        return {}
    return {rank: Heard(again[rank], again[rank].count > sign.count) for rank, sign in first.items()}


def describe_timeout(
    rank: int, doing: str, ranks: Sequence[int], waited_s: float, heard: dict[int, Heard]
) -> str:
    """Say who is missing: of the ranks waited for, and those they wait for, the ones that wait for nobody."""
    missing = [other for other in sorted(heard) if other != rank and not _still_waits(heard[other])]
    missing += [other for other in ranks if other not in heard]
    lines = [f"rank {rank} waited {waited_s:.0f} s in vain: {doing}"]
    if missing:
        lines[0] += f"; missing: {_names(missing)}"
    elif heard:
        lines[0] += "; all ranks wait for each other"
    lines += [f"  rank {other} {_describe(heard[other])}" for other in sorted(heard) if other != rank]
    lines += [f"  rank {other} has never given a sign of life" for other in ranks if other not in heard]
    return "\n".join(lines)


def describe_break(rank: int, doing: str, ranks: Sequence[int], left: Set[int], error: BaseException) -> str:
    """Say whose connection broke, when no rank has reported a failure."""
    gone = [other for other in ranks if other in left]
    if gone:
        return f"{_names(gone)} has ended its script while rank {rank} still waited for it: {doing}"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"rank {rank} lost the connection to {_names(ranks) or 'its peers'}: {doing} ({first_line})"


def _still_waits(heard: Heard) -> bool:
    return heard.alive and bool(heard.sign.waits_for)


def _describe(heard: Heard) -> str:
    sign = heard.sign
    if not heard.alive:
        state = "waited in" if sign.waits_for else "had last done"
        return f"gives no sign of life any more; it {state}: {sign.doing}"
    if sign.waits_for:
        return f"waits for {_names(sign.waits_for)} since {sign.seconds:.0f} s: {sign.doing}"
    return f"is alive but doesn't answer; it did last, {sign.seconds:.0f} s ago: {sign.doing}"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" if ranks else ""
