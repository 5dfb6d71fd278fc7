"""What a wrapped model was before its modules were replaced: class and configuration of transformers, and names of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.engine.state import state


@dataclass(frozen=True)
class Original:
    """The transformers model that a module is, or stands for."""

    cls: type[nn.Module]
    config: Any
    generation_config: Any


def original_of(module: nn.Module) -> Original | None:
    """What transformers would call a module, which may be the distributed version of one of its models; None for others."""
    cls = module.__dict__.get("original_class", type(module))
    config = getattr(module, "config", None)
    if not hasattr(cls, "save_pretrained") or not hasattr(config, "to_json_string"):
        return None
    return Original(cls, config, getattr(module, "generation_config", None))


def origin_record(module: nn.Module) -> Mapping[str, Any] | None:
    """The same as JSON values, with the tables of names of replaced modules; None where it can't be told.

    Read by: the export of a checkpoint's files to a folder of Hugging Face, without a job.
    """
    original = original_of(module)
    renamings = [(prefix, getattr(table, "as_record", None)) for prefix, table in state.module_manager.renamings]
    if original is None or any(as_record is None for _, as_record in renamings):
        return None
    settings = original.generation_config
    return {
        "architecture": original.cls.__name__,
        "config": json.loads(original.config.to_json_string(use_diff=False)),
        "generation_config": None if settings is None else json.loads(settings.to_json_string()),
        "renamings": [[prefix, as_record()] for prefix, as_record in renamings if as_record is not None],
    }
