"""The end of a process while a thread of gloo still has something to let go of."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# One interpreter that has imported everything ends 25 times, in forks. With so long a switch interval a thread
# that waits for the interpreter gets it only when the main thread has to wait for something.
SCRIPT = """
import os, sys, torch
from shardwright.topology import context
for _ in range(25):
    child = os.fork()
    if child == 0:
        sys.setswitchinterval(1000)
        context.init({"log_level": "warning"})
        group = context.world().groups.process_group("world")  # as a script or a model keeps it to the end
        for _ in range(5):
            torch.distributed.all_reduce(torch.ones(1), group=group)
        break
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end waits a fixed time")
def test_a_process_ends_well_although_its_groups_are_still_referred_to() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
