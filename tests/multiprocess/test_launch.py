"""`shardwright run` with real processes: plain Python workers where possible, so that tests are quick."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from launched import Launched, can_listen, free_port, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

# Loops until told otherwise; rank 0 listens on the job's port, rank 1 has two stubborn data-loader processes.
LOOP = """
import os, signal, socket, subprocess, sys, time
rank, mode = int(os.environ["RANK"]), sys.argv[1]
if rank == 0:
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("", int(os.environ["MASTER_PORT"])))
    store.listen()
if rank == 1:
    loader = "import signal as s, time; [s.signal(n, s.SIG_IGN) for n in (1, 2, 15)]; print('L', flush=True)"
    for own_session in (False, True):
        process = subprocess.Popen(
            [sys.executable, "-c", loader + "; time.sleep(600)"],
            stdout=subprocess.PIPE, start_new_session=own_session,
        )
        process.stdout.readline()
if mode == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", rank, os.getpid())
while True:
    time.sleep(0.05)
    if mode == "raise" and rank == 2 and os.path.exists("go"):
        raise ValueError("learning rate went negative")
"""


def _script(folder: Path, source: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def _start_loop(folder: Path, mode: str = "loop", options: tuple[str, ...] = ()) -> Launched:
    job = Launched(folder, "--nproc", "4", *options, _script(folder, LOOP), mode)
    job.wait_for("ready", 4)
    return job


def _pid_of(job: Launched, rank: int) -> int:
    return next(int(line.split()[2]) for line in job.stdout.splitlines() if line.startswith(f"ready {rank} "))


def _port_of(job: Launched) -> int:
    return int(job.stderr.partition(", port ")[2].split()[0])


# What ends a job, and what must be true afterwards (field-faults FF-37).


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_leaves_nothing(tmp_path: Path, number: int, exit_code: int) -> None:
    with _start_loop(tmp_path) as job:
        port = _port_of(job)
        assert not can_listen(port)
        assert len(job.processes()) == 8  # front, supervisor, four workers, two data loaders
        os.kill(job.process.pid, number)
        assert job.finish() == exit_code
        assert can_listen(port)
        assert "Traceback" not in job.stderr
        assert f"stopped by {signal.Signals(number).name}" in job.stderr


def test_ctrl_c_in_a_terminal_counts_once(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole foreground group; a worker still has its time to end."""
    script = _script(
        tmp_path,
        """
        import os, time
        print("ready", os.environ["RANK"])
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(1.0)
            open("saved" + os.environ["RANK"], "w").close()
        """,
    )
    with Launched(tmp_path, "--nproc", "2", script) as job:
        job.wait_for("ready", 2)
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.finish() == 130
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with _start_loop(tmp_path, "deaf", options=("--grace-s", "60")) as job:
        os.kill(job.process.pid, signal.SIGINT)
        job.wait_for("workers have 60 s to end")
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish(5) == 130


def test_workers_that_ignore_signals_are_killed_after_the_grace(tmp_path: Path) -> None:
    with _start_loop(tmp_path, "deaf", options=("--grace-s", "1")) as job:
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish(8) == 143


def test_workers_can_save_on_sigterm_and_a_second_one_does_not_break_it(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        """
        import os, signal, time
        rank = os.environ["RANK"]
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        print("ready", rank)
        while not asked:
            time.sleep(0.02)
        print("saving", rank)
        time.sleep(1.5)
        open("saved" + rank, "w").close()
        """,
    )
    with Launched(tmp_path, "--nproc", "2", script) as job:
        job.wait_for("ready", 2)
        os.kill(job.process.pid, signal.SIGTERM)
        job.wait_for("saving", 2)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish() == 143
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_an_exception_while_stopping_is_shown(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        """
        import time
        print("ready")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            raise OSError("disk full while saving") from None
        """,
    )
    with Launched(tmp_path, "--nproc", "1", script) as job:
        job.wait_for("ready")
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish() == 130
        assert job.stderr.count("OSError: disk full while saving") == 1


