"""RoBERTa: BERT's layers under other class names, and positions that are counted from the padding id."""

from __future__ import annotations

from shardwright.integrations.huggingface.bert import encoder_adapters

_MODELING = "transformers.models.roberta.modeling_roberta"

ADAPTERS = encoder_adapters("roberta", _MODELING, "Roberta")
