"""A world on paper: rank functions and distributed modules answer as on rank 0 of a layout, and nothing can be sent.

For plans made by one process. Shapes are as they would be; whatever would communicate must be kept from it (fake tensors,
`transport.differentiable.shapes_only`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwright.config.schema import Config
from shardwright.errors import UsageError
from shardwright.topology import context
from shardwright.topology.devices import DeviceChoice
from shardwright.topology.failure import FailureBoard
from shardwright.topology.groups import Groups
from shardwright.topology.ranks import Degrees, RankTable


@contextmanager
def pretended(config: Config, world_size: int) -> Iterator[context.World]:
    """Inside, this process is rank 0 of `world_size`, with the degrees of `config`.

    Called by: a process that has not called `init`. Collectives: none.
    Raises: UsageError if there is a world already; ConfigError if the degrees don't fit its size.
    """
    if context.is_initialized():
        raise UsageError("a layout can't be tried on paper inside a running job", remedy="call smp.shutdown() first")
    degrees = Degrees.of_world(
        world_size, pp=config.pipeline_parallel_degree, tp=config.tensor_parallel_degree
    )
    table = RankTable(degrees, config.placement_strategy)
    world = context.World(
        config=config,
        table=table,
        rank=0,
        size=world_size,
        local_rank=0,
        local_size=world_size,
        devices=DeviceChoice(torch.device("cpu"), "gloo"),
        coordinates=table.coordinates(0),
        groups=Groups(table, 0, {}, (), "cpu"),
        board=FailureBoard(0, 1, timeout_s=config.timeout_s, startup_timeout_s=config.startup_timeout_s),
        script_coordinates=table.coordinates(0),
        script_local_rank=0,
        job_id="",
    )
    with context.standing_in(world):
        yield world