def test_a_killed_worker_ends_the_job(tmp_path: Path) -> None:
    with _start_loop(tmp_path) as job:
        port = _port_of(job)
        os.kill(_pid_of(job, 1), signal.SIGKILL)  # the one with data loaders
        assert job.finish() == 137
        assert "rank 1 failed first: killed by SIGKILL" in job.stderr
        for rank in (0, 2, 3):
            assert f"  rank {rank}: stopped by the launcher\n" in job.stderr
        assert can_listen(port)


def test_an_exception_in_one_worker_is_shown_once(tmp_path: Path) -> None:
    with _start_loop(tmp_path, "raise") as job:
        port = _port_of(job)
        (tmp_path / "go").touch()
        assert job.finish() == 1
        assert job.stderr.count("Traceback (most recent call last)") == 1
        assert job.stderr.count("ValueError: learning rate went negative") == 1
        assert "rank 2 failed first: exit code 1\n\nTraceback" in job.stderr
        assert can_listen(port)


@pytest.mark.parametrize("victim", ["front", "supervisor"])
def test_killing_the_launcher_itself_leaves_nothing(tmp_path: Path, victim: str) -> None:
    with _start_loop(tmp_path) as job:
        port = _port_of(job)
        os.kill(job.process.pid if victim == "front" else job.supervisor(), signal.SIGKILL)
        assert job.finish() == (-signal.SIGKILL if victim == "front" else 128 + signal.SIGKILL)
        assert can_listen(port)


def test_what_a_finished_script_leaves_running_is_stopped(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); print('end')",
    )
    with Launched(tmp_path, "--nproc", "2", script) as job:
        assert job.finish() == 0
        assert job.stdout == "end\nend\n"


