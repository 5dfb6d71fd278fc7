"""All model families: which class of transformers has a distributed version, found by the class's dotted name."""

from __future__ import annotations

from torch import nn

from shardwright.integrations.huggingface import (
    bert,
    gpt2,
    gptj,
    gptneo,
    gptneox,
    llama,
    mistral,
    mixtral,
    qwen,
    roberta,
    t5,
    vit,
)
from shardwright.integrations.huggingface.adapter import Adapter, Hooks

_FILES = (gpt2, gptj, gptneo, gptneox, bert, roberta, t5, vit, llama, mistral, mixtral, qwen)

ADAPTERS: dict[str, Adapter] = {adapter.target: adapter for file in _FILES for adapter in file.ADAPTERS}


def find(module: nn.Module) -> Adapter | None:
    """The adapter of a module, if its very class is one of a known family. Called by: the replacement of modules."""
    cls = type(module)
    return ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}")


def hooks_of(family: str, original: str) -> Hooks:
    """Init, forward and return hook of one class of a family, in the form that `smp.tp_register_with_module` takes."""
    offered = [*ADAPTERS.values(), bert.MODEL_ADAPTER, roberta.MODEL_ADAPTER]
    return next(a for a in offered if (a.name, a.original) == (family, original)).hooks()
