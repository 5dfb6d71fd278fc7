"""One rank's failure ends every rank, soon, with the right rank, module and reason."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from harness import Outcome, RankPool
from shardwright.topology import accessors, context, failure
from shardwright.transport import collectives, objects, p2p

CONFIG = {"pipeline_parallel_degree": 2, "ddp": True, "timeout_s": 60, "log_level": "warning"}
SOON_S = 6.0


def run(n: int, fn, *args, config=CONFIG, grace_s: float = 16) -> list[Outcome]:
    with RankPool(n) as pool:
        pool.run(meet, config=config)  # imports are done, so that times mean something
        return pool.outcomes(fn, *args, config=config, timeout_s=40, grace_s=grace_s)


def meet() -> None:
    """Let every rank come this far, so that times count from here."""
    collectives.barrier("world")


def block(how: str) -> None:
    """Be where a rank can be while another one fails."""
    if how == "receive":
        p2p.irecv(torch.empty(4), (accessors.rank() + 1) % accessors.size(), 7).wait()
    elif how == "receive from the failing rank":
        p2p.irecv(torch.empty(4), 1, 7).wait()
    elif how == "send":
        p2p.isend(torch.empty(4), (accessors.rank() + 2) % accessors.size(), 9).wait()
    elif how == "barrier":
        collectives.barrier("world")
    elif how == "all_reduce":
        collectives.all_reduce(torch.ones(1000), "world")
    elif how == "recv_from":
        objects.recv_from(1)
    elif how == "raw torch collective":
        dist.all_reduce(torch.ones(4), group=accessors.get_world_process_group())
    elif how == "python":
        while True:
            sum(range(1000))
    else:
        raise AssertionError(how)


def raise_on_one(how: str) -> None:
    meet()
    if accessors.rank() != 1:
        block(how)
    time.sleep(1.0)
    try:
        raise ValueError("the answer is not 42")
    except ValueError as error:
        failure.board().report(error, module="transformer.h.7", microbatch=3)
        raise


@pytest.mark.parametrize(
    "how",
    [
        "receive",
        "receive from the failing rank",
        "barrier",
        "python",
        pytest.param("send", marks=pytest.mark.heavy),
        pytest.param("all_reduce", marks=pytest.mark.heavy),
        pytest.param("recv_from", marks=pytest.mark.heavy),
    ],
)
def test_an_exception_reaches_every_rank(how: str) -> None:
    outcomes = run(3, raise_on_one, how, config={**CONFIG, "pipeline_parallel_degree": 3})
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None
        assert "ValueError: the answer is not 42" in outcome.error
        assert outcome.seconds < 1.0 + SOON_S, outcome.error
        if rank != 1:
            assert "RemoteRankError: rank 1 failed" in outcome.error, outcome.error
            assert "microbatch 3, module 'transformer.h.7'" in outcome.error
            assert "raise_on_one" in outcome.error  # the remote traceback


def test_a_raw_torch_collective_ends_too() -> None:
    outcomes = run(2, raise_on_one, "raw torch collective")
    assert outcomes[0].error is not None
    assert outcomes[0].seconds < 1.0 + SOON_S


def kill_one(victim: int, how: str) -> None:
    meet()
    if accessors.rank() == victim:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "others":
        # waits for a rank that is alive, and itself waits for nobody
        others = [rank for rank in range(accessors.size()) if rank != victim]
        if accessors.rank() == others[0]:
            block("python")
        p2p.irecv(torch.empty(4), others[0], 7).wait()
    block(how)


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (2, "others"),
        (0, "barrier"),
        pytest.param(0, "others", marks=pytest.mark.heavy),
        pytest.param(2, "barrier", marks=pytest.mark.heavy),
    ],
)
def test_a_killed_rank_is_named_by_all(victim: int, how: str) -> None:
    outcomes = run(4, kill_one, victim, how)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None
        assert outcome.seconds < 15.0, outcome.error
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert "LostRankError" in outcome.error, outcome.error
            assert f"rank {victim} " in outcome.error.split("LostRankError")[-1], outcome.error


def stop_answering(how: str) -> None:
    meet()
    if accessors.rank() == 1:
        objects.allgather_object("last", "pp")
        if how == "python":
            while True:
                time.sleep(0.05)
        time.sleep(1.0)  # the watcher tells of the last call within half a second
        os.kill(os.getpid(), signal.SIGSTOP)
    objects.allgather_object("last", "pp")
    # 0 waits for 1; 2 waits for 0; 3 waits for 2
    waits_for = {0: 1, 2: 0, 3: 2}[accessors.rank()]
    p2p.irecv(torch.empty(4), waits_for, 7).wait()


@pytest.mark.parametrize("how", ["python", pytest.param("stopped", marks=pytest.mark.heavy)])
def test_a_rank_that_stops_answering_is_named_with_what_it_did_last(how: str) -> None:
    outcomes = run(4, stop_answering, how, config={**CONFIG, "timeout_s": 4}, grace_s=8)
    first = min((o for o in outcomes if o.error), key=lambda o: o.seconds)
    assert first.seconds < 4 + 5
    for rank in (0, 2, 3):
        text = outcomes[rank].error or ""
        assert outcomes[rank].seconds < 4 + 8, text
        assert "CommunicationTimeout" in text, text
        assert "missing: rank 1" in text, text
        assert "all_gather over pp" in text, text
    if how == "python":
        assert "CommunicationTimeout" in (outcomes[1].error or "")


def timeout_in_a_collective() -> None:
    meet()
    if accessors.rank() == 2:
        time.sleep(60)  # can't be interrupted by an exception
    collectives.barrier("world", timeout_s=3)


def test_a_barrier_names_the_ranks_that_have_not_come() -> None:
    outcomes = run(3, timeout_in_a_collective, config={**CONFIG, "pipeline_parallel_degree": 3})
    for rank in (0, 1):
        assert "barrier over world" in (outcomes[rank].error or "")
        assert "missing: rank 2" in (outcomes[rank].error or "")
        assert outcomes[rank].seconds < 3 + 5
    # it is ended at last, and says why
    assert outcomes[2].exit_code == 70
    assert outcomes[2].seconds < 3 + 15
    assert "ends here, for it can't be interrupted: RemoteRankError: rank" in (outcomes[2].error or "")


def leave_early() -> None:
    meet()
    if accessors.rank() == 1:
        context.shutdown()
        return
    p2p.irecv(torch.empty(4), 1, 7).wait()


def test_a_rank_that_has_ended_is_told_apart_from_a_lost_one() -> None:
    outcomes = run(2, leave_early)
    assert outcomes[1].error is None
    assert "rank 1 has ended its script while rank 0 still waited for it" in (outcomes[0].error or "")
    assert outcomes[0].seconds < SOON_S


def work_after_a_peer_has_ended() -> str:
    meet()
    if accessors.rank() == 0:
        context.shutdown()
        return "left"
    time.sleep(4.0)
    failure.board().raise_if_failed()
    return "finished"


def test_a_rank_may_work_on_after_a_peer_has_ended() -> None:
    outcomes = run(2, work_after_a_peer_has_ended)
    assert [outcome.value for outcome in outcomes] == ["left", "finished"]
