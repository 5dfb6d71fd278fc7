"""`smp.nn`: distributed modules and the layers they are made of."""

from __future__ import annotations

import torch

from shardwright.tensor_parallel.nn.norm import FusedLayerNorm
from shardwright.torch import _not_built
from shardwright.torch.nn import huggingface

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]


class DistributedModule(torch.nn.Module):
    """Base of modules whose parameters are sliced over tensor parallel ranks."""

    __init__ = _not_built.constructor("nn.DistributedModule")


class DistributedLinear(DistributedModule):
    """`torch.nn.Linear`, sliced over tensor parallel ranks."""

    __init__ = _not_built.constructor("nn.DistributedLinear")


class DistributedEmbedding(DistributedModule):
    """`torch.nn.Embedding`, sliced over tensor parallel ranks."""

    __init__ = _not_built.constructor("nn.DistributedEmbedding")


class DistributedAttentionLayer(DistributedModule):
    """Self or cross attention with its projections, norms and residual."""

    __init__ = _not_built.constructor("nn.DistributedAttentionLayer")


class DistributedTransformerOutputLayer(DistributedModule):
    """The feed-forward half of a transformer layer, with norms and residual."""

    __init__ = _not_built.constructor("nn.DistributedTransformerOutputLayer")


class DistributedTransformerLayer(DistributedModule):
    """One transformer layer: attention and feed-forward."""

    __init__ = _not_built.constructor("nn.DistributedTransformerLayer")


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers."""

    __init__ = _not_built.constructor("nn.DistributedTransformer")


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with embeddings and a language model head."""

    __init__ = _not_built.constructor("nn.DistributedTransformerLMHead")


class FlashAttentionLayer(torch.nn.Module):
    """Attention over packed query, key and value without a stored score matrix."""

    __init__ = _not_built.constructor("nn.FlashAttentionLayer")
