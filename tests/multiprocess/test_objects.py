"""Python values between ranks: the library's own messages and the public communication functions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from harness import RankPool
from shardwright.errors import UsageError
from shardwright.topology import accessors
from shardwright.topology.accessors import CommGroup, RankType
from shardwright.transport import objects

CONFIG = {"ddp": True, "log_level": "warning", "timeout_s": 30}
LAYOUT = {**CONFIG, "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
PAIRS = [(group, RankType[group.name.replace("_GROUP", "") + "_RANK"]) for group in CommGroup]


class Settings(dict):
    """A dict subclass."""


def sample(rank: int) -> dict[str, Any]:
    """Return a value with a bit of everything, different for each rank."""
    return {
        "int": rank,
        "bool": rank % 2 == 0,
        "ordered": OrderedDict(b=1, a=rank),
        "settings": Settings(rate=0.5),
        "list": [torch.full((3,), float(rank)), {"deep": (torch.arange(4).view(2, 2).t(), None)}],
        "large": torch.full((200_000,), rank, dtype=torch.int64),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def check(value: dict[str, Any], rank: int) -> None:
    expected = sample(rank)
    assert (value["int"], value["bool"]) == (expected["int"], expected["bool"])
    assert type(value["ordered"]) is OrderedDict
    assert value["ordered"] == expected["ordered"]
    assert type(value["settings"]) is Settings
    assert torch.equal(value["list"][0], expected["list"][0])
    assert torch.equal(value["list"][1]["deep"][0], expected["list"][1]["deep"][0])
    assert torch.equal(value["large"], expected["large"])
    assert value["half"].dtype == torch.bfloat16


def ranks_of(group: CommGroup) -> list[int]:
    if group is CommGroup.WORLD:
        return list(range(accessors.size()))
    return getattr(accessors, f"get_{group.axis}_group")()  # type: ignore[no-any-return]


def broadcast_on_every_group() -> None:
    for group, rank_type in PAIRS:
        ranks = ranks_of(group)
        for position, sender in enumerate(ranks):
            if sender == accessors.rank():
                objects.broadcast(sample(sender), group)
            else:
                check(objects.recv_from(position, rank_type), sender)


def test_broadcast_pairs_with_recv_from_on_every_group(pool4: RankPool) -> None:
    pool4.run(broadcast_on_every_group, config=LAYOUT)


def send_around() -> None:
    for group, rank_type in PAIRS:
        ranks = ranks_of(group)
        mine = ranks.index(accessors.rank())
        if len(ranks) > 1:
            nxt, previous = (mine + 1) % len(ranks), (mine - 1) % len(ranks)
            if mine == 0:
                objects.send(sample(accessors.rank()), nxt, rank_type)
                check(objects.recv_from(previous, rank_type), ranks[previous])
            else:
                check(objects.recv_from(previous, rank_type), ranks[previous])
                objects.send(sample(accessors.rank()), nxt, rank_type)


def test_send_and_recv_from_with_every_rank_type(pool4: RankPool) -> None:
    pool4.run(send_around, config=LAYOUT)


def gather_everywhere() -> None:
    for group in CommGroup:
        value = sample(accessors.rank())
        gathered = objects.allgather(value, group)
        assert gathered[ranks_of(group).index(accessors.rank())] is value
        for rank, other in zip(ranks_of(group), gathered, strict=True):
            check(other, rank)
        small = objects.allgather(accessors.rank(), group)
        assert small == ranks_of(group)
        # some fit into the header and some don't
        mixed = objects.allgather("x" * (10 if accessors.rank() % 2 else 5000), group)
        assert [len(text) for text in mixed] == [10 if rank % 2 else 5000 for rank in ranks_of(group)]


def test_allgather_keeps_rank_order(pool4: RankPool) -> None:
    pool4.run(gather_everywhere, config=LAYOUT)


def mix_groups_and_kinds() -> None:
    """Messages of one pair on different rank types may be received in another order than they were sent."""
    if accessors.rank() == 0:
        objects.send_object("object", 1, 5)
        objects.broadcast("pp 1", CommGroup.PP_GROUP)
        objects.broadcast("pp 2", CommGroup.PP_GROUP)
        objects.send("pp 3", 1, RankType.PP_RANK)
    else:
        assert objects.recv_object(0, 5) == "object"
        assert [objects.recv_from(0, RankType.PP_RANK) for _ in range(3)] == ["pp 1", "pp 2", "pp 3"]
    for group in CommGroup:
        objects.barrier(group)
    (
        objects.mp_barrier(),
        objects.dp_barrier(),
        objects.pp_barrier(),
        objects.tp_barrier(),
        objects.rdp_barrier(),
    )


def test_order_within_a_pair_and_barriers(pool2: RankPool) -> None:
    pool2.run(mix_groups_and_kinds, config={**CONFIG, "partitions": 2})


def broadcast_objects() -> float:
    from time import perf_counter

    rank = accessors.rank()
    for number in range(100):  # the source runs ahead, but not without bound
        source = number % 2
        assert objects.broadcast_object((number, rank), "pp", source)[0] == number
    check(objects.broadcast_object(sample(1) if rank == 1 else None, "pp", 1), 1)
    objects.pp_barrier()
    began = perf_counter()
    for number in range(200):
        objects.broadcast_object(("unit.path", (4, 128), torch.float32, number) if rank == 0 else None, "pp")
    objects.pp_barrier()
    return (perf_counter() - began) / 200


def test_broadcast_object(pool2: RankPool) -> None:
    seconds = max(pool2.run(broadcast_objects, config={**CONFIG, "partitions": 2}))
    print(f"{seconds * 1e6:.0f} us per broadcast of a small object")


def broadcast_along_a_tree() -> None:
    objects._DIRECT_RANKS = 2
    try:
        for source in range(accessors.size()):
            value = sample(source) if accessors.rank() == source else None
            check(objects.broadcast_object(value, "world", source), source)
            assert objects.broadcast_object(source, "world", source) == source
    finally:
        objects._DIRECT_RANKS = 16


def test_large_groups_broadcast_along_a_tree(pool4: RankPool) -> None:
    pool4.run(broadcast_along_a_tree, config=LAYOUT)


def misuse() -> None:
    with pytest.raises(UsageError, match="PP_RANK 2 doesn't exist: the group has 2"):
        objects.send(1, 2, RankType.PP_RANK)
    with pytest.raises(UsageError, match="is this rank itself"):
        objects.recv_from(accessors.pp_rank(), RankType.PP_RANK)
    with pytest.raises(Exception, match="pickle"):
        objects.send(lambda: 0, 1 - accessors.rank())


def test_misuse_is_named(pool2: RankPool) -> None:
    pool2.run(misuse, config={**CONFIG, "partitions": 2})


def mismatch(kind: str) -> None:
    objects.barrier()
    if accessors.rank() == 0:
        if kind == "wrong rank type":
            objects.send("lost", 1, RankType.PP_RANK)
        elif kind == "broadcast without receivers":
            objects.broadcast("lost", CommGroup.PP_GROUP)
        else:
            objects.recv_from(1, RankType.MP_RANK)
    elif kind == "wrong rank type":
        objects.recv_from(0, RankType.WORLD_RANK)
    else:
        objects.barrier(CommGroup.DP_GROUP)  # a group of one: passes
        import time

        for _ in range(200):
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wrong rank type", "smp.send to PP_RANK 1 (rank 1), which must call recv_from"),
        ("broadcast without receivers", "smp.broadcast on PP_GROUP, which rank(s) 1 must match by recv_from"),
        ("recv_from without sender", "smp.recv_from MP_RANK 1 (rank 1), which must call send or broadcast"),
    ],
)
def test_mismatched_use_runs_out_of_time_and_is_named(kind: str, words: str) -> None:
    with RankPool(2) as pool:
        config = {**CONFIG, "partitions": 2, "timeout_s": 2}
        pool.run(objects.barrier, config=config)
        outcomes = pool.outcomes(mismatch, kind, config=config, timeout_s=30)
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.seconds < 10
    assert "CommunicationTimeout" in (outcomes[0].error or "")
    text = "".join(outcome.error or "" for outcome in outcomes)
    assert words in text
