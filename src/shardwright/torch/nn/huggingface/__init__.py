"""`smp.nn.huggingface`: hooks and weight translation, one module for each family of models."""

from __future__ import annotations

from shardwright.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]
