"""Into and out of the scaled batch: the samples of all tp ranks.

Outside, every tp rank has its own samples, [B, S, H] (or with `prescaled_batch` all have the same ones).
Inside it is the scaled batch: [tp * B, S, H], equal on all ranks (optimize "speed"), or sliced over the hidden
dim, [tp * B, S, H / tp] (optimize "memory"). Samples are grouped by rank, those of tp rank 0 come first.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from shardwright.tensor_parallel.module import (
    DistributedModule,
    check_divisible,
    keeps_hidden_sliced,
    prescaled_batch,
)
from shardwright.transport import differentiable as comm


def enter(hidden: Tensor, *, sliced: bool, prescaled: bool) -> Tensor:
    """Exchange hidden states on entering: own samples -> scaled batch."""
    if prescaled:
        return comm.own_hidden(hidden) if sliced else hidden
    return comm.batch_to_hidden(hidden) if sliced else comm.gather_batch(hidden)


def leave(hidden: Tensor, *, sliced: bool, prescaled: bool) -> Tensor:
    """Exchange hidden states on leaving: scaled batch -> own samples."""
    if prescaled:
        return comm.gather_hidden(hidden) if sliced else hidden
    return comm.hidden_to_batch(hidden) if sliced else comm.own_batch(hidden)


class EnterScaledBatch(DistributedModule):
    """Hidden states and what goes with them, from own samples to the scaled batch.

    Called by: every rank of the tp group. Collectives: one all-gather or all-to-all for the hidden states (none
    or a slice with `prescaled_batch`), one all-gather for each further tensor.
    """

    indivisible: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.sliced = keeps_hidden_sliced()
        self.prescaled = prescaled_batch()

    def forward(self, hidden: Tensor | None, *others: Any, num_samples: int | None = None) -> tuple[Any, ...]:
        """Return the hidden states ([B, ..., H]) and the others on the scaled batch.

        others: tensors whose dim 0 is the batch: masks, positions. One that has a single row for several
        samples is taken to be the same on all ranks and is left as it is. None stays None.
        """
        num_samples = None if hidden is None else hidden.shape[0]
        entered = None if hidden is None else enter(hidden, sliced=self.sliced, prescaled=self.prescaled)
        return entered, *(self._other(other, num_samples) for other in others)

    def _other(self, other: Any, num_samples: int | None) -> Any:
        if not isinstance(other, Tensor) or self.prescaled or other.dim() == 0:
            return other
        if other.shape[0] == 1 and num_samples not in (1, None):
            return other
        return comm.gather_batch(other)


class LeaveScaledBatch(DistributedModule):
    """Hidden states from the scaled batch to own samples. Collectives: as `EnterScaledBatch`, the way back."""

    indivisible: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.sliced = keeps_hidden_sliced()
        self.prescaled = prescaled_batch()

    def forward(self, hidden: Tensor) -> Tensor:
        return leave(hidden, sliced=self.sliced, prescaled=self.prescaled)


def check_hidden(hidden_size: int) -> None:
    """Raise ConfigError if the hidden size can't be sliced though the mode asks for it."""
    if keeps_hidden_sliced():
        check_divisible("hidden_size", hidden_size)
