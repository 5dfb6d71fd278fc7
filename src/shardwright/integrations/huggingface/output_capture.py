"""How transformers (5.x) records hidden states, attentions and router logits.

Its forward hooks put outputs of inner modules into a collector that a context variable names. The collector is an
ambient object of every unit, so what is recorded inside a unit appears on all ranks; the hooks themselves do nothing
else, so units may keep them. Transformers is never imported from here.
"""

from __future__ import annotations

import sys
from typing import Any

from shardwright.pipeline.runtime import register_ambient, register_harmless_hook
from shardwright.pipeline.spec_cache import register_structural

_MODULE = "transformers.utils.output_capturing"


def install() -> None:
    """Let the pipeline know about the collector and its hooks. Called once, by the public face."""
    register_ambient(_collector)
    register_harmless_hook(_is_capture_hook)
    register_structural(_is_cache)


def _is_cache(cls: type) -> bool:
    """Key-value caches and their layers: their numbers and flags follow from shapes."""
    return cls.__module__ == "transformers.cache_utils"


def _collector() -> Any:
    module = sys.modules.get(_MODULE)
    return None if module is None else module._active_collector.get()


def _is_capture_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _MODULE
