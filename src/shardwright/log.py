"""Rank-aware logging: one logger per module, one line per group where that is enough.

Every logger lives below "shardwright". The rank shown in each line is set once by `topology.context`;
before that the process counts as rank 0 of a world of one.
"""

from __future__ import annotations

import logging
import sys

_ROOT = "shardwright"
_rank = 0
_seen: set[tuple[str, str]] = set()


class _RankFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = _rank
        return True


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; `name` is the module's `__name__`."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def configure(level: str, rank: int) -> None:
    """Set level ("debug", "info", "warning", "error", "off") and the rank that lines carry. Idempotent."""
    global _rank
    _rank = rank
    root = logging.getLogger(_ROOT)
    root.setLevel(logging.CRITICAL + 10 if level == "off" else level.upper())
    if not any(isinstance(h.filters[0] if h.filters else None, _RankFilter) for h in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[shardwright rank %(rank)s] %(levelname)s %(message)s"))
        handler.addFilter(_RankFilter())
        root.addHandler(handler)
        root.propagate = False


def rank_zero() -> bool:
    """True on the process whose lines speak for the whole world."""
    return _rank == 0


def once(logger: logging.Logger, level: int, message: str, *values: object) -> None:
    """Log on rank 0, and only the first time this message with these values is seen."""
    key = (logger.name, message % values if values else message)
    if _rank == 0 and key not in _seen:
        _seen.add(key)
        logger.log(level, message, *values)
