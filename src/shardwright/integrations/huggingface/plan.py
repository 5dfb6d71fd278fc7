"""The tensor parallel plan that a transformers model carries, in our words.

transformers 4.57 and 5.x name some styles differently; a plan maps paths, with `*` for numbers, to styles.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import nn

from shardwright.integrations.huggingface.settings import NotDistributableError, refuse_settings
from shardwright.tensor_parallel.plan import Cut

_STYLES: dict[str, Cut] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_whole",
    "colwise_rep": "column_whole",
    "rowwise_split_input": "row_whole",
    "rowwise_rep": "row_whole",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "embedding",
    "replicated_with_grad_allreduce": "summed",
}
_OF_TABLES: dict[str, Cut] = {"rowwise": "vocabulary", "colwise": "embedding"}
"""What version 4 calls the cuts of embeddings."""
_STAYS_WHOLE = ("replicate", "replicated")


def find(model: nn.Module) -> dict[str, Cut] | None:
    """What the plan of a model says of each module that it names; None without a plan.

    Called by: the replacement of modules, for models without an adapter.
    Raises: NotDistributableError naming a style, a parameter or a module that can't be served.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    styles = _styles(model)
    if not styles:
        return None
    refuse_settings(model.config, output_attentions=True)
    found: dict[str, Cut] = {}
    for path, module in model.named_modules():
        style = styles.get(_pattern(path))
        if style is None or style in _STAYS_WHOLE:
            continue
        if style not in _STYLES:
            raise NotDistributableError(f"style {style!r} of its tensor parallel plan, for '{path}', is not supported")
        cut = _OF_TABLES.get(style) if isinstance(module, nn.Embedding) else None
        found[path] = cut or _STYLES[style]
    for path, _ in model.named_parameters():
        if styles.get(_pattern(path), _STAYS_WHOLE[0]) not in _STAYS_WHOLE:
            raise NotDistributableError(f"its tensor parallel plan names a parameter, '{path}', which is not supported")
    for path in [p for p, cut in found.items() if cut in ("vocabulary", "embedding")]:
        if type(model.get_submodule(path)) is not nn.Embedding:
            del found[path]  # one that does more than look up stays whole
    # a plan that names a head only says nothing of the blocks: that is no plan
    return found if any(cut in ("row", "row_whole") for cut in found.values()) else None


def _styles(model: Any) -> dict[str, str]:
    """The plan by pattern: what the configuration says of the base model, the class, and the instance itself."""
    styles: dict[str, str] = {}
    base = getattr(model.config, "base_model_tp_plan", None)
    prefix = str(getattr(model, "base_model_prefix", ""))
    inner = getattr(model, prefix, None) if prefix else None
    if isinstance(base, dict):
        start = f"{prefix}." if isinstance(inner, nn.Module) and inner is not model else ""
        styles.update((start + name, style) for name, style in base.items())
    for more in (getattr(type(model), "_tp_plan", None), vars(model).get("_tp_plan")):
        if isinstance(more, dict):
            styles.update(more)
    return {_pattern(name): style for name, style in styles.items()}


def _pattern(path: str) -> str:
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", path)
