"""A second `smp.init`: what may still change, and what may not.

Frameworks initialise the library while they are imported, and the script initialises it again with its own
dict. The second call must neither fail nor rebuild groups without need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from shardwright.config.legacy import placement_order
from shardwright.config.notes import Note
from shardwright.config.parse import DICT_SOURCE, Resolved, build, overruled_notes, read
from shardwright.config.schema import SETTINGS, TOPOLOGY_KEYS, Config
from shardwright.errors import ConfigError

Outcome = Literal["unchanged", "apply", "reinitialise"]


@dataclass(frozen=True)
class Merge:
    """What a second `smp.init` amounts to.

    outcome: "unchanged": nothing to do; "apply": use the new configuration with the groups there are;
        "reinitialise": tear the unused groups down and start again with the new configuration.
    resolved: the configuration from now on; its notes are those of this call only.
    changed: the keys whose resolved value differs from before.
    """

    outcome: Outcome
    resolved: Resolved
    changed: frozenset[str]


def topology_keys(config: Mapping[str, Any], *, where: str = DICT_SOURCE) -> frozenset[str]:
    """Which of the given keys, under any spelling, shape the process groups; canonical names."""
    return TOPOLOGY_KEYS & read(config, where).values.keys()


def merge_second_init(current: Resolved, new: Mapping[str, Any], *, groups_used: bool) -> Merge:
    """Decide what `smp.init(new)` does in a process that is initialised already.

    groups_used: whether any communication group has carried traffic since the first call.

    - What the environment sets stays as it is; a different value is remarked on.
    - Other keys apply, if no topology key changes its meaning ("cluster" and "DPT" mean the same).
    - A changed topology key starts again if the first call had no dict (it used defaults for this key, since
      the environment does not set it) and no group was used.

    Raises: ConfigError naming each topology key and both values where none of this holds, and for
        everything that `resolve` refuses.
    """
    script = read(new, DICT_SOURCE)
    set_by_env = {key: current.given[key] for key in current.from_env}
    notes = (*script.notes, *overruled_notes(set_by_env, script.values))
    wanted = {key: value for key, value in script.values.items() if key not in current.from_env}
    resolved = build(
        MappingProxyType({**current.given, **wanted}),
        from_env=current.from_env,
        from_user=current.from_user | wanted.keys(),
        notes=notes,
    )
    changed = _changed(current.config, resolved.config)
    reshaped = changed & TOPOLOGY_KEYS
    if not reshaped:
        late = sorted(key for key in changed if SETTINGS[key].acts_at_start)
        more = tuple(Note.warning(f"'{key}' has no effect on groups that exist already") for key in late)
        resolved = replace(resolved, notes=resolved.notes + more)
        return Merge("apply" if changed else "unchanged", resolved, changed)
    if groups_used or current.from_user:
        raise _refusal(current.config, resolved.config, reshaped, groups_used=groups_used)
    return Merge("reinitialise", resolved, changed)


def _changed(before: Config, after: Config) -> frozenset[str]:
    return frozenset(key for key in SETTINGS if _meaning(before, key) != _meaning(after, key))


def _meaning(config: Config, key: str) -> object:
    value = getattr(config, key)
    return placement_order(value) if key == "placement_strategy" else value


def _refusal(before: Config, after: Config, keys: frozenset[str], *, groups_used: bool) -> ConfigError:
    what = "; ".join(
        f"'{key}' is {getattr(before, key)!r} since the first smp.init(), the second asks for "
        f"{getattr(after, key)!r}"
        for key in sorted(keys)
    )
    reason = "communication groups are in use" if groups_used else "the first call had settings of its own"
    return ConfigError(
        f"{what}; it cannot change any more because {reason}",
        remedy="give the full configuration to the first smp.init(), or set it in SM_HP_MP_PARAMETERS",
    )
