"""Groups, accessors, views and second inits, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import RankFailure, RankPool, run_ranks
from shardwright.errors import ConfigError, NotInitializedError
from shardwright.topology import accessors, context
from shardwright.topology.ranks import AXES
from shardwright.transport import collectives, objects

QUIET = {"ddp": True, "log_level": "warning"}


def describe_groups() -> dict[str, Any]:
    """Return what this rank is told, and what its process groups really join together."""
    told: dict[str, Any] = {"rank": accessors.rank(), "size": accessors.size()}
    for axis in ("mp", "dp", "pp", "tp", "rdp"):
        ranks = getattr(accessors, f"get_{axis}_group")()
        group = getattr(accessors, f"get_{axis}_process_group")()
        assert type(ranks) is list
        assert dist.get_process_group_ranks(group) == ranks
        assert dist.get_rank(group) == getattr(accessors, f"{axis}_rank")()
        assert len(ranks) == getattr(accessors, f"{axis}_size")()
        joined = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        dist.all_gather(joined, torch.tensor([accessors.rank()]), group=group)
        assert [int(rank) for rank in joined] == ranks
        told[axis] = (ranks, getattr(accessors, f"{axis}_rank")())
    assert dist.get_process_group_ranks(accessors.get_world_process_group()) == list(range(accessors.size()))
    assert (accessors.local_rank(), accessors.local_size()) == (accessors.rank(), accessors.size())
    return told


@pytest.mark.parametrize("placement", ["cluster", "spread", "TDP", "PTD"])
def test_groups_join_the_ranks_of_the_table(pool4: RankPool, placement: str) -> None:
    config = {
        **QUIET,
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "placement_strategy": placement,
    }
    told = pool4.run(describe_groups, config=config)
    first = {"cluster": "tp", "spread": "pp", "TDP": "pp", "PTD": "tp"}[placement]
    assert told[0]["rank"] == 0
    if placement in ("cluster", "spread"):  # neighbours vary the right-most letter
        assert told[0][first][0] == [0, 1]
    assert [entry["mp"][0] for entry in told] == [[0, 1, 2, 3]] * 4


def test_groups_with_data_parallelism(pool4: RankPool) -> None:
    told = pool4.run(describe_groups, config={**QUIET, "pipeline_parallel_degree": 2})
    assert told[2]["pp"] == ([2, 3], 0)
    assert told[2]["dp"] == ([0, 2], 1)
    told = pool4.run(describe_groups, config={**QUIET, "partitions": 2, "placement_strategy": "spread"})
    assert told[2]["pp"] == ([0, 2], 1)
    assert told[2]["dp"] == ([2, 3], 0)


def look_at_the_mesh() -> tuple[Any, ...]:
    mesh = context.world().groups.mesh
    for axis in ("rdp", "pp", "tp"):
        assert mesh.get_group(axis) is context.world().groups.process_group(axis)
        assert mesh.get_local_rank(axis) == context.world().coordinates.position(axis)
    return mesh.mesh_dim_names, mesh.mesh.tolist()


def test_the_mesh_is_over_the_same_groups(pool4: RankPool) -> None:
    config = {**QUIET, "pipeline_parallel_degree": 2, "placement_strategy": "spread"}
    assert pool4.run(look_at_the_mesh, config=config)[0] == (("rdp", "pp", "tp"), [[[0], [2]], [[1], [3]]])


def look_both_ways() -> None:
    own = {
        name: getattr(accessors, name)()
        for name in ("rank", "local_rank", "mp_rank", "dp_rank", "pp_rank", "tp_rank", "rdp_rank")
    }
    leader = accessors.get_pp_group()[0]
    with context.script_view():
        assert accessors.rank() == accessors.local_rank() == leader
        assert accessors.pp_rank() == 0
        assert accessors.mp_rank() == context.world().table.coordinates(leader).mp
        assert (accessors.tp_rank(), accessors.rdp_rank()) == (own["tp_rank"], own["rdp_rank"])
        assert accessors.dp_rank() == own["dp_rank"]
        with context.own_view():
            assert accessors.rank() == own["rank"]
            with context.script_view():
                assert accessors.rank() == leader
            assert accessors.pp_rank() == own["pp_rank"]
        assert accessors.rank() == leader
        assert dist.get_rank() == own["rank"]
    assert {name: getattr(accessors, name)() for name in own} == own


@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_the_script_takes_itself_for_pipeline_rank_0(pool4: RankPool, placement: str) -> None:
    pool4.run(
        look_both_ways,
        config={**QUIET, "pipeline_parallel_degree": 2, "placement_strategy": placement},
    )


def time_the_view() -> float:
    from timeit import timeit

    def enter() -> None:
        with context.script_view():
            pass

    return min(timeit(enter, number=2000) for _ in range(5)) / 2000


def test_entering_the_view_is_cheap(pool2: RankPool) -> None:
    assert min(pool2.run(time_the_view, config={**QUIET, "partitions": 2})) < 2e-6


def init_twice(first: dict[str, Any] | None, second: dict[str, Any], use: bool) -> tuple[int, int, int]:
    context.init(first)
    if use:
        collectives.barrier("world")
    context.init(second)
    collectives.barrier("world")
    objects.allgather_object(1, "pp")
    config = context.world().config
    return config.pipeline_parallel_degree, config.microbatches, accessors.pp_size()


def test_a_second_init_reshapes_unused_groups(pool2: RankPool) -> None:
    environment = {"SM_HP_MP_PARAMETERS": '{"microbatches": 2, "ddp": true}'}
    run = {"environment": environment, "timeout_s": 30}
    assert pool2.run(init_twice, None, {"partitions": 2}, False, **run) == [(2, 2, 2)] * 2
    with pytest.raises(RankFailure, match="communication groups are in use"):
        pool2.run(init_twice, None, {"partitions": 2}, True, **run)


def test_a_second_init_applies_what_can_still_change(pool2: RankPool) -> None:
    first = {**QUIET, "partitions": 2}
    assert pool2.run(init_twice, first, {"microbatches": 4}, True) == [(2, 4, 2)] * 2
    assert pool2.run(init_twice, first, first, True) == [(2, 1, 2)] * 2


def use_before_init() -> None:
    assert not context.is_initialized()
    with pytest.raises(NotInitializedError, match=r"smp.init\(\) must be called"):
        accessors.rank()
    with pytest.raises(NotInitializedError, match=r"smp.init\(\) must be called"):
        objects.barrier()


def test_use_before_init_is_named(pool2: RankPool) -> None:
    pool2.run(use_before_init)


def init_wrongly(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        context.init(config)
    assert not context.is_initialized()
    return str(caught.value)


def test_wrong_degrees_fail_alike_on_all_ranks(pool2: RankPool) -> None:
    first, second = pool2.run(init_wrongly, {"partitions": 3})
    assert first == second
    assert "world size 2" in first


def reduce_over_axes() -> None:
    rank = accessors.rank()
    for axis in AXES:
        ranks = context.world().groups.ranks(axis)
        total = torch.tensor([float(rank)])
        collectives.all_reduce(total, axis)
        assert total.item() == sum(ranks)


def test_every_axis_reduces_over_its_own_ranks() -> None:
    config = {**QUIET, "partitions": 3, "tensor_parallel_degree": 2}
    run_ranks(6, reduce_over_axes, config=config)
