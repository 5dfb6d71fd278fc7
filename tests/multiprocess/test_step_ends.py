"""Processes that end in the middle of a step: killed, interrupted, by an error; none hangs, none is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scripts import Job, start, torchrun_variables
from torch import Tensor

import step_probe
from harness import RankPool

CONFIG: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "microbatches": 4,
    "auto_partition": False,
    "ddp": True,
    "timeout_s": 60,
    "log_level": "warning",
}


def killed_in_a_step(victim: int, where: str) -> None:
    import shardwright.torch as smp

    model = step_probe.wrapped()
    step = step_probe.make_step()
    for seed in range(2):
        step(model, step_probe.batch(seed))

    def act(x: Tensor) -> Tensor:
        if smp.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tanh(x)

    if where == "a unit":
        for block in model.get_module().transformer.h:
            block.act = act
    elif smp.rank() == victim:
        model.register_post_step_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for seed in range(2):
        step(model, step_probe.batch(seed))


@pytest.mark.parametrize(
    ("victim", "where"),
    [
        (1, "a unit"),
        pytest.param(2, "a unit", marks=pytest.mark.heavy),
        pytest.param(0, "between two steps", marks=pytest.mark.heavy),
    ],
)
def test_a_killed_rank_is_named_by_all(victim: int, where: str) -> None:
    with RankPool(4) as pool:
        pool.run(step_probe.batch, config=CONFIG)  # processes are up, so that times mean something
        outcomes = pool.outcomes(killed_in_a_step, victim, where, config=CONFIG, timeout_s=50, grace_s=15)
    died_s = outcomes[victim].seconds
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL, outcome.error
        else:
            assert "LostRankError" in outcome.error, outcome.error
            assert f"rank {victim} " in outcome.error.split("LostRankError")[-1], outcome.error
            assert outcome.seconds - died_s < 15, outcome.error


PREAMBLE = f"""
    import signal, step_probe
    import shardwright.torch as smp
    smp.init({ {**CONFIG, "ddp": False} })
    model = step_probe.wrapped()
    step = step_probe.make_step()
    for seed in range(2):
        step(model, step_probe.batch(seed))
    blocks = model.get_module().transformer.h

    def now():
        open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "now-" + os.environ["RANK"]), "w").close()
"""


def wait_for_now(folder: Path, job: Job) -> float:
    """Wait until every rank has called `now()`; returns when that was."""
    while len(list(folder.glob("now-*"))) < len(job.processes):
        assert all(process.poll() is None for process in job.processes), job.finish()
        time.sleep(0.05)
    return time.monotonic()


def ended(folder: Path, job: Job) -> list[tuple[int, str]]:
    """Status and output of all, which must end within 15 s after "now"."""
    start_s = wait_for_now(folder, job)
    results = job.finish(timeout_s=90)
    assert time.monotonic() - start_s < 15
    return results


def test_an_error_in_a_unit_ends_the_script_on_every_rank(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    def act(x):
        raise ZeroDivisionError("it broke")
    blocks[3].act = act
    now()
    step(model, step_probe.batch())
    """
    )
    with start(tmp_path, script, torchrun_variables(2)) as job:
        (first_status, first), (second_status, second) = ended(tmp_path, job)
    assert (first_status, second_status) == (1, 1), first + second
    assert "RemoteRankError: rank 1 failed: ZeroDivisionError: it broke" in first
    assert "microbatch 0, module 'transformer.h.3'" in first
    last_words = [line.removeprefix("[rank1]: ") for line in second.splitlines()[-2:]]
    assert last_words == [
        "ZeroDivisionError: it broke",
        "on pipeline rank 1, microbatch 0, module 'transformer.h.3'",
    ]
    assert "the reason is" not in second


@pytest.mark.heavy
def test_a_rank_that_is_busy_ends_when_another_fails(tmp_path: Path) -> None:
    """One in Python, one in the kernel, one in a long matrix product: none of them waits for a message."""
    script = (
        PREAMBLE
        + """
    def busy(x):
        rank = smp.rank()
        if rank == 0:
            time.sleep(100)
        if rank == 1:
            while True:
                sum(range(1000))
        if rank == 2:
            big = torch.randn(1500, 1500)
            while True:
                big @ big
        time.sleep(1)
        raise ZeroDivisionError("it broke")

    @smp.step
    def all_at_once(model, x):
        for block in model.get_module().transformer.h:
            block(x)

    for _ in range(2):  # now all is known of these calls, and nobody waits for news
        all_at_once(model, step_probe.batch())
    for block in blocks:
        block.act = busy
    now()
    all_at_once(model, step_probe.batch())
    """
    )
    script = script.replace("'pipeline_parallel_degree': 2", "'pipeline_parallel_degree': 4")
    with start(tmp_path, script, torchrun_variables(4)) as job:
        results = ended(tmp_path, job)
    for rank, (status, output) in enumerate(results):
        assert status not in (0, -signal.SIGSEGV, -signal.SIGABRT), (rank, output)
        assert "ZeroDivisionError: it broke" in output, (rank, output)


@pytest.mark.heavy
def test_an_interrupt_in_the_middle_of_a_step_ends_it(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    def slow(x):
        for _ in range(100):
            time.sleep(0.1)
        return x
    blocks[2].act = slow
    now()
    try:
        step(model, step_probe.batch())
    finally:
        print("ended by", type(sys.exc_info()[1]).__name__, flush=True)
    """
    )
    with start(tmp_path, script, torchrun_variables(2)) as job:
        wait_for_now(tmp_path, job)
        time.sleep(0.5)
        interrupted_s = time.monotonic()
        job.processes[1].send_signal(signal.SIGINT)
        (first_status, first), (second_status, second) = job.finish(timeout_s=60)
    assert time.monotonic() - interrupted_s < 15
    assert "ended by KeyboardInterrupt" in second
    assert "ended by RemoteRankError" in first
    assert "rank 1 failed: KeyboardInterrupt" in first
    assert 0 not in (first_status, second_status)


@pytest.mark.heavy
def test_an_error_that_is_caught_lets_the_script_end_in_its_own_way(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    def act(x):
        raise ZeroDivisionError("it broke")
    blocks[3].act = act
    now()
    try:
        step(model, step_probe.batch())
    except Exception as error:
        print("caught", type(error).__name__, flush=True)
    """
    )
    with start(tmp_path, script, torchrun_variables(2)) as job:
        (first_status, first), (second_status, second) = ended(tmp_path, job)
    assert (first_status, second_status) == (0, 0), first + second
    assert first == "caught RemoteRankError\n"
    assert second == "caught ZeroDivisionError\n"
