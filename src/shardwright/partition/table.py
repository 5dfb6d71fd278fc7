"""Plain text for people: aligned tables, counts and bytes with units."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_WRAP = 48


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wrap_column: int) -> str:
    """Align cells in columns, wrapping the text of one column at commas and blanks."""
    wrapped: list[tuple[str, ...]] = []
    for row in rows:
        parts = textwrap.wrap(row[wrap_column], _WRAP, break_long_words=False) or [""]
        wrapped.append((*row[:wrap_column], parts[0], *row[wrap_column + 1 :]))
        for part in parts[1:]:
            wrapped.append(tuple(part if column == wrap_column else "" for column in range(len(row))))
    widths = [max(len(line[column]) for line in [tuple(head), *wrapped]) for column in range(len(head))]
    left = {0, wrap_column}
    lines = [tuple(head), tuple("-" * width for width in widths), *wrapped]
    return "\n".join(
        "  ".join(
            cell.ljust(widths[column]) if column in left else cell.rjust(widths[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def format_count(count: float) -> str:
    """1234567 -> 1.23M."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}P"


def format_bytes(nbytes: float) -> str:
    """1234567 -> 1.2 MB (powers of 1000)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
