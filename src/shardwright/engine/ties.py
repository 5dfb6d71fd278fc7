"""Tied weights kept on several stages (`tied_weights="replicate"`).

The owner's copy has the optimizer state. Gradients of the copies are sent to it and summed at the end of a step; after
`optimizer.step()` the owner sends the new weight back, so that all copies stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.engine.placement import Placed
from shardwright.topology import context
from shardwright.transport import p2p

_CHANNEL = 0


class ReplicatedTies:
    """The replicated parameters of a model, as one rank of the pipeline group sees them."""

    def __init__(self, table: Sequence[Placed]) -> None:
        world = context.world()
        self._me = world.coordinates.pp
        self._ranks = world.groups.ranks("pp")
        self._ties = [e for e in table if len(e.stages) > 1 and not e.is_buffer]

    def is_copy(self, tensor: torch.Tensor) -> bool:
        """True on a rank whose copy of this parameter is not the one that is updated and counted."""
        return any(e.tensor is tensor and e.owner != self._me for e in self._ties)

    def reduce_gradients(self) -> None:
        """Sum the copies' gradients on the owner. Called by: every rank of the pipeline group, after backward."""
        for tie in self._ties:
            for stage in sorted(tie.stages):
                if stage == tie.owner:
                    continue
                if self._me == stage:
                    gradient = tie.tensor.grad
                    present = torch.tensor([gradient is not None])
                    p2p.isend(present, self._ranks[tie.owner], _CHANNEL).wait()
                    if gradient is not None:
                        p2p.isend(gradient.contiguous(), self._ranks[tie.owner], _CHANNEL).wait()
                    tie.tensor.grad = None
                elif self._me == tie.owner:
                    source = self._ranks[stage]
                    if p2p.irecv(torch.empty(1, dtype=torch.bool), source, _CHANNEL).wait().item():
                        received = p2p.irecv(torch.empty_like(tie.tensor, requires_grad=False), source, _CHANNEL).wait()
                        tie.tensor.grad = received if tie.tensor.grad is None else tie.tensor.grad + received

    def send_weights(self) -> None:
        """Send the owner's values to the copies. Called by: every rank of the pipeline group."""
        for tie in self._ties:
            for stage in sorted(tie.stages):
                if stage == tie.owner:
                    continue
                if self._me == tie.owner:
                    p2p.isend(tie.tensor.detach(), self._ranks[stage], _CHANNEL).wait()
                elif self._me == stage:
                    received = p2p.irecv(torch.empty_like(tie.tensor, requires_grad=False), self._ranks[tie.owner], _CHANNEL)
                    with torch.no_grad():
                        tie.tensor.copy_(received.wait())
