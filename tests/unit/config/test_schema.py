"""The schema holds every key of the contract, with its type, default and alias, and explains each."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from shardwright.config.legacy import ALIASES, PLACEMENTS
from shardwright.config.parse import resolve
from shardwright.config.schema import SETTINGS, TOPOLOGY_KEYS, Config, reference
from shardwright.errors import ConfigError

# One row for each key of the contract, in its order: key, default, an accepted value other than the default.
ROWS: list[tuple[str, Any, Any]] = [
    ("pipeline_parallel_degree", 1, 4),
    ("microbatches", 1, 8),
    ("active_microbatches", 1, 1),
    ("pipeline", "interleaved", "simple"),
    ("optimize", "memory", "speed"),
    ("placement_strategy", "cluster", "spread"),
    ("auto_partition", True, False),
    ("default_partition", 0, 3),
    ("memory_weight", 0.8, 0.5),
    ("ddp", False, True),
    ("ddp_dist_backend", "auto", "gloo"),
    ("ddp_port", None, 29500),
    ("horovod", False, True),
    ("overlapping_allreduce", True, False),
    ("deterministic_server", False, True),
    ("tensor_parallel_degree", 1, 2),
    ("prescaled_batch", False, True),
    ("shard_optimizer_state", False, True),
    ("skip_tracing", False, True),
    ("offload_activations", False, True),
    ("activation_loading_horizon", 4, 1),
    ("fp16", False, True),
    ("bf16", False, True),
    ("fp16_params", False, True),
    ("delayed_parameter_initialization", False, True),
    ("sharded_data_parallel_degree", 1, 2),
    ("sdp_reduce_bucket_size", 500_000_000, 1000),
    ("sdp_param_persistence_threshold", 1_000_000, 0),
    ("sdp_max_live_parameters", 1_000_000_000, 1000),
    ("sdp_hierarchical_allgather", True, False),
    ("sdp_gradient_clipping", 1.0, 0.0),
    ("checkpoint_attentions", False, True),
    ("static_mode", False, True),
    ("fast_mode", False, True),
    ("_match_weights", False, True),
    ("_fp32_grad_accumulation", False, True),
    ("use_times", False, True),
    ("contiguous", True, False),
    # ours
    ("timeout_s", 600.0, 5.0),
    ("startup_timeout_s", 1800.0, 60.0),
    ("log_level", "info", "off"),
    ("tied_weights", "colocate", "replicate"),
    ("seed", 0, 7),
]

NEEDS_DDP = {"tensor_parallel_degree", "sharded_data_parallel_degree"}


def resolved(**given: Any) -> Config:
    return resolve(given, {}).config


def test_rows_are_the_whole_schema() -> None:
    assert {row[0] for row in ROWS} == set(SETTINGS)


@pytest.mark.parametrize(("key", "default", "other"), ROWS)
def test_default_and_other_value(key: str, default: Any, other: Any) -> None:
    assert getattr(resolved(), key) == default
    extra = {"ddp": True} if key in NEEDS_DDP else {}
    value = getattr(resolved(**{**extra, key: other}), key)
    assert value == other
    assert type(value) is type(other)


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.kind == "whole"])
def test_integers(key: str) -> None:
    extra = {"ddp": True} if key in NEEDS_DDP else {}
    value = getattr(resolved(**extra, microbatches=9, **({} if key == "microbatches" else {key: 1.0})), key)
    assert type(value) is int
    for bad in ("2", True, 1.5, -1, float("nan"), float("inf"), [1]):
        with pytest.raises(ConfigError) as failure:
            resolved(**{key: bad})
        message = str(failure.value)
        assert key in message
        assert repr(bad) in message
        assert "expected an integer" in message
        assert "try: set" in message


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.kind == "flag"])
def test_flags(key: str) -> None:
    for bad in ("true", 2, 1.0, None, "no"):
        with pytest.raises(ConfigError, match=rf"'{key}' is {bad!r}, expected true or false"):
            resolved(**{key: bad})
    assert getattr(resolved(**{key: 0}), key) is False  # scripts pass parsed 0/1 arguments on


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.kind == "real"])
def test_numbers(key: str) -> None:
    assert type(getattr(resolved(**{key: 1}), key)) is float
    for bad in ("0.5", -0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"'{key}' is .*expected a number"):
            resolved(**{key: bad})


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.kind == "choice"])
def test_words(key: str) -> None:
    for word in SETTINGS[key].choices:
        assert getattr(resolved(**{key: word.upper()}), key) == word
    for bad in ("nonsense", "", 1, True, None):
        with pytest.raises(ConfigError) as failure:
            resolved(**{key: bad})
        message = str(failure.value)
        assert all(f"'{word}'" in message for word in SETTINGS[key].choices)
        assert f"'{key}' is {bad!r}" in message


def test_integral_floats_are_integers() -> None:
    config = resolved(sdp_reduce_bucket_size=5e8, sdp_max_live_parameters=1e9)
    assert config.sdp_reduce_bucket_size == 500_000_000
    assert type(config.sdp_reduce_bucket_size) is int


def test_integers_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    assert type(resolved(microbatches=numpy.int64(4)).microbatches) is int


def test_boundaries() -> None:
    assert resolved(memory_weight=0).memory_weight == 0.0
    assert resolved(memory_weight=1).memory_weight == 1.0
    for key, bad in [("memory_weight", 1.01), ("timeout_s", 0), ("ddp_port", 65536), ("microbatches", 0)]:
        with pytest.raises(ConfigError, match=f"'{key}' is {bad}"):
            resolved(**{key: bad})


def test_derived_defaults() -> None:
    assert resolved(pipeline_parallel_degree=4, microbatches=16).active_microbatches == 6
    assert resolved(pipeline_parallel_degree=4, microbatches=3).active_microbatches == 3
    assert resolved(microbatches=4, active_microbatches=9).active_microbatches == 4
    assert resolved(microbatches=9, pipeline="simple").active_microbatches == 9
    assert resolved(optimize="speed").memory_weight == 0.2
    assert resolved(optimize="speed", memory_weight=0.7).memory_weight == 0.7


def test_unset_may_be_spelled_none() -> None:
    config = resolved(microbatches=8, active_microbatches=None, memory_weight=None, ddp_port=None)
    assert config == resolved(microbatches=8)


@pytest.mark.parametrize("word", PLACEMENTS)
def test_placement_letters_in_any_case(word: str) -> None:
    assert resolved(placement_strategy=word.lower()).placement_strategy == word


@pytest.mark.parametrize(("alias", "key"), ALIASES.items())
def test_aliases(alias: str, key: str) -> None:
    other = next(row[2] for row in ROWS if row[0] == key)
    config = resolved(**{alias: other})
    assert getattr(config, alias) == getattr(config, key) == other


def test_unknown_attribute() -> None:
    config = resolved()
    assert not hasattr(config, "no_such_key")
    with pytest.raises(AttributeError, match="no_such_key"):
        _ = config.no_such_key  # type: ignore[attr-defined]


def test_record_is_frozen_and_travels() -> None:
    config = resolved(pipeline_parallel_degree=2, _match_weights=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.microbatches = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(config) == hash(copy.copy(config))


def test_topology_keys() -> None:
    degrees = {"pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree"}
    assert degrees | {"placement_strategy", "ddp"} == TOPOLOGY_KEYS


def test_reference_explains_every_key() -> None:
    rows = {row.key: row for row in reference()}
    assert set(rows) == set(SETTINGS)
    assert all(row.doc.endswith(".") and row.values and row.default and row.since for row in rows.values())
    assert rows["pipeline_parallel_degree"].aliases == ("partitions",)
    assert rows["active_microbatches"].default == "pipeline_parallel_degree + 2"
    assert rows["ddp"].default == "false"
