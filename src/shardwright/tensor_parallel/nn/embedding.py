"""`DistributedEmbedding`: a lookup table cut along the embedding dim, or along the vocabulary."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from shardwright.errors import NotBuiltError
from shardwright.sharding.spec import ShardSpec
from shardwright.tensor_parallel import batch
from shardwright.tensor_parallel.module import (
    DistributedModule,
    Init,
    check_divisible,
    keeps_hidden_sliced,
    normal,
    prescaled_batch,
    tp_rank,
    tp_size,
)
from shardwright.transport import differentiable as comm


class DistributedEmbedding(DistributedModule):
    """`nn.Embedding` cut over the tp ranks.

    split: "embedding": weight [num_embeddings, embedding_dim / tp]; "vocabulary": [num_embeddings / tp,
        embedding_dim], parts may be uneven, nothing is padded; None: whole, inside a distributed module.
    nested: the output stays on the scaled batch, as hidden states of the mode.
    _skip_allgather: the input is the scaled batch already.
    _skip_scatter_and_merge: the output stays on the scaled batch and sliced (partial with a vocabulary split).
    Called by: every rank of the tp group. Collectives: an all-gather of the input; an all-to-all, reduce-scatter
        or all-reduce of the output; in backward the reverse of the latter.
    Raises: ConfigError if the tp degree doesn't divide `embedding_dim` where that is cut.
    """

    indivisible: ClassVar[bool] = True
    weight: Tensor

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
        split: Literal["embedding", "vocabulary"] | None = "embedding",
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_index(padding_idx, num_embeddings)
        if max_norm is not None and split == "embedding":
            raise NotBuiltError(
                "'max_norm' needs whole rows, but they are cut along the embedding dim",
                remedy="leave the embedding undistributed, or use split='vocabulary'",
            )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.split = split
        self.nested = nested
        self.sliced = keeps_hidden_sliced()
        self.prescaled = prescaled_batch()
        self.skip_allgather = _skip_allgather
        self.skip_scatter_and_merge = _skip_scatter_and_merge
        if split == "embedding" or (nested and self.sliced):
            check_divisible("embedding_dim", embedding_dim)
        dim = {"embedding": 1, "vocabulary": 0, None: None}[split]
        shape = (num_embeddings, embedding_dim)
        self.add_parameter("weight", shape, _given(_weight) or table_init(initializer_range, self.padding_idx), dim)
        self.spec = self.shard_specs().get("weight", ShardSpec.replicated(shape))

    def forward(self, input: Tensor) -> Tensor:
        alike = self.nested and input.dim() == 1  # positions without a batch dim: the same on all ranks
        ids = input if self.skip_allgather or self.prescaled or alike else comm.gather_batch(input)
        if self.split == "vocabulary":
            return self._leave_partial(self._look_up_own(ids))
        found = self._look_up(ids, self.padding_idx)
        if self.skip_scatter_and_merge:
            return found
        if self.split is None:
            return comm.own_hidden(found) if self.sliced else found
        if self.nested:
            return found if self.sliced else comm.gather_hidden(found)
        return batch.leave(found, sliced=True, prescaled=self.prescaled)

    def _leave_partial(self, found: Tensor) -> Tensor:
        """Each rank has its own rows and zeros: the sum is the result."""
        if self.skip_scatter_and_merge:
            return found
        if self.nested:
            return comm.scatter_hidden(found) if self.sliced else comm.sum_over_ranks(found)
        return comm.sum_over_ranks(found) if self.prescaled else comm.scatter_batch(found)

    def _look_up(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        return nn.functional.embedding(
            ids, self.weight, padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def _look_up_own(self, ids: Tensor) -> Tensor:
        if tp_size() == 1:
            return self._look_up(ids, self.padding_idx)
        start, stop = self.spec.ranges[tp_rank()]
        if start == stop:
            return self.weight.new_zeros((*ids.shape, self.embedding_dim)) + self.weight.sum()
        elsewhere = (ids < start) | (ids >= stop)
        own = (ids - start).masked_fill_(elsewhere, 0)
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding = self.padding_idx - start
        return self._look_up(own, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, split={self.split!r}"


def padding_index(padding_idx: int | None, num_embeddings: int) -> int | None:
    """The index counted from the front. Raises: ValueError if there is no such row."""
    if padding_idx is not None and padding_idx < 0:
        padding_idx += num_embeddings
    if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
        raise ValueError(f"'padding_idx' must lie within 'num_embeddings' ({num_embeddings})")
    return padding_idx


def _given(weight: Tensor | None) -> Init | None:
    if weight is None:
        return None
    return lambda tensor, generator: tensor.copy_(weight)


def table_init(std: float, padding_idx: int | None) -> Init:
    """Normal values, and zeros for the padding."""
    draw = normal(std)

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        draw(tensor, generator)
        if padding_idx is not None:
            tensor[padding_idx].zero_()

    return fill
