"""The original's spellings, and what they are called here.

Configuration keys keep the original's canonical names; this file holds the other spellings that scripts
and launch configurations use for them, and the two placement words with the order they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ENVIRONMENT_VARIABLE: Final = "SM_HP_MP_PARAMETERS"
"""Where the original's launcher puts the configuration, as JSON that may be encoded twice."""

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "partitions": "pipeline_parallel_degree",
        # The original spells the context manager and the key differently, and prose mixes them.
        "delay_param_initialization": "delayed_parameter_initialization",
        "delayed_param_initialization": "delayed_parameter_initialization",
    }
)
"""Other spelling -> canonical key."""

PLACEMENT_WORDS: Final[Mapping[str, str]] = MappingProxyType({"cluster": "DPT", "spread": "TPD"})
PLACEMENTS: Final = ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD")


def canonical(key: str) -> str:
    """The canonical name of a key given under any spelling; unknown keys come back unchanged."""
    return ALIASES.get(key, key)


def placement_order(strategy: str) -> str:
    """The permutation of D, P, T that a placement strategy stands for; the last letter varies fastest."""
    return PLACEMENT_WORDS.get(strategy, strategy)
