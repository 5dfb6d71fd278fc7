"""Whole scripts as users start them: by a launcher or none; they end well, badly, or by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PRELUDE = """
import os, sys, time, torch
from shardwright.topology import accessors, context, failure
from shardwright.transport import collectives, objects, p2p
"""

CONFIG = '{"pipeline_parallel_degree": 2, "log_level": "warning", "timeout_s": 30}'


class Job:
    """The processes of one script, and what each has written."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.started = time.monotonic()

    def finish(self, timeout_s: float = 40) -> list[tuple[int, str]]:
        """Wait for all; return status and output of each."""
        results = []
        for process in self.processes:
            remaining = max(0.1, self.started + timeout_s - time.monotonic())
            output, _ = process.communicate(timeout=remaining)
            results.append((process.returncode, output))
        return results


@contextlib.contextmanager
def start(
    folder: Path, script: str, ranks: list[dict[str, str]], launcher: Sequence[str] = ()
) -> Iterator[Job]:
    """Start a script once for each set of variables; kill what is left at the end.

    launcher: a module and its arguments that start the script instead.
    """
    path = folder / "train.py"
    path.write_text(PRELUDE + textwrap.dedent(script))
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "SLURM_", "SM_", "SHARDWRIGHT_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    clean["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, *(["-m", *launcher] if launcher else []), str(path)],
            env={**clean, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for variables in ranks
    ]
    try:
        yield Job(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun_variables(n: int) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(n)
    ]


def open_mpi_variables(n: int) -> list[dict[str, str]]:
    job = str(free_port())
    return [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(n),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(n),
            "OMPI_MCA_ess_base_jobid": job,
        }
        for rank in range(n)
    ]


def slurm_variables(n: int) -> list[dict[str, str]]:
    return [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(n),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": port,
        }
        for port in [str(free_port())]
        for rank in range(n)
    ]


def test_a_plain_script_is_a_world_of_one(tmp_path: Path) -> None:
    script = """
        context.init()
        assert (accessors.rank(), accessors.size(), accessors.local_size()) == (0, 1, 1)
        for axis in ("pp", "tp", "rdp", "dp", "mp", "world"):
            group = context.world().groups.process_group(axis)
            torch.distributed.all_reduce(torch.ones(1), group=group)
            collectives.barrier(axis)
            assert objects.allgather_object({"a": 1}, axis) == [{"a": 1}]
        objects.broadcast("nobody hears this")
    """
    with start(tmp_path, script, [{}]) as job:
        assert job.finish() == [
            (0, "[shardwright rank 0] INFO 1 rank(s): pp 1, tp 1, rdp 1, placement DPT, on cpu by gloo\n")
        ]


@pytest.mark.parametrize("variables", [torchrun_variables, open_mpi_variables, slurm_variables])
def test_launchers_and_a_quiet_end(variables, tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        assert objects.allgather_object(accessors.rank(), "world") == [0, 1]
        print("rank", accessors.rank(), accessors.local_rank(), accessors.local_size())
    """
    with start(tmp_path, script, variables(2)) as job:
        assert job.finish() == [(0, "rank 0 0 2\n"), (0, "rank 1 1 2\n")]


def test_init_shutdown_init_again(tmp_path: Path) -> None:
    script = f"""
        for _ in range(3):
            context.init({CONFIG})
            assert objects.allgather_object(accessors.rank(), "pp") == [0, 1]
            context.shutdown()
            assert not context.is_initialized()
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        assert job.finish() == [(0, ""), (0, "")]


def test_a_default_group_that_is_there_already_is_used(tmp_path: Path) -> None:
    script = f"""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        context.init({CONFIG})
        assert accessors.local_size() == 2
        assert objects.allgather_object(accessors.rank(), "pp") == [0, 1]
        context.shutdown()
        assert dist.is_initialized()
        dist.barrier()
        dist.destroy_process_group()
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        assert job.finish() == [(0, ""), (0, "")]


def test_an_uncaught_exception_ends_all_with_the_reason(tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        collectives.barrier()
        if accessors.rank() == 0:
            raise KeyError("missing column")
        p2p.irecv(torch.empty(2), 0, 0).wait()
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        (first_status, first), (second_status, second) = job.finish()
        assert (first_status, second_status) == (1, 1)
        assert "KeyError: 'missing column'" in first
        assert "RemoteRankError: rank 0 failed: KeyError: 'missing column'" in second


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_script_is_named_although_it_may_serve_the_store(victim: int, tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        collectives.barrier()
        print("ready", flush=True)
        p2p.irecv(torch.empty(2), 1 - accessors.rank(), 0).wait()
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        for process in job.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        killed_at = time.monotonic()
        job.processes[victim].kill()
        results = job.finish()
        assert time.monotonic() - killed_at < 15
        status, output = results[1 - victim]
        assert status == 1
        assert "LostRankError" in output
        assert f"LostRankError: rank {victim} went away without a word" in output
        assert output.count("recvValue failed") == 0


def test_sys_exit_on_one_rank(tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        collectives.barrier()
        if accessors.rank() == 1:
            sys.exit(3)
        objects.recv_from(1)
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        (first_status, first), (second_status, second) = job.finish()
        assert (first_status, second_status, second) == (1, 3, "")
        assert "rank 1 has ended its script while rank 0 still waited for it" in first


def test_a_script_may_destroy_the_groups_itself(tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        collectives.barrier()
        torch.distributed.destroy_process_group()
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        assert job.finish() == [(0, ""), (0, "")]


def test_torchrun_lets_every_rank_say_the_reason(tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        collectives.barrier()
        if accessors.rank() == 1:
            raise KeyError("missing column")
        p2p.irecv(torch.empty(2), 1, 0).wait()
    """
    with start(
        tmp_path, script, [{}], launcher=["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ) as job:
        ((status, output),) = job.finish()
        assert status == 1
        assert "KeyError: 'missing column'" in output
        assert "RemoteRankError: rank 1 failed: KeyError: 'missing column'" in output
        assert "recvValue failed" not in output


def test_ranks_may_end_at_different_times(tmp_path: Path) -> None:
    script = f"""
        context.init({CONFIG})
        collectives.barrier()
        time.sleep(4 * accessors.rank())
    """
    with start(tmp_path, script, torchrun_variables(2)) as job:
        assert job.finish() == [(0, ""), (0, "")]


def test_a_data_loader_child_does_not_keep_a_killed_rank_alive(tmp_path: Path) -> None:
    script = f"""
        import signal
        context.init({CONFIG})
        collectives.barrier()
        child = os.fork()
        if child == 0:
            assert accessors.size() == 2
            time.sleep(30)
            os._exit(0)
        if accessors.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            p2p.irecv(torch.empty(2), 1, 0).wait()
        finally:
            os.kill(child, signal.SIGKILL)
            print("waited", flush=True)
    """
    began = time.monotonic()
    with start(tmp_path, script, torchrun_variables(2)) as job:
        output, _ = job.processes[0].communicate(timeout=25)
        assert time.monotonic() - began < 20
        assert "LostRankError" in output
        assert "rank 1 " in output.split("LostRankError")[-1]


def test_too_few_ranks_is_a_clear_error(tmp_path: Path) -> None:
    script = """
        context.init({"pipeline_parallel_degree": 2, "startup_timeout_s": 3, "timeout_s": 3})
    """
    with start(tmp_path, script, torchrun_variables(2)[:1]) as job:
        ((status, output),) = job.finish()
        assert status == 1
        assert "CommunicationTimeout: the 2 ranks did not meet at tcp://127.0.0.1" in output
