"""What launchers say about a process."""

from __future__ import annotations

import pytest

from shardwright.errors import ConfigError
from shardwright.topology.environment import ProcessEnvironment, detect, head_node, tasks_on_node

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "99",
}


def test_nothing_set_is_a_world_of_one() -> None:
    assert detect({}) == ProcessEnvironment("no launcher", 0, 1, 0, 1, None)


def test_torchrun() -> None:
    here = detect({**TORCHRUN, **OPEN_MPI})
    assert (here.rank, here.size, here.local_rank, here.local_size) == (3, 4, 1, 2)
    assert here.init_method == "tcp://head:1234"
    assert "torchrun" in here.source


def test_the_rendezvous_can_be_replaced() -> None:
    here = detect({**TORCHRUN, "SHARDWRIGHT_INIT_METHOD": "file:///shared/job-17"})
    assert here.init_method == "file:///shared/job-17"


def test_local_values_may_be_missing() -> None:
    here = detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert (here.local_rank, here.local_size) == (None, None)


def test_one_process_needs_no_address() -> None:
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).init_method is None


def test_open_mpi_on_one_host_meets_there() -> None:
    here = detect(OPEN_MPI)
    assert (here.rank, here.size, here.local_rank, here.local_size) == (1, 2, 1, 2)
    assert here.init_method is not None
    assert here.init_method.startswith("tcp://127.0.0.1:")
    assert detect({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).init_method == here.init_method


def test_open_mpi_on_two_hosts_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        detect({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_the_configured_port_is_used_if_the_launcher_gives_none() -> None:
    assert detect(OPEN_MPI, default_port=4567).init_method == "tcp://127.0.0.1:4567"
    assert detect({**OPEN_MPI, "MASTER_PORT": "1"}, default_port=4567).init_method == "tcp://127.0.0.1:1"


def test_pmi() -> None:
    here = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (here.rank, here.size, here.local_rank, here.local_size) == (1, 2, 1, 2)


def test_slurm() -> None:
    here = detect(SLURM)
    assert (here.rank, here.size, here.local_rank, here.local_size) == (5, 8, 1, 4)
    assert here.init_method is not None
    assert here.init_method.startswith("tcp://gpu07:")
    assert detect({**SLURM, "SLURM_JOB_ID": "100"}).init_method != here.init_method
    assert detect({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "7"}).init_method == "tcp://x:7"


def test_a_batch_script_without_srun_is_a_world_of_one() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[07-08]"}
    assert detect(batch).size == 1


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"RANK is 'x'"):
        detect({**TORCHRUN, "RANK": "x"})
    with pytest.raises(ConfigError, match="rank 4 in a world of 4"):
        detect({**TORCHRUN, "RANK": "4"})


@pytest.mark.parametrize(
    ("nodelist", "head"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,1]", "gpu3"),
        ("rack[1-2]-node,x", "rack1-node"),
        ("a.b-c.d", "a.b-c.d"),
    ],
)
def test_head_node(nodelist: str, head: str) -> None:
    assert head_node(nodelist) == head


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2", [1, 2])])
def test_tasks_on_node(text: str, counts: list[int]) -> None:
    assert [tasks_on_node(text, node) for node in range(len(counts))] == counts
    assert tasks_on_node(text, len(counts)) is None
    assert tasks_on_node("?", 0) is None
