"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from shardwright.errors import UsageError

_FACTORS = {"": 1, "B": 1}
_FACTORS.update({f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)})
_FACTORS.update({f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)})


def parse_size(option: str, text: str) -> int:
    """24GiB, 80 GB, 512MiB or a plain number of bytes, in bytes.

    Raises: UsageError naming the option.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _FACTORS:
        raise UsageError(
            f"--{option} is '{text}', expected a number with a unit",
            remedy=f"write for example --{option} 24GiB, 80GB or 512MiB",
        )
    return round(float(found[1]) * _FACTORS[found[2].upper()])


def format_size(nbytes: float) -> str:
    """1610612736 -> 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
