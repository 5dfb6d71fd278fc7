"""The estimator's `distribution` argument: every key of it is read, or refused by name. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.config.parse import read
from shardwright.errors import ConfigError

_MODEL_PARALLEL = "distribution['smdistributed']['modelparallel']"
_MPI = "distribution['mpi']"
# Options of mpirun that tune MPI's own messages and placement; nothing of ours travels by MPI.
_WITHOUT_EFFECT = {
    **dict.fromkeys(("--mca", "-mca", "--gmca", "-gmca"), 2),
    **dict.fromkeys(("--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by", "-rank-by"), 1),
    **dict.fromkeys(("--oversubscribe", "-oversubscribe", "--allow-run-as-root", "-verbose", "--verbose", "-v"), 0),
}


@dataclass(frozen=True)
class Distribution:
    """What was asked for.

    parameters: configuration keys by canonical name, checked; None if model parallelism is not enabled.
    processes_per_host: None for as many as the degrees need, or one without model parallelism.
    mpi_options: as given; environment: what its -x passes on to the workers; None values come from the caller's.
    without_effect: options that this machine has no use for.
    """

    parameters: Mapping[str, object] | None = None
    processes_per_host: int | None = None
    mpi_enabled: bool = False
    mpi_options: str = ""
    tag_output: bool = False
    environment: Mapping[str, str | None] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()


def read_distribution(distribution: Mapping[str, object] | None) -> Distribution:
    """Read the dict of dicts that the original's estimator takes.

    Raises: ConfigError naming the key, where it stands, and what is allowed.
    """
    given = _mapping(distribution or {}, "distribution")
    _refuse_others(given, ("smdistributed", "mpi"), "distribution")
    parameters = _model_parallel(_mapping(given.get("smdistributed", {}), "distribution['smdistributed']"))
    mpi = _mapping(given.get("mpi", {}), _MPI)
    _refuse_others(mpi, ("enabled", "processes_per_host", "custom_mpi_options"), _MPI)
    enabled = _flag(mpi, _MPI)
    if parameters is not None and not enabled:
        raise ConfigError(
            f"{_MPI} is not enabled, but {_MODEL_PARALLEL} is",
            remedy="distribution['mpi'] = {'enabled': True, 'processes_per_host': ...}; no MPI is needed for it here",
        )
    if not enabled:
        return Distribution(parameters)
    processes = mpi.get("processes_per_host")
    if processes is not None and (not isinstance(processes, int) or isinstance(processes, bool) or processes < 1):
        raise ConfigError(f"{_MPI}['processes_per_host'] is {processes!r}, expected a whole number, 1 or more")
    options = mpi.get("custom_mpi_options", "")
    if not isinstance(options, str):
        raise ConfigError(f"{_MPI}['custom_mpi_options'] is {options!r}, expected a string")
    environment, tag_output, without_effect = _read_mpi_options(options)
    return Distribution(parameters, processes, True, options, tag_output, environment, without_effect)


def _model_parallel(given: Mapping[str, object]) -> Mapping[str, object] | None:
    _refuse_others(given, ("modelparallel",), "distribution['smdistributed']")
    options = _mapping(given.get("modelparallel", {}), _MODEL_PARALLEL)
    _refuse_others(options, ("enabled", "parameters"), _MODEL_PARALLEL)
    parameters = _mapping(options.get("parameters", {}), f"{_MODEL_PARALLEL}['parameters']")
    checked = read(parameters, f"{_MODEL_PARALLEL}['parameters']").values
    return checked if _flag(options, _MODEL_PARALLEL) else None


def _read_mpi_options(text: str) -> tuple[dict[str, str | None], bool, tuple[str, ...]]:
    environment: dict[str, str | None] = {}
    tag_output, without_effect = False, []
    words = shlex.split(text)
    while words:
        word = words.pop(0)
        if word == "-x" and words:
            name, equals, value = words.pop(0).partition("=")
            environment[name] = value if equals else None
        elif word in ("--tag-output", "-tag-output"):
            tag_output = True
        elif len(words) >= _WITHOUT_EFFECT.get(word, len(words) + 1):
            values, words = words[: _WITHOUT_EFFECT[word]], words[_WITHOUT_EFFECT[word] :]
            without_effect.append(" ".join([word, *values]))
        else:
            raise ConfigError(
                f"{_MPI}['custom_mpi_options'] has {word!r}, which means nothing here",
                remedy="-x NAME=VALUE and --tag-output are carried out; --mca, --bind-to, --map-by, --oversubscribe "
                "and -verbose are accepted",
            )
    return environment, tag_output, tuple(without_effect)


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}, expected a dict")
    return value


def _refuse_others(given: Mapping[str, object], known: tuple[str, ...], name: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{name} has the key {key!r}, expected only: {', '.join(known)}")


def _flag(options: Mapping[str, object], name: str) -> bool:
    value = options.get("enabled", False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}['enabled'] is {value!r}, expected True or False")
    return value
