"""Which node of a job this launcher is on, where a cluster's own launcher says so. Pure: variables in, place out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class NodePlace:
    """This host among the hosts of the job, and the address of the first."""

    nnodes: int
    node_rank: int
    master_addr: str


def place_by_slurm(environ: Mapping[str, str]) -> NodePlace | None:
    """Return the place that `srun --ntasks-per-node=1 shardwright run ...` gives; None outside such a step.

    Raises: ConfigError if srun started several launchers on a node: each starts the workers of a whole host.
    """
    from shardwright.topology.environment import head_node

    nodes = environ.get("SLURM_STEP_NODELIST")
    count, node = environ.get("SLURM_STEP_NUM_NODES"), environ.get("SLURM_NODEID")
    if nodes is None or count is None or node is None or int(count) < 2:
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", count)
    if tasks != count:
        raise ConfigError(
            f"srun started {tasks} launchers on {count} nodes, expected one on each",
            remedy="srun --ntasks-per-node=1 shardwright run ..., or srun python SCRIPT without the launcher",
        )
    return NodePlace(int(count), int(node), head_node(nodes))


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Read `host`, `host:port`, `[address]:port` as torchrun's --rdzv-endpoint takes them."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, ""
    if not host or not (port == "" or port.isdigit()):
        raise ConfigError(f"--rdzv-endpoint is {endpoint!r}, expected HOST or HOST:PORT")
    return host.strip("[]"), int(port) if port else None
