"""Which process this is, read from the variables that a launcher sets. Pure: no process group, no device.

Launchers understood, in this order: torchrun, Open MPI, other MPIs by their PMI variables, Slurm's srun.
None of them: a world of one process. `SHARDWRIGHT_INIT_METHOD` (an address that
`torch.distributed.init_process_group` understands, such as `file:///shared/job-17`) replaces the rendezvous
address of any of them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import ConfigError

INIT_METHOD = "SHARDWRIGHT_INIT_METHOD"
SHARE_DEVICE = "SHARDWRIGHT_SHARE_DEVICE"

_PORTS = range(20000, 30000)
"""Where a rendezvous port is taken from when a launcher gives a job but no port."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """What the launcher said about this process.

    source: the launcher that was recognised, in words; `None` local values were not given.
    init_method: rendezvous address, or None for a world of one that needs none.
    """

    source: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    init_method: str | None


def detect(environ: Mapping[str, str], *, default_port: int | None = None) -> ProcessEnvironment:
    """Read the rank, the world size and the rendezvous address.

    default_port: port to use if the launcher gives none (the configuration key `ddp_port`).
    Raises: ConfigError if variables contradict each other, aren't numbers, or give no address.
    """
    for read in (_torchrun, _open_mpi, _pmi, _slurm):
        found = read(environ)
        if found is not None:
            source, rank, size, local_rank, local_size, address = found
            break
    else:
        return ProcessEnvironment("no launcher", 0, 1, 0, 1, None)
    if not 0 <= rank < size:
        raise ConfigError(
            f"{source} says rank {rank} in a world of {size}", remedy="start the processes with one launcher"
        )
    init_method = None
    if size > 1:
        init_method = environ.get(INIT_METHOD) or _address(environ, source, address, default_port)
    return ProcessEnvironment(source, rank, size, local_rank, local_size, init_method)


_Found = tuple[str, int, int, "int | None", "int | None", "str | None"]


def _torchrun(environ: Mapping[str, str]) -> _Found | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return (
        "torchrun (RANK, WORLD_SIZE)",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        _optional(environ, "LOCAL_RANK"),
        _optional(environ, "LOCAL_WORLD_SIZE"),
        None,
    )


def _open_mpi(environ: Mapping[str, str]) -> _Found | None:
    if "OMPI_COMM_WORLD_RANK" not in environ or "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return (
        "Open MPI (OMPI_COMM_WORLD_*)",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        size,
        _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size,
        "127.0.0.1" if local_size == size else None,
    )


def _pmi(environ: Mapping[str, str]) -> _Found | None:
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    size = _number(environ, "PMI_SIZE")
    local_size = _optional(environ, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    return (
        "MPI (PMI_RANK, PMI_SIZE)",
        _number(environ, "PMI_RANK"),
        size,
        _optional(environ, "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size,
        "127.0.0.1" if local_size == size else None,
    )


def _slurm(environ: Mapping[str, str]) -> _Found | None:
    # A batch script itself also sees SLURM_PROCID and SLURM_NTASKS; only srun starts a step of several tasks.
    if "SLURM_PROCID" not in environ or not ("SLURM_STEP_NODELIST" in environ or "SLURM_STEP_ID" in environ):
        return None
    size = _optional(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size is None:
        raise ConfigError("SLURM_PROCID is set, but SLURM_NTASKS is not", remedy="start the script with srun")
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in lists if environ.get(name)), None)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    node = _optional(environ, "SLURM_NODEID")
    return (
        "Slurm (SLURM_PROCID, SLURM_NTASKS)",
        _number(environ, "SLURM_PROCID"),
        size,
        _optional(environ, "SLURM_LOCALID"),
        None if tasks is None or node is None else tasks_on_node(tasks, node),
        None if nodes is None else head_node(nodes),
    )


def _address(environ: Mapping[str, str], source: str, host: str | None, default_port: int | None) -> str:
    host = environ.get("MASTER_ADDR", host)
    if host is None:
        raise ConfigError(
            f"{source} gives no address at which the ranks can meet",
            remedy="set MASTER_ADDR to the host of rank 0, on every rank",
        )
    port = _optional(environ, "MASTER_PORT")
    if port is None:
        port = default_port
    if port is None:
        # Every rank of a job must come to the same port without talking: it is derived from the job's name.
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID")
        job = ":".join(environ.get(name, "") for name in names)
        port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def head_node(nodelist: str) -> str:
    """Return the first host of a Slurm list such as `gpu[07-09,12],login1`: here `gpu07`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^\[,]*)", nodelist)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST is {nodelist!r}, expected a list of hosts",
            remedy="set MASTER_ADDR to the host of rank 0",
        )
    prefix, numbers, suffix = match.groups()
    return prefix + re.split(r"[-,]", numbers)[0] + suffix if numbers else prefix


def tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """Return how many tasks run on the node-th host, from Slurm's short form such as `4(x2),3`."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is {environ[name]!r}, expected a number"
        ) from None


def _optional(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environ.get(name):
            return _number(environ, name)
    return None
