"""`smp.nn`: distributed modules and the layers they are made of."""

from __future__ import annotations

from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.nn.attention import DistributedAttentionLayer
from shardwright.tensor_parallel.nn.embedding import DistributedEmbedding
from shardwright.tensor_parallel.nn.flash import FlashAttentionLayer
from shardwright.tensor_parallel.nn.linear import DistributedLinear
from shardwright.tensor_parallel.nn.lm_head import DistributedTransformerLMHead
from shardwright.tensor_parallel.nn.mlp import DistributedTransformerOutputLayer
from shardwright.tensor_parallel.nn.norm import FusedLayerNorm
from shardwright.tensor_parallel.nn.transformer import DistributedTransformer, DistributedTransformerLayer
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
