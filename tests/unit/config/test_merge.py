"""A second smp.init: what it may change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwright.config.merge import Merge, merge_second_init, topology_keys
from shardwright.config.parse import Resolved, resolve
from shardwright.errors import ConfigError


def first(user: dict[str, Any] | None = None, **env: Any) -> Resolved:
    return resolve(user, {"SM_HP_MP_PARAMETERS": json.dumps(env)} if env else {})


def second(current: Resolved, new: dict[str, Any], *, groups_used: bool = False) -> Merge:
    return merge_second_init(current, new, groups_used=groups_used)


def test_topology_keys_under_any_spelling() -> None:
    given = {"partitions": 2, "ddp": True, "microbatches": 4, "_other": 1}
    assert topology_keys(given) == {"pipeline_parallel_degree", "ddp"}


@pytest.mark.parametrize("new", [{}, {"partitions": 2}, {"pipeline_parallel_degree": 2, "ddp": True}])
def test_nothing_new(new: dict[str, Any]) -> None:
    current = first({"partitions": 2, "ddp": True})
    merge = second(current, new, groups_used=True)
    assert merge.outcome == "unchanged"
    assert merge.changed == frozenset()
    assert merge.resolved.config == current.config


def test_other_keys_apply_and_the_rest_stays() -> None:
    merge = second(
        first({"partitions": 2, "seed": 3}), {"microbatches": 8, "optimize": "speed"}, groups_used=True
    )
    assert merge.outcome == "apply"
    config = merge.resolved.config
    assert (config.pipeline_parallel_degree, config.microbatches, config.seed) == (2, 8, 3)
    assert merge.changed == {"microbatches", "active_microbatches", "optimize", "memory_weight"}
    assert merge.resolved.from_user == {"pipeline_parallel_degree", "seed", "microbatches", "optimize"}


def test_clamped_values_are_derived_again() -> None:
    merge = second(first({"microbatches": 2, "active_microbatches": 6}), {"microbatches": 8})
    assert merge.resolved.config.active_microbatches == 6


def test_environment_wins_and_is_logged() -> None:
    merge = second(
        first(partitions=2, microbatches=4), {"partitions": 4, "microbatches": 2}, groups_used=True
    )
    assert merge.outcome == "unchanged"
    assert [note.message for note in merge.resolved.notes] == [
        "'pipeline_parallel_degree' is 2 by the environment; the script's 4 is ignored",
        "'microbatches' is 4 by the environment; the script's 2 is ignored",
    ]


def test_defaults_give_way_while_no_group_is_used() -> None:
    merge = second(first(), {"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 4})
    assert merge.outcome == "reinitialise"
    assert merge.resolved.config.pipeline_parallel_degree == 2
    assert merge.resolved.from_user == {"pipeline_parallel_degree", "ddp", "microbatches"}


def test_environment_of_other_keys_does_not_bind_this_one() -> None:
    merge = second(first(partitions=2), {"ddp": True})
    assert merge.outcome == "reinitialise"
    assert merge.resolved.from_env == {"pipeline_parallel_degree"}


def test_used_groups_cannot_change() -> None:
    with pytest.raises(ConfigError) as failure:
        second(first(), {"partitions": 2, "ddp": True}, groups_used=True)
    message = str(failure.value)
    assert "'pipeline_parallel_degree' is 1 since the first smp.init(), the second asks for 2" in message
    assert "'ddp' is False since the first smp.init(), the second asks for True" in message
    assert "groups are in use" in message
    assert "try: give the full configuration to the first smp.init()" in message


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("pipeline_parallel_degree", 2, 4),
        ("placement_strategy", "cluster", "spread"),
        ("tensor_parallel_degree", 2, 1),
        ("sharded_data_parallel_degree", 4, 2),
    ],
)
def test_a_chosen_topology_stays(key: str, old: Any, new: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is {old!r} .* asks for {new!r}") as failure:
        second(first({"ddp": True, key: old}), {key: new})
    assert "the first call had settings of its own" in str(failure.value)


def test_same_placement_in_other_words() -> None:
    merge = second(first({"placement_strategy": "cluster"}), {"placement_strategy": "dpt"}, groups_used=True)
    assert merge.outcome == "unchanged"


def test_too_late_settings_are_remarked_on() -> None:
    merge = second(first({"microbatches": 2}), {"ddp_dist_backend": "gloo"})
    assert merge.outcome == "apply"
    assert "'ddp_dist_backend' has no effect" in merge.resolved.notes[-1].message


def test_second_dict_is_checked_like_the_first() -> None:
    for bad in ({"microbatches": 0}, {"nonsense": 1}, {"tensor_parallel_degree": 2}):
        with pytest.raises(ConfigError):
            second(first(), bad)


def test_third_init_builds_on_the_second() -> None:
    merge = second(first(), {"partitions": 2})
    assert second(merge.resolved, {"partitions": 2, "microbatches": 2}, groups_used=True).outcome == "apply"
