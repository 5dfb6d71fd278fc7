"""Any layout into any other: the property of `layout_examples`, for examples drawn from a seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "layout_examples.py"


@pytest.mark.timeout(930)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 4), *(pytest.param(seed, 10, marks=pytest.mark.heavy) for seed in range(1, 6))]
)
def test_training_goes_on(seed: int, count: int) -> None:
    """FF-17. The seed and each example are printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, str(SCRIPT), str(seed), str(count)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
