"""The shards of `fully_shard` as what optimizers, norms and checkpoints know: pieces (`optimizer_state`, Note [Pieces]).

A shard is a DTensor, which most optimizers take but handle slowly, element by element of a group. The piece is its local rows,
flat: an ordinary tensor over the same memory. Nothing is to be brought together after an update; parameters are gathered when
they are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor
from torch.nn import Parameter

from shardwright.data_parallel import shards
from shardwright.data_parallel.buckets import Slot
from shardwright.data_parallel.fully_sharded import FullySharded
from shardwright.data_parallel.optimizer_state import Piece
from shardwright.topology import context


class FullyShardedPieces:
    """This rank's pieces of a model under `fully_shard`; parameters without dims have none.

    The pieces of all ranks of a shard group are the whole parameters; each tp rank's slices have pieces of their own.
    """

    def __init__(self, model: FullySharded) -> None:
        self._model = model
        self._pieces: dict[int, Piece] = {}
        self._of_tensor: dict[int, Piece] = {}
        for position, (name, parameter) in enumerate(model.parameters.items()):
            if shards.is_shard(parameter):
                piece = _piece(position, name, parameter)
                self._pieces[id(parameter)] = self._of_tensor[id(piece.tensor)] = piece

    @property
    def pieces(self) -> Collection[Piece]:
        """One per sharded parameter, some of them empty; in the same order on every rank."""
        return self._pieces.values()

    def piece(self, parameter: Tensor) -> Piece | None:
        """This rank's piece of a parameter; None for one that isn't sharded."""
        return self._pieces.get(id(parameter))

    def piece_behind(self, tensor: Tensor) -> Piece | None:
        """The piece whose virtual parameter this is; None for any other tensor."""
        return self._of_tensor.get(id(tensor))

    def gather(self, parameters: Iterable[Tensor]) -> None:
        """After an update: what scripts read off the parameters follows.

        Called by: every rank of a shard group. Collectives: see `shards.missing_elements`; none where rows divide evenly.
        """
        self._model.refresh_descriptions()

    def hand_out_gradients(self) -> None:
        """The gradients of shards are those of their pieces too, over the same memory."""
        for piece in self.pieces:
            gradient = piece.parameter.grad
            piece.tensor.grad = None if gradient is None else shards.local(gradient).reshape(-1)


def _piece(position: int, name: str, parameter: Parameter) -> Piece:
    layout = shards.layout_of(parameter)
    start, stop = layout.held(context.world().coordinates.shard)
    tensor = Parameter(shards.local(parameter).detach().reshape(-1), requires_grad=parameter.requires_grad)
    slot = Slot(position, name, 0, layout.num_elements, tuple(parameter.shape), tuple(parameter.stride()))
    return Piece(name, parameter, tensor, start, stop, slot)
