"""From what users wrote - a dict, JSON in the environment - to one checked `Config`.

Precedence: environment, then the dict given to `smp.init`, then defaults. The launcher's environment wins
because scripts are written to be overruled by it. Everything here is pure; `environ` is passed in.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from shardwright.config import legacy
from shardwright.config.notes import Note
from shardwright.config.rules import check_keys, check_world
from shardwright.config.schema import SETTINGS, Config
from shardwright.config.setting import Value
from shardwright.errors import ConfigError

__all__ = ["Resolved", "Source", "build", "check_world", "read", "resolve", "unwrap_json"]

TIMEOUT_VARIABLE: Final = "SHARDWRIGHT_TIMEOUT_S"
DICT_SOURCE: Final = "the dict given to smp.init()"
JSON_REMEDY: Final = """set it to an object such as '{"partitions": 2, "microbatches": 4}'"""


@dataclass(frozen=True)
class Source:
    """The checked keys of one source, under their canonical names."""

    values: Mapping[str, Value]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Resolved:
    """A configuration and where it comes from.

    from_env: keys whose value the environment sets.
    from_user: keys whose value the dict sets; what the environment overruled is not among them.
    given: those keys with the values as given, before anything is derived or clamped.
    notes: what rank 0 should log (`notes.log_notes`).
    """

    config: Config
    from_env: frozenset[str]
    from_user: frozenset[str]
    given: Mapping[str, Value]
    notes: tuple[Note, ...] = ()


def resolve(user: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Resolved:
    """Merge the sources, check every value and the rules between keys.

    Called by: every rank, in `smp.init`. No communication. Equal sources give equal results.
    Raises: ConfigError (a ValueError) naming key, value, rule, source and remedy.
    """
    environment = _read_environment(environ)
    script = read({} if user is None else user, DICT_SOURCE)
    overruled = overruled_notes(environment.values, script.values)
    given = {**script.values, **environment.values}
    from_env = frozenset(environment.values)
    return build(
        given,
        from_env=from_env,
        from_user=frozenset(script.values) - from_env,
        notes=(*environment.notes, *script.notes, *overruled),
    )


def build(
    given: Mapping[str, Value],
    *,
    from_env: frozenset[str],
    from_user: frozenset[str],
    notes: tuple[Note, ...] = (),
) -> Resolved:
    """Turn checked keys into a configuration; the rules between keys are checked here."""
    values: dict[str, Any] = dict(given)
    config, more = check_keys(Config(**values), given)
    return Resolved(config, from_env, from_user, MappingProxyType(values), notes + more)


def read(mapping: Mapping[str, Any], where: str) -> Source:
    """Check the keys and values of one source.

    Unknown keys are refused with the closest known one; unknown keys that start with an underscore are
    private hints of other versions of the original, and only remarked on.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"the configuration is {mapping!r}, expected a mapping from keys to values", where=where
        )
    private = [key for key in mapping if isinstance(key, str) and key.startswith("_") and not _known(key)]
    unknown = [key for key in mapping if not _known(key) and key not in private]
    if unknown:
        raise ConfigError("; ".join(_unknown(key) for key in unknown), where=where, remedy="fix or remove it")
    notes = tuple(
        Note.warning(f"unknown configuration key '{key}' is ignored ({where})") for key in sorted(private)
    )
    values: dict[str, Value] = {}
    spelled: dict[str, str] = {}
    for spelling, raw in mapping.items():
        if spelling in private:
            continue
        key = legacy.canonical(spelling)
        value = SETTINGS[key].check(spelling, raw, where=where)
        if value is None:
            continue  # None stands for "not set"
        if key in values and values[key] != value:
            raise ConfigError(
                f"'{spelled[key]}' is {values[key]!r} and '{spelling}' is {value!r}, but they are the same "
                "setting and must be equal",
                where=where,
                remedy=f"give '{key}' only",
            )
        values[key], spelled[key] = value, spelling
    return Source(MappingProxyType(values), notes)


def overruled_notes(environment: Mapping[str, Value], script: Mapping[str, Value]) -> tuple[Note, ...]:
    """One line for each key that the script sets otherwise than the environment, which wins."""
    return tuple(
        Note.info(f"'{key}' is {environment[key]!r} by the environment; the script's {value!r} is ignored")
        for key, value in script.items()
        if key in environment and environment[key] != value
    )


def _read_environment(environ: Mapping[str, str]) -> Source:
    text = environ.get(legacy.ENVIRONMENT_VARIABLE, "").strip()
    source = read(unwrap_json(text, legacy.ENVIRONMENT_VARIABLE) if text else {}, legacy.ENVIRONMENT_VARIABLE)
    timeout = environ.get(TIMEOUT_VARIABLE, "").strip()
    if not timeout:
        return source
    try:
        seconds: object = float(timeout)
    except ValueError:
        seconds = timeout
    value = SETTINGS["timeout_s"].check("timeout_s", seconds, where=TIMEOUT_VARIABLE)
    return Source(MappingProxyType({**source.values, "timeout_s": value}), source.notes)


def unwrap_json(text: str, where: str) -> Mapping[str, Any]:
    """Decode a JSON object that may have been encoded twice by a launcher."""
    try:
        decoded = json.loads(text)
        if isinstance(decoded, str):
            decoded = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is {text!r}, which is not JSON ({error})",
            where="the environment",
            remedy=JSON_REMEDY,
        ) from error
    if not isinstance(decoded, dict):
        raise ConfigError(
            f"{where} is {text!r}, expected a JSON object",
            where="the environment",
            remedy=JSON_REMEDY,
        )
    return decoded


def _known(key: object) -> bool:
    return isinstance(key, str) and legacy.canonical(key) in SETTINGS


def _unknown(key: object) -> str:
    names = [*SETTINGS, *legacy.ALIASES]
    closest = difflib.get_close_matches(str(key).lower(), names, n=1, cutoff=0.0)[0]
    return f"unknown configuration key {key!r}; did you mean '{closest}'?"
