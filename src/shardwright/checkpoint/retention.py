"""Which checkpoints of a folder may go. Pure: the caller lists and deletes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class Kept:
    """One `*_partial` folder, the time it was finished (nanoseconds), and whether it is complete."""

    folder: str
    modified_ns: int
    complete: bool


def check_count(keep: int | None) -> None:
    """Refuse a number of checkpoints to keep that makes no sense; None keeps all."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(
            f"num_kept_partial_checkpoints is {keep!r}, expected an integer of at least 1, or None for all"
        )


def surplus(folders: Iterable[Kept], *, newest: str, keep: int | None) -> list[str]:
    """Return the folder names to delete so that `keep` stay, oldest first.

    Incomplete folders go before complete ones, so that they never push a good checkpoint out.
    The one named in `newest` always stays.
    """
    if keep is None:
        return []
    by_worth = sorted(folders, key=lambda f: (f.folder == newest, f.complete, f.modified_ns, f.folder))
    excess = len(by_worth) - keep
    return [f.folder for f in by_worth[: max(excess, 0)] if f.folder != newest]
