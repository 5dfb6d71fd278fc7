"""Remarks on a configuration, collected while it is read and logged once ranks are known.

Reading settings is pure and comes before anybody knows which rank this is, while "one log line on rank 0"
needs to know. So the functions of this package return notes, and `topology.context` logs them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright import log

_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Note:
    """One line for the log of rank 0."""

    level: int
    message: str

    @classmethod
    def info(cls, message: str) -> Note:
        return cls(logging.INFO, message)

    @classmethod
    def warning(cls, message: str) -> Note:
        return cls(logging.WARNING, message)


def log_notes(notes: Iterable[Note]) -> None:
    """Write the notes, on rank 0 and each text once. Called after `log.configure` was told the rank."""
    for note in notes:
        log.once(_logger, note.level, "%s", note.message)