def test_ctrl_c_while_waiting_for_an_absent_node(tmp_path: Path) -> None:
    """The worker waits inside PyTorch's store, where Python's own Ctrl-C has no effect."""
    script = _script(
        tmp_path,
        """
        import torch.distributed as dist
        print("waiting")
        dist.init_process_group("gloo")
        """,
    )
    port = free_port()
    options = ("--nproc", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    with Launched(tmp_path, *options, script) as job:
        job.wait_for("waiting", timeout_s=60)
        wait_until(lambda: not can_listen(port), timeout_s=30)
        os.kill(job.process.pid, signal.SIGINT)
        job.wait_for("SIGINT: workers have 10 s to end", timeout_s=3)
        assert job.finish() == 130
        assert can_listen(port)


# Ports (field-faults FF-36).

SUM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(sys.argv[1])])
dist.all_reduce(value)
print("sum", value.item())
dist.destroy_process_group()
"""


def test_two_jobs_with_default_options_are_separate(tmp_path: Path) -> None:
    script = _script(tmp_path, SUM)
    with Launched(tmp_path, "--nproc", "2", script, "1") as one:
        with Launched(tmp_path, "--nproc", "2", script, "100") as other:
            assert one.finish(90) == 0, one.stderr
            assert other.finish(90) == 0, other.stderr
            assert one.stdout == "sum 2.0\n" * 2
            assert other.stdout == "sum 200.0\n" * 2
            assert _port_of(one) != _port_of(other)


def test_a_given_port_that_is_taken_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        script = _script(tmp_path, "open('started', 'w')")
        with Launched(tmp_path, "--nproc", "2", "--master-port", str(port), script) as job:
            assert job.finish(10) == 2
            assert f"port {port} is taken" in job.stderr
    assert not (tmp_path / "started").exists()


def test_a_port_can_be_used_again_at_once(tmp_path: Path) -> None:
    port = str(free_port())
    for value in ("1", "2"):
        with Launched(tmp_path, "--nproc", "1", "--master-port", port, _script(tmp_path, SUM), value) as job:
            assert job.finish(60) == 0, job.stderr


# What workers get, and what the user sees.


def test_workers_get_torchruns_variables_and_the_configuration(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], sys.stdin.read()]))",
    )
    arguments = ["--pp", "2", "--microbatches", "4", "--schedule", "simple", "-o", "memory_weight=0.5"]
    with Launched(tmp_path, *arguments, script, "--pp", "9", "-o", "x") as job:
        assert job.finish() == 0, job.stderr
        workers = sorted((json.loads(line) for line in job.stdout.splitlines()), key=lambda w: w[0]["RANK"])
        assert "torchrun --nproc-per-node=2" in job.stderr
    assert [environment["RANK"] for environment, _, _ in workers] == ["0", "1"]
    for environment, script_arguments, stdin in workers:
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["LOCAL_RANK"] == environment["RANK"]
        assert json.loads(environment["SM_HP_MP_PARAMETERS"]) == {
            "partitions": 2,
            "microbatches": 4,
            "pipeline": "simple",
            "memory_weight": 0.5,
        }
        assert json.loads(environment["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_enabled": True}
        assert script_arguments == ["--pp", "9", "-o", "x"]
        assert stdin == ""


def test_two_nodes_number_their_ranks_together(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os; print(*(os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')))",
    )
    port = str(free_port())
    meeting = [["--master-addr", "127.0.0.1", "--master-port", port], ["--rdzv-endpoint", f"127.0.0.1:{port}"]]
    lines = []
    for node, place in enumerate(meeting):
        options = ["--nproc", "2", "--nnodes", "2", "--node-rank", str(node), *place]
        with Launched(tmp_path, *options, script) as job:
            assert job.finish() == 0, job.stderr
            lines += job.stdout.splitlines()
    assert sorted(lines) == [f"{rank} {rank % 2} 4 {port}" for rank in range(4)]


def test_the_first_failure_is_found_behind_its_echoes(tmp_path: Path) -> None:
    """Ranks 0 and 2 end first, with rank 1's reason; rank 1 itself takes longer to end."""
    script = _script(
        tmp_path,
        """
        import atexit, os, time
        from shardwright.errors import RemoteRankError
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 1.5)
            raise KeyError("weight")
        time.sleep(0.5)
        raise RemoteRankError("rank 1 failed: KeyError: 'weight'", where="module 'h.3'")
        """,
    )
    with Launched(tmp_path, "--nproc", "3", "--log-dir", "logs", script) as job:
        assert job.finish() == 1
        assert "rank 1 failed first: exit code 1\n\nTraceback" in job.stderr
        assert job.stderr.count("Traceback (most recent call last)") == 1
        echo = "exit code 1; shardwright.errors.RemoteRankError: rank 1 failed: KeyError: 'weight'\n"
        assert job.stderr.endswith(f"other ranks:\n  rank 0: {echo}  rank 2: {echo}")
    assert "RemoteRankError" in (tmp_path / "logs" / "rank_0.err").read_text()


def test_a_traceback_that_is_survived_is_passed_on(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        """
        import sys, traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        print("goes on", file=sys.stderr)
        """,
    )
    with Launched(tmp_path, "--nproc", "1", script) as job:
        assert job.finish() == 0
        assert job.stderr.endswith("ZeroDivisionError: division by zero\ngoes on\n")


def test_exit_codes_and_last_words_pass_through(tmp_path: Path) -> None:
    script = _script(tmp_path, "import sys; print('no data in', sys.argv[1], file=sys.stderr); sys.exit(3)")
    with Launched(tmp_path, "--nproc", "1", "--tag-output", script, "there") as job:
        assert job.finish() == 3
        assert "[rank 0] no data in there\n" in job.stderr
        assert "rank 0 failed first: exit code 3" in job.stderr


def test_impossible_degrees_are_refused_before_anything_starts(tmp_path: Path) -> None:
    script = _script(tmp_path, "open('started', 'w')")
    with Launched(tmp_path, "--nproc", "3", "--pp", "2", script) as job:
        assert job.finish(10) == 2
        assert "3 processes" in job.stderr
        assert "pipeline_parallel_degree 2" in job.stderr
    assert not (tmp_path / "started").exists()


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with Launched(tmp_path, "nowhere.py") as job:
        assert job.finish() == 2
        assert "there is no script 'nowhere.py'" in job.stderr
