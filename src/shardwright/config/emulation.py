"""Whether CUDA is to be emulated, and how child processes learn of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SHARDWRIGHT_EMULATE_CUDA"
_SITE = Path(__file__).parents[1] / "emulation" / "site"


def requested(environ: Mapping[str, str]) -> bool:
    """Is the variable set to anything but 0?"""
    return environ.get(VARIABLE, "0") not in ("", "0")


def variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment of processes that are to emulate CUDA, whatever they import.

    The folder on PYTHONPATH holds a `sitecustomize`, which every Python process loads at its start.
    """
    path = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(_SITE)]
    return {VARIABLE: "1", "PYTHONPATH": os.pathsep.join([str(_SITE), *path])}
