"""Every rank's coordinates and groups, against the worked tables of the contract and as a bijection."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ConfigError
from shardwright.topology.ranks import AXES, Degrees, RankTable, placement_letters

PLACEMENTS = ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]

# (rdp, pp, tp) of ranks 0..7 with all degrees 2: api.md 2.2
COORDINATES = {
    "DPT": "000 001 010 011 100 101 110 111",
    "DTP": "000 010 001 011 100 110 101 111",
    "PDT": "000 001 100 101 010 011 110 111",
    "PTD": "000 100 001 101 010 110 011 111",
    "TDP": "000 010 100 110 001 011 101 111",
    "TPD": "000 100 010 110 001 101 011 111",
}

# TP, PP, RDP, MP, DP groups with all degrees 2: api.md 2.2
GROUPS = {
    "DPT": ["01 23 45 67", "02 13 46 57", "04 15 26 37", "0123 4567", "0145 2367"],
    "DTP": ["02 13 46 57", "01 23 45 67", "04 15 26 37", "0123 4567", "0246 1357"],
    "PDT": ["01 23 45 67", "04 15 26 37", "02 13 46 57", "0145 2367", "0123 4567"],
    "PTD": ["02 13 46 57", "04 15 26 37", "01 23 45 67", "0246 1357", "0123 4567"],
    "TDP": ["04 15 26 37", "01 23 45 67", "02 13 46 57", "0145 2367", "0246 1357"],
    "TPD": ["04 15 26 37", "02 13 46 57", "01 23 45 67", "0246 1357", "0145 2367"],
}


def table(placement: str, *, pp: int = 2, tp: int = 2, rdp: int = 2) -> RankTable:
    return RankTable(Degrees(pp=pp, tp=tp, rdp=rdp), placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_coordinates_of_eight_ranks(placement: str) -> None:
    expected = COORDINATES[placement_letters(placement)].split()
    ranks = table(placement)
    for rank, digits in enumerate(expected):
        where = ranks.coordinates(rank)
        assert f"{where.rdp}{where.pp}{where.tp}" == digits


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_groups_of_eight_ranks(placement: str) -> None:
    ranks = table(placement)
    for axis, words in zip(
        ("tp", "pp", "rdp", "mp", "dp"), GROUPS[placement_letters(placement)], strict=True
    ):
        expected = [[int(digit) for digit in word] for word in words.split()]
        # the contract lists groups in the order of the fixed coordinate; ours come by lowest rank
        assert ranks.groups(axis) == sorted(expected)


@pytest.mark.parametrize(
    ("placement", "mp", "dp", "mp_rank", "dp_rank"),
    [
        ("cluster", [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]], 0, 3),
        ("spread", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]], 1, 2),
    ],
)
def test_eight_processes_two_partitions(placement, mp, dp, mp_rank, dp_rank) -> None:
    ranks = table(placement, pp=2, tp=1, rdp=4)
    assert ranks.groups("mp") == mp
    assert ranks.groups("dp") == dp
    assert ranks.coordinates(6).mp == mp_rank
    assert ranks.coordinates(6).dp == dp_rank


def _degrees(pp: int, tp: int, replicas: int, shards: int) -> Degrees:
    return Degrees(pp=pp, tp=tp, rdp=replicas * shards, sdp=shards)


degrees = st.builds(_degrees, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(degrees, st.sampled_from(PLACEMENTS))
def test_coordinates_are_a_bijection(degrees: Degrees, placement: str) -> None:
    ranks = RankTable(degrees, placement)
    seen = set()
    for rank in range(degrees.world_size):
        where = ranks.coordinates(rank)
        assert ranks.rank_at(pp=where.pp, tp=where.tp, rdp=where.rdp) == rank
        seen.add((where.pp, where.tp, where.rdp))
    assert len(seen) == degrees.world_size


@given(degrees, st.sampled_from(PLACEMENTS))
def test_every_rank_is_in_one_group_of_each_axis_at_its_position(degrees: Degrees, placement: str) -> None:
    ranks = RankTable(degrees, placement)
    for axis in AXES:
        groups = ranks.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(degrees.world_size))
        assert groups == sorted(groups)
        for group in groups:
            assert group == sorted(group)
            assert len(group) == ranks.size(axis)
            for position, rank in enumerate(group):
                assert ranks.group(axis, rank) == group
                assert ranks.coordinates(rank).position(axis) == position


@given(degrees, st.sampled_from(PLACEMENTS))
def test_groups_fix_and_vary_the_right_coordinates(degrees: Degrees, placement: str) -> None:
    ranks = RankTable(degrees, placement)
    fixed = {
        "pp": "tp rdp", "tp": "pp rdp", "rdp": "pp tp", "mp": "rdp", "dp": "pp", "world": "",
        "shard": "pp tp replica", "replica": "pp tp shard",
    }  # fmt: skip
    for axis, names in fixed.items():
        for group in ranks.groups(axis):
            for name in names.split():
                assert len({getattr(ranks.coordinates(rank), name) for rank in group}) == 1


def test_a_hundred_thousand_ranks_are_looked_up_at_once() -> None:
    ranks = table("PTD", pp=25, tp=8, rdp=500)
    began = time.process_time()
    coordinates = [ranks.coordinates(rank) for rank in range(ranks.world_size)]
    groups = [ranks.groups(axis) for axis in AXES]
    assert time.process_time() - began < 10  # half a second; a search for each rank would take minutes
    assert len(coordinates) == 100_000
    assert sum(map(len, groups[0])) == 100_000


def test_shard_groups_of_thirty_two_ranks() -> None:
    """The example of the original's guide: tp 4, sharded data parallelism of degree 4."""
    ranks = RankTable(Degrees.of_world(32, pp=1, tp=4, sdp=4))
    assert ranks.group("tp", 0) == [0, 1, 2, 3]
    assert ranks.group("shard", 0) == [0, 4, 8, 12]
    assert ranks.group("shard", 20) == [16, 20, 24, 28]
    assert ranks.group("replica", 4) == [4, 20]


def test_shards_must_divide_the_replicas() -> None:
    with pytest.raises(ConfigError, match="the sdp degree is 3, expected a divisor of the rdp degree, 4"):
        Degrees.of_world(8, pp=2, tp=1, sdp=3)


def test_degrees_must_divide_the_world() -> None:
    assert Degrees.of_world(8, pp=2, tp=2) == Degrees(pp=2, tp=2, rdp=2)
    with pytest.raises(ConfigError, match=r"2 x .* 3 = 6 does not divide the number of processes, 8"):
        Degrees.of_world(8, pp=2, tp=3)


@pytest.mark.parametrize("placement", ["", "DP", "DPP", "XYZ", "clusters"])
def test_unknown_placements_are_refused(placement: str) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        table(placement)


def test_letters_in_any_case() -> None:
    assert table("tPd").letters == "TPD"
    assert table("Spread").letters == "TPD"


def test_ranks_out_of_range_are_refused() -> None:
    with pytest.raises(IndexError, match="no rank 8"):
        table("DPT").coordinates(8)
    with pytest.raises(IndexError, match="no rank at pp 2"):
        table("DPT").rank_at(pp=2, tp=0, rdp=0)
