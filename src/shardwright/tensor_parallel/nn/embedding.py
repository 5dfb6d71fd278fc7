"""`DistributedEmbedding`: a lookup table cut along the embedding dim, or along the vocabulary."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from shardwright.tensor_parallel.module import DistributedModule


class DistributedEmbedding(DistributedModule):
    """`nn.Embedding` cut over the tp ranks; vocabulary parts may be uneven."""

    indivisible: ClassVar[bool] = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        *,
        split: Literal["embedding", "vocabulary"] = "embedding",
        nested: bool = False,
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError
