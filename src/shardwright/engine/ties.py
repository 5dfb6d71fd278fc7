"""What several stages hold: tied weights with `tied_weights="replicate"`, and buffers that modules share.

The owner's copy has the optimizer state. Gradients of the copies are sent to it and summed at the end of a
step, where the copies' own become None; after `optimizer.step()` the owner sends the new weight back, so that
all copies stay bitwise equal. Shared buffers are constants: they are sent when a state was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shardwright.data_parallel.buckets import gradient_dtype
from shardwright.engine.placement import Placed
from shardwright.topology import context
from shardwright.transport import p2p

_CHANNEL = 0


class ReplicatedTies:
    """The replicated parameters and buffers of a model, as one rank of the pipeline group sees them.

    Scripts see the parameters marked: `parameter.shared` is True.
    """

    def __init__(self, table: Sequence[Placed]) -> None:
        world = context.world()
        self._me = world.coordinates.pp
        self._ranks = world.groups.ranks("pp")
        self._ties = [e for e in table if len(e.stages) > 1 and not e.is_buffer]
        self._buffers = [e for e in table if len(e.stages) > 1 and e.is_buffer]
        self._copies = {id(e.tensor) for e in self._ties if e.owner != self._me and self._me in e.stages}
        for entry in self._ties:
            entry.tensor.shared = True  # type: ignore[attr-defined]

    def is_copy(self, tensor: torch.Tensor) -> bool:
        """True on a rank whose copy of this parameter is not the one that is updated and counted."""
        return id(tensor) in self._copies

    def copies(self) -> list[nn.Parameter]:
        """Parameters of this rank that another stage owns."""
        return [e.tensor for e in self._ties if isinstance(e.tensor, nn.Parameter) and self.is_copy(e.tensor)]

    def owned(self) -> list[nn.Parameter]:
        """Parameters of this rank whose gradients get those of copies added after backward."""
        return [e.tensor for e in self._ties if e.owner == self._me and isinstance(e.tensor, nn.Parameter)]

    def _transfers(self, entries: Sequence[Placed]) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(tensor, world rank of the owner, world rank of a copy), in the same order on all ranks."""
        for entry in entries:
            tensor = entry.current()
            for stage in sorted(entry.stages):
                if stage != entry.owner and tensor is not None:
                    yield tensor, self._ranks[entry.owner], self._ranks[stage]

    def reduce_gradients(self) -> None:
        """Sum the copies' gradients on the owner.

        Called by: every rank of the pipeline group, after backward.
        """
        me = self._ranks[self._me]
        for parameter, owner, copy in self._transfers(self._ties):
            if me == copy:
                gradient = parameter.grad
                p2p.isend(torch.tensor([gradient is not None]), owner, _CHANNEL).wait()
                if gradient is not None:
                    p2p.isend(gradient.contiguous(), owner, _CHANNEL).wait()
                parameter.grad = None
            elif me == owner and p2p.irecv(torch.empty(1, dtype=torch.bool), copy, _CHANNEL).wait().item():
                buffer = torch.empty_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)
                received = p2p.irecv(buffer, copy, _CHANNEL).wait()
                parameter.grad = received if parameter.grad is None else parameter.grad + received

    def send_weights(self) -> None:
        """Send the owners' parameters to the copies. Called by: every rank of the pipeline group."""
        self._send(self._ties)

    def send_all(self) -> None:
        """Send the owners' parameters and buffers to the copies. Called by: every rank of the group."""
        self._send([*self._ties, *self._buffers])

    def _send(self, entries: Sequence[Placed]) -> None:
        me = self._ranks[self._me]
        for tensor, owner, copy in self._transfers(entries):
            if me == owner:
                p2p.isend(tensor.detach(), copy, _CHANNEL).wait()
            elif me == copy:
                received = p2p.irecv(torch.empty_like(tensor, requires_grad=False), owner, _CHANNEL)
                with torch.no_grad():
                    tensor.copy_(received.wait())
