"""FF-20: saves that are killed or refused at every step, one after another; see `chaos_saves`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="paths of open files are found through /proc")

SCRIPT = Path(__file__).parents[1] / "chaos_saves.py"


@pytest.mark.timeout(630)
@pytest.mark.parametrize(
    ("seed", "chains", "saves"),
    [(0, 4, 5), *(pytest.param(seed, 4, 10, marks=pytest.mark.heavy) for seed in range(1, 6))],
)
def test_the_newest_checkpoint_always_loads(seed: int, chains: int, saves: int) -> None:
    """20 saves; with the heavy ones 220."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, str(SCRIPT), str(seed), str(chains), str(saves)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "'killed'" in run.stdout, run.stdout
    assert "'refused'" in run.stdout, run.stdout
    assert "damage" in run.stdout, run.stdout
