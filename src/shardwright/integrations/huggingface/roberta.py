"""RoBERTa: BERT's layers under other class names, and positions that are counted from the padding id."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.integrations.huggingface import bert
from shardwright.integrations.huggingface.settings import NotDistributableError

_MODELING = "transformers.models.roberta.modeling_roberta"
_PADDING = 1


class _BareAdapter(bert.BareAdapter):
    def positions_of(self, input_ids: Tensor) -> Tensor:
        """Positions from 2 on; padding has position 1."""
        counts = (input_ids != _PADDING).to(torch.int64)
        return torch.cumsum(counts, dim=1) * counts + _PADDING


def model_settings(config: Any, index: int | None) -> dict[str, Any]:
    """Arguments of a bare model without a pooler."""
    if config.pad_token_id != _PADDING:
        raise NotDistributableError(f"pad_token_id={config.pad_token_id} is not {_PADDING}")
    return bert.model_settings(config, index)


ADAPTERS = bert.encoder_adapters("roberta", _MODELING, "Roberta")
MODEL_ADAPTER = _BareAdapter(
    "roberta",
    _MODELING,
    "RobertaModel",
    "model",
    model_settings,
    lambda _: bert.MODEL_TABLE,
    output="BaseModelOutputWithPoolingAndCrossAttentions",
    token_types=True,
)
