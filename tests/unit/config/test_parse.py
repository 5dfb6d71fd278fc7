"""Sources of settings, their precedence, and what is refused while reading them."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.notes import Note
from shardwright.config.parse import read, resolve
from shardwright.config.schema import SETTINGS
from shardwright.errors import ConfigError

ENV = "SM_HP_MP_PARAMETERS"


def environ(twice: bool = False, **keys: Any) -> dict[str, str]:
    text = json.dumps(keys)
    return {ENV: json.dumps(text) if twice else text}


@pytest.mark.parametrize("twice", [False, True])
def test_environment_is_json_encoded_once_or_twice(twice: bool) -> None:
    resolved = resolve(None, environ(twice, partitions=2, microbatches=4, ddp=True))
    assert (resolved.config.pipeline_parallel_degree, resolved.config.microbatches) == (2, 4)
    assert resolved.from_env == {"pipeline_parallel_degree", "microbatches", "ddp"}
    assert resolved.from_user == frozenset()


def test_environment_wins_over_dict_wins_over_default() -> None:
    resolved = resolve({"microbatches": 8, "pipeline": "simple"}, environ(microbatches=4))
    assert resolved.config.microbatches == 4
    assert resolved.config.pipeline == "simple"
    assert resolved.config.optimize == "memory"
    assert resolved.from_env == {"microbatches"}
    assert resolved.from_user == {"pipeline"}


def test_conflict_between_sources_is_one_note() -> None:
    resolved = resolve(
        {"pipeline_parallel_degree": 4, "microbatches": 2}, environ(partitions=2, microbatches=2)
    )
    assert resolved.config.pipeline_parallel_degree == 2
    (note,) = resolved.notes
    assert note.level == logging.INFO
    assert "'pipeline_parallel_degree' is 2 by the environment; the script's 4 is ignored" in note.message


@pytest.mark.parametrize("text", ["", "  ", "{}", '"{}"'])
def test_empty_environment_is_no_setting(text: str) -> None:
    assert resolve(None, {ENV: text}) == resolve({}, {})


@pytest.mark.parametrize("text", ["{", "partitions=2", "[1, 2]", "3", '"[1]"', '"not json"', "null"])
def test_environment_that_is_no_object(text: str) -> None:
    with pytest.raises(ConfigError, match=ENV) as failure:
        resolve(None, {ENV: text})
    assert "JSON" in str(failure.value)
    assert "try: set it to an object" in str(failure.value)


def test_timeout_variable_wins_over_everything() -> None:
    variables = {**environ(timeout_s=50), "SHARDWRIGHT_TIMEOUT_S": "7.5"}
    resolved = resolve({"timeout_s": 30}, variables)
    assert resolved.config.timeout_s == 7.5
    assert "timeout_s" in resolved.from_env
    assert resolve({"timeout_s": 30}, {"SHARDWRIGHT_TIMEOUT_S": " "}).config.timeout_s == 30.0


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_bad_timeout_variable_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="SHARDWRIGHT_TIMEOUT_S") as failure:
        resolve(None, {"SHARDWRIGHT_TIMEOUT_S": text})
    assert "expected a number > 0" in str(failure.value)


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("pipeline_paralel_degree", "pipeline_parallel_degree"),
        ("partition", "partitions"),
        ("micro_batches", "microbatches"),
        ("FP16", "fp16"),
        ("match_weights", "_match_weights"),
    ],
)
def test_unknown_key_names_the_closest(key: str, closest: str) -> None:
    for user, env, where in [({key: 1}, {}, "smp.init()"), (None, environ(**{key: 1}), ENV)]:
        with pytest.raises(ValueError, match=f"{key!r}; did you mean '{closest}'") as failure:
            resolve(user, env)
        assert where in str(failure.value)


def test_all_unknown_keys_at_once() -> None:
    with pytest.raises(ConfigError) as failure:
        resolve({"foo": 1, "microbatches": 2, 3: 4}, {})  # type: ignore[dict-item]
    assert "'foo'" in str(failure.value)
    assert "configuration key 3" in str(failure.value)


def test_unknown_private_key_is_a_warning() -> None:
    resolved = resolve({"_shard_offloading": object(), "microbatches": 2}, {})
    assert resolved.config.microbatches == 2
    (note,) = resolved.notes
    assert note.level == logging.WARNING
    assert "'_shard_offloading'" in note.message


def test_known_private_key_is_checked() -> None:
    assert resolve({"_match_weights": True}, {}).config._match_weights is True
    with pytest.raises(ConfigError, match="_match_weights"):
        resolve({"_match_weights": "yes"}, {})


def test_both_spellings_must_agree() -> None:
    assert resolve({"partitions": 2, "pipeline_parallel_degree": 2.0}, {}).config.partitions == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as failure:
        resolve({"partitions": 2, "pipeline_parallel_degree": 4}, {})
    message = str(failure.value)
    assert "'partitions' is 2 and 'pipeline_parallel_degree' is 4" in message
    assert "same setting" in message
    assert "try: give 'pipeline_parallel_degree' only" in message


def test_error_names_the_source_and_the_spelling() -> None:
    with pytest.raises(ConfigError, match="'partitions' is 0, expected an integer >= 1") as failure:
        resolve(None, environ(partitions=0))
    assert f"at {ENV}" in str(failure.value)


@pytest.mark.parametrize("bad", [[("microbatches", 2)], "microbatches", 3])
def test_configuration_must_be_a_mapping(bad: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping"):
        resolve(bad, {})


def test_given_keeps_what_was_asked_for() -> None:
    resolved = resolve({"active_microbatches": 9, "microbatches": 4}, {})
    assert resolved.config.active_microbatches == 4
    assert resolved.given["active_microbatches"] == 9


def test_sources_are_left_alone() -> None:
    user = {"partitions": 2}
    variables = environ(microbatches=2)
    resolve(user, variables)
    assert user == {"partitions": 2}
    assert list(variables) == [ENV]


def test_read_gives_canonical_keys() -> None:
    source = read({"partitions": 2.0, "_foo": 1}, "a file")
    assert dict(source.values) == {"pipeline_parallel_degree": 2}
    assert source.notes == (Note.warning("unknown configuration key '_foo' is ignored (a file)"),)


def test_errors_travel_between_processes() -> None:
    with pytest.raises(ConfigError) as failure:
        resolve({"microbatches": 0}, {})
    copy = pickle.loads(pickle.dumps(failure.value))
    assert str(copy) == str(failure.value)


@given(
    st.dictionaries(st.sampled_from(sorted(SETTINGS)), st.none() | st.booleans() | st.integers() | st.text())
)
def test_any_values_resolve_or_raise_config_error(user: dict[str, Any]) -> None:
    try:
        config = resolve(user, {}).config
    except ConfigError:
        return
    assert 1 <= config.active_microbatches <= config.microbatches
