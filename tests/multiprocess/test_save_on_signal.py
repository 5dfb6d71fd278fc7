"""FF-38: one rank, or the launcher, is told to stop; all ranks save the same step, leave, and go on from there."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import shardwright.torch as smp
from any_layout import config, wrap
from harness import RankPool
from launched import Launched
from shardwright.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

SCRIPT = """
import os, sys, time
import torch
import shardwright.torch as smp

smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2, "log_level": "warning"})
torch.manual_seed(0)
model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

stop = smp.save_on_signal("checkpoints", model=model, optimizer=optimizer)
first = 0
if os.path.exists("checkpoints"):
    first = smp.resume_from_checkpoint("checkpoints")["step"] + 1
    print("resumed at", first, flush=True)
print("pid", smp.rank(), os.getpid(), flush=True)
for step in range(first, first + 2 if first else 10_000):
    optimizer.zero_grad()
    loss = train_step(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
    optimizer.step()
    print("step", step, float(loss.reduce_mean()), flush=True)
    if step == 5:
        print("now", flush=True)
    time.sleep(0.02)
    if stop.should_stop(tag=f"step_{step}", user_content={"step": step}):
        print("saved", step, flush=True)
        break
print("left", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def pids(job: Launched) -> dict[int, int]:
    return {int(r): int(pid) for _, r, pid in (line.split() for line in job.stdout.splitlines() if line.startswith("pid"))}


def saved_steps(job: Launched) -> list[int]:
    return [int(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("saved")]


@pytest.mark.parametrize("whom", ["one rank", "the launcher"])
def test_all_ranks_save_the_same_step_and_leave(folder: Path, whom: str) -> None:
    with Launched(folder, "--nproc", "4", "--grace-s", "60", "train.py") as job:
        job.wait_for("now", 4, timeout_s=120)
        target = pids(job)[2] if whom == "one rank" else job.process.pid
        os.kill(target, signal.SIGTERM)
        time.sleep(0.05)
        os.kill(pids(job)[2], signal.SIGTERM)  # once more, perhaps in the middle of the save
        job.process.wait(60)
        steps = saved_steps(job)
        assert len(steps) == 4, job.stderr
        assert len(set(steps)) == 1
        assert job.stdout.count("left") == 4
        assert not [p for p in job.processes() if p != job.process.pid]
    with Launched(folder, "--nproc", "4", "train.py") as job:
        assert job.process.wait(120) == 0, job.stderr
        assert job.stdout.count(f"resumed at {steps[0] + 1}\n") == 4


def quiet_loop(path: str) -> list[Any]:
    """Without a signal nothing is saved; the handlers come back; misuse is refused."""
    _, model, optimizer = wrap("mlp")
    before = signal.getsignal(signal.SIGTERM)
    with smp.save_on_signal(path, model=model, optimizer=optimizer) as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
        answers = [stop.should_stop(tag="never") for _ in range(3)]
    assert signal.getsignal(signal.SIGTERM) is before
    refused: list[Exception] = []

    def elsewhere() -> None:
        try:
            smp.save_on_signal(path)
        except UsageError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(refused[0])
    return answers


def test_without_a_signal(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(quiet_loop, str(tmp_path / "none"), config=config((2, 1, 1))) == [[False] * 3] * 2
    assert not (tmp_path / "none").exists()
