"""Run a script of `examples/` in processes that are up already: as launchers start it, without paying for imports again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from harness import RankPool

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def on_this_rank(script: str, words: tuple[str, ...]) -> str:
    """Run a script as `__main__`; returns what it printed."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [script, *words]), contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def run_example(pool: RankPool, name: str, *words: str, layout: Mapping[str, Any] | None = None) -> str:
    """Run an example on all ranks of a pool; returns what world rank 0 printed.

    layout: configuration keys that the launcher would put into the environment.
    """
    environment = {"SM_HP_MP_PARAMETERS": json.dumps(dict(layout))} if layout else {}
    script = os.fspath(EXAMPLES / name)
    first, *others = pool.run(on_this_rank, script, words, environment=environment, timeout_s=240)
    assert not any(others), others
    return str(first)


def losses_of(printed: str) -> dict[int, list[float]]:
    """Step -> the numbers printed for it, the first of which is the loss."""
    lines = re.findall(r"^step (\d+): (.*)$", printed, re.MULTILINE)
    return {int(step): [float(number) for number in re.findall(r"[-\d.e+]+(?=,|$)", rest)] for step, rest in lines}
