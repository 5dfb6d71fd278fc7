"""The harness itself: every rank's traceback, stacks of what hangs, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import harness
from harness import RankFailure, RankPool, run_ranks


def fail_differently() -> None:
    rank = int(os.environ["RANK"])
    print(f"output of rank {rank}")
    raise ValueError(f"reason {rank}")


def hang_on_one() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    return 7


def return_rank() -> int:
    return int(os.environ["RANK"])


def end(how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_failure_shows_every_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, fail_differently)
    text = str(caught.value)
    for rank in range(2):
        assert f"ValueError: reason {rank}" in text
        assert f"output of rank {rank}" in text
    assert "fail_differently" in caught.value.tracebacks[0]


def test_a_hung_rank_shows_its_stack_and_the_pool_recovers() -> None:
    with RankPool(2) as pool:
        assert pool.run(return_rank) == [0, 1]
        former = pool.process_ids
        outcomes = pool.outcomes(hang_on_one, timeout_s=2)
        assert outcomes[0].value == 7
        assert "still running after " in (outcomes[1].error or "")
        assert "in hang_on_one" in (outcomes[1].error or "")
        assert pool.run(return_rank) == [0, 1]
        assert not any(is_alive(pid) for pid in former)
        assert set(pool.process_ids).isdisjoint(former)
        assert "ended with status 3" in (pool.outcomes(end, "exit")[0].error or "")
        assert "killed by SIGKILL" in (pool.outcomes(end, "kill")[1].error or "")
        last = pool.process_ids
    assert not any(is_alive(pid) for pid in last)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_tests(stop: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "tests_that_are_stopped.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, time
            from harness import RankPool

            def hang():
                print(os.environ["RANK"], flush=True)
                time.sleep(1000)

            if __name__ == "__main__":
                with RankPool(2) as pool:
                    pool.run(int, 3)
                    print(*pool.process_ids, flush=True)
                    pool.run(hang)
            """
        )
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(harness.__file__).parent), *sys.path]),
    }
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        time.sleep(0.5)
        assert all(is_alive(pid) for pid in children)
        parent.send_signal(stop)
        parent.wait(timeout=20)
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in children)
