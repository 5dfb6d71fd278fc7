"""The wrapped model's parameters in pieces: who updates what, and bringing the pieces together.

With `shard_optimizer_state` every parameter that has equal copies on several ranks is cut into pieces over them (see
`data_parallel.optimizer_state`, Note [Pieces]): over rdp what acts on the samples of the whole tp group, over dp the
rest. An axis of one rank has nothing to share; its parameters stay as they are. With sharded data parallelism the pieces
are the shards of `fully_shard` (see `data_parallel.fully_sharded_pieces`), from the wrap on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.data_parallel.fully_sharded_pieces import FullyShardedPieces
from shardwright.data_parallel.optimizer_state import Piece, ShardedParameters
from shardwright.engine.gradients import Gradients
from shardwright.errors import UsageError

_NOT_ELEMENTWISE = {
    "LBFGS": "it takes all parameters together",
    "Adafactor": "its factors are means over the rows and columns of whole matrices",
    "Muon": "it makes whole matrices orthogonal",
    "SparseAdam": "it updates the rows that sparse gradients name, and reduced gradients are dense",
}


class ShardedState:
    """What the optimizers and the norm ask about pieces. Everything is empty while nothing is sharded.

    is_settled: optimizers hold pieces from here on: when the first step is over, with sharded data parallelism at once.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.is_settled = gradients.fully_sharded is not None

    @property
    def _axes(self) -> Sequence[ShardedParameters | FullyShardedPieces]:
        return self._gradients.sharded

    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces, one per covered parameter, some of them empty."""
        return (piece for axis in self._axes for piece in axis.pieces)

    def piece(self, parameter: Tensor) -> Piece | None:
        """This rank's piece of a parameter; None for one that isn't shared."""
        found = (axis.piece(parameter) for axis in self._axes)
        return next((piece for piece in found if piece is not None), None)

    def piece_behind(self, tensor: Tensor) -> Piece | None:
        """The piece that a virtual parameter is the tensor of; None for any other tensor."""
        found = (axis.piece_behind(tensor) for axis in self._axes)
        return next((piece for piece in found if piece is not None), None)

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Give all replicas what the owners have made of these parameters.

        Called by: every rank, with the same parameters. Collectives: see `ShardedParameters.gather`.
        """
        for axis in self._axes:
            axis.gather(parameters)

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """What `model.zero_grad()` does for the gradients of pieces."""
        for piece in self.pieces():
            if set_to_none:
                piece.tensor.grad = None
            elif piece.tensor.grad is not None:
                piece.tensor.grad.zero_()


def check_can_shard(optimizer: Any, key: str) -> bool:
    """Refuse optimizers whose state can't be sharded; True for one that is known to be able to.

    key: the setting that shards it.
    Raises: UsageError naming the reason.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for name, reason in _NOT_ELEMENTWISE.items():
        cls = getattr(torch.optim, name, None)
        if cls is not None and isinstance(inner, cls):
            raise UsageError(
                f"{name} can't have its state sharded: {reason}, but with '{key}' every rank updates pieces of parameters",
                remedy=f"use an optimizer that updates every element by itself, such as AdamW, or leave out '{key}'",
            )
    return type(inner).__module__.startswith(("torch.optim.", "shardwright.optim."))
