"""FF-38: one rank, or the launcher, is told to stop; all ranks save the same step, leave, and go on from there."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright.torch as smp
from any_layout import config, train, wrap
from checkpoint_ranks import caught
from harness import RankPool, run_ranks
from launched import Launched
from s3_server import S3Server
from shardwright.checkpoint.storage import steps
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

path = sys.argv[1]
stop = smp.save_on_signal(path, model=model, optimizer=optimizer)
try:
    first = smp.resume_from_checkpoint(path)["step"] + 1
    print("resumed at", first, flush=True)
except FileNotFoundError:
    first = 0
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


def losses(job: Launched) -> dict[int, set[float]]:
    """Of each step, what the ranks have printed."""
    found: dict[int, set[float]] = {}
    for _, step, loss in (line.split() for line in job.stdout.splitlines() if line.startswith("step")):
        found.setdefault(int(step), set()).add(float(loss))
    return found


def plain_losses(num_steps: int) -> list[float]:
    """What one process gets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize(("whom", "stored"), [("one rank", "in a folder"), ("the launcher", "in an object store")])
def test_all_ranks_save_the_same_step_and_leave(folder: Path, whom: str, stored: str) -> None:
    """What the job has saved is whole, and the next job goes on with it."""
    with S3Server() if stored == "in an object store" else nullcontext() as server:
        path = "checkpoints" if server is None else f"s3://{server.bucket}/run"
        environment = {} if server is None else server.environment
        if server is not None:
            server.fail(method="PUT", key="optimizer", times=1)  # is tried again
        with Launched(folder, "--nproc", "4", "--grace-s", "120", "train.py", path, **environment) as job:
            job.wait_for("now", 4, timeout_s=120)
            target = pids(job)[2] if whom == "one rank" else job.process.pid
            os.kill(target, signal.SIGTERM)
            time.sleep(0.05)
            os.kill(pids(job)[2], signal.SIGTERM)  # once more, perhaps in the middle of the save
            job.process.wait(120)
            steps = saved_steps(job)
            assert len(steps) == 4, job.stderr
            assert len(set(steps)) == 1
            assert job.stdout.count("left") == 4
            assert not [p for p in job.processes() if p != job.process.pid]
        newest = (folder / path / "newest").read_bytes() if server is None else server.get("run/newest")
        assert newest == f"step_{steps[0]}_partial".encode()
        assert server is None or server.unfinished_uploads() == []
        with Launched(folder, "--nproc", "4", "train.py", path, **environment) as job:
            assert job.process.wait(120) == 0, job.stderr
            assert job.stdout.count(f"resumed at {steps[0] + 1}\n") == 4
        told = losses(job)
        assert set(told) == {steps[0] + 1, steps[0] + 2}
        expected = plain_losses(steps[0] + 3)
        assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, of_ranks in told.items() for loss in of_ranks)


def stop_in_memory(url: str) -> list[Any]:
    """Rank 0 gets a signal; what comes of it, and the losses of going on, straight and resumed."""
    made, model, optimizer = wrap("mlp")
    with smp.save_on_signal(url, model=model, optimizer=optimizer) as stop:
        train(made, model, optimizer, 0, 2)
        assert not stop.should_stop("early")
        if smp.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        told = caught(stop.should_stop, "two", {"step": 2})
        if told[0]:
            return [told[1], stop.received]
        assert stop.should_stop("never")
    straight = train(made, model, optimizer, 2, 4)
    assert smp.resume_from_checkpoint(url) == {"step": 2}
    return [straight, train(made, model, optimizer, 2, 4)]


def test_memory_is_of_one_process(pool2: RankPool) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    ((straight, resumed),) = run_ranks(1, stop_in_memory, url, config=config((1, 1, 1)))
    assert straight == resumed
    told = pool2.run(stop_in_memory, url, config=config((2, 1, 1)))
    assert told[0][0] == told[1][0]
    assert "doesn't see the folder that rank 0 made" in told[0][0]
    assert [received for _, received in told] == [True, False]


def loops(path: str) -> list[Any]:
    """Without a signal nothing is saved; signals during the save change nothing; the handlers come back; misuse is refused."""
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 1)
    before = signal.getsignal(signal.SIGTERM)
    with smp.save_on_signal(path, model=model, optimizer=optimizer) as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
        answers = [stop.should_stop(tag="never") for _ in range(3)]
    assert signal.getsignal(signal.SIGTERM) is before
    with smp.save_on_signal(f"{path}/no", model=model, optimizer=optimizer, signals=(signal.SIGUSR2,)) as stop:
        if smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        told: list[str] = []

        def again(operation: str, where: str) -> None:
            """Before each write, move and so on of the save the signal comes once more."""
            told.append(operation)
            os.kill(os.getpid(), signal.SIGUSR2)

        with steps.watched(again):
            answers.append(stop.should_stop(tag="last", user_content={"step": 7}))
        assert len(told) > 5
        answers.append(stop.should_stop(tag="never"))
    assert sorted(os.listdir(f"{path}/no")) == ["last_partial", "newest"]
    assert smp.resume_from_checkpoint(f"{path}/no") == {"step": 7}
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


def test_without_a_signal_and_with_many(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(loops, str(tmp_path / "none"), config=config((2, 1, 1))) == [[False, False, False, True, True]] * 2
    assert os.listdir(tmp_path / "none") == ["no"]
