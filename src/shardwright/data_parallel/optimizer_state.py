"""Parameters in flat buffers of which every rank updates one share: what optimizer state is sharded by.

Note [Pieces]: parameters that are equal on n ranks lie in flat buffers, cut into n equal shares; share r belongs to the
r-th rank of the axis. What lies in a rank's share of one parameter is its *piece*: a one-dimensional tensor over the
parameter's own memory. Optimizers update pieces, so their state is that of a share; gradients are reduced to their
owner (`sharded_reducer`), and shares come back to all ranks in `gather`. Every rank has a piece of every parameter,
an empty one where it owns nothing, so that groups and their order are the same on all owners.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5 (stages 1 and 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.data_parallel.buckets import MIB, Bucket, Slot, TensorInfo, gradient_dtype, plan_buckets
from shardwright.errors import UsageError
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives


@dataclass(frozen=True, eq=False)
class Piece:
    """What this rank owns of a parameter: elements [start, stop) in the order of the parameter's memory.

    tensor: the virtual parameter, one-dimensional, which shares their memory.
    """

    name: str
    parameter: Parameter
    tensor: Parameter
    start: int
    stop: int
    slot: Slot

    def cut(self, whole: Tensor) -> Tensor:
        """A copy of this piece of a tensor that is shaped like the parameter."""
        return self.slot.flattened(whole)[self.start : self.stop].clone()


class FlatBucket:
    """Parameters back to back in one flat buffer, which they are views of.

    flat: [number of owners * share].   share: elements of each owner.   pieces: of this rank, one per parameter.
    """

    def __init__(self, plan: Bucket, parameters: Sequence[Parameter], num_owners: int, owner: int) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        num_elements = plan.padded_elements(num_owners)
        self.share = num_elements // num_owners
        self.first = owner * self.share
        self.flat = torch.empty(num_elements, dtype=plan.dtype, device=plan.device)
        self.flat[plan.num_elements :].zero_()
        self.pieces: list[Piece] = []
        with torch.no_grad():
            for slot, parameter in zip(plan.slots, self.parameters, strict=True):
                view = slot.view_of(self.flat)
                view.copy_(parameter)
                parameter.data = view
                self.pieces.append(self._piece(slot, parameter))

    def _piece(self, slot: Slot, parameter: Parameter) -> Piece:
        start = min(max(self.first - slot.offset, 0), slot.num_elements)
        stop = max(min(self.first + self.share - slot.offset, slot.num_elements), start)
        tensor = Parameter(self.flat[slot.offset + start : slot.offset + stop])
        if gradient_dtype(parameter) is not tensor.dtype:
            tensor.grad_dtype = gradient_dtype(parameter)
        return Piece(slot.name, parameter, tensor, start, stop, slot)

    def offset_in_share(self, piece: Piece) -> int:
        """Where a piece begins in this rank's share."""
        return piece.slot.offset + piece.start - self.first if piece.stop > piece.start else 0

    def moved(self) -> str | None:
        """The name of a parameter that doesn't lie in the buffer any more."""
        item, begin = self.flat.element_size(), self.flat.data_ptr()
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            if slot.num_elements and parameter.data_ptr() != begin + slot.offset * item:
                return slot.name
        return None


class ShardedParameters:
    """The parameters of one axis whose optimizer state is sharded over it, see Note [Pieces].

    buckets: in the order in which backward is expected to finish their gradients; they only ever become more.
    """

    def __init__(self, axis: Axis) -> None:
        world = context.world()
        self.axis: Axis = axis
        self._ranks = world.groups.ranks(axis)
        self._owner = self._ranks.index(world.rank)
        self.buckets: list[FlatBucket] = []
        self._pieces: dict[int, Piece] = {}
        self._of_tensor: dict[int, Piece] = {}
        self._bucket_of: dict[int, FlatBucket] = {}

    @property
    def pieces(self) -> Collection[Piece]:
        """One per covered parameter, in the same order on every rank of the axis."""
        return self._pieces.values()

    def piece(self, parameter: Tensor) -> Piece | None:
        """This rank's piece of a parameter; None for one that isn't covered."""
        return self._pieces.get(id(parameter))

    def piece_behind(self, tensor: Tensor) -> Piece | None:
        """The piece whose virtual parameter this is; None for any other tensor."""
        return self._of_tensor.get(id(tensor))

    def cover(self, named: Iterable[tuple[str, Parameter]], cap_bytes: int) -> list[FlatBucket]:
        """Move parameters that aren't covered yet into flat buffers; return the new buckets.

        Called by: every rank of the axis, with the same parameters in the same order. No communication.
        cap_bytes: no buffer is larger, except one of a single larger parameter.
        Raises: UsageError if two of them share memory: training one would then have changed the other.
        """
        new = [(n, p) for n, p in named if id(p) not in self._pieces]
        if not new:
            return []
        _check_apart(new)
        plan = plan_buckets(
            [TensorInfo.of(n, p) for n, p in new],
            cap_bytes=cap_bytes,
            first_cap_bytes=None if self.buckets else min(MIB, cap_bytes),
            reverse=True,
        )
        added = []
        for bucket in plan:
            members = [new[slot.position][1] for slot in bucket.slots]
            flat = FlatBucket(bucket, members, len(self._ranks), self._owner)
            self._pieces.update((id(p), piece) for p, piece in zip(members, flat.pieces, strict=True))
            self._of_tensor.update((id(piece.tensor), piece) for piece in flat.pieces)
            self._bucket_of.update((id(p), flat) for p in members)
            added.append(flat)
        self.buckets += added
        return added

    def check_in_place(self) -> None:
        """Raise UsageError if a parameter was given other memory: pieces would then update nothing."""
        name = next(filter(None, (bucket.moved() for bucket in self.buckets)), None)
        if name is not None:
            raise UsageError(
                f"parameter '{name}' was moved, cast or given other data after the first step, but with"
                " 'shard_optimizer_state' its memory belongs to a flat buffer",
                remedy="change parameters before the first step, or in place under torch.no_grad()",
            )

    def gather(self, parameters: Iterable[Tensor]) -> None:
        """Give every rank what the owners have made of these parameters.

        Called by: every rank of the axis, with the same parameters, after their pieces were updated.
        Collectives: for each flat buffer that one of them lies in one all-gather, in the order of `buckets`.
        """
        wanted = {id(self._bucket_of[id(p)]) for p in parameters if id(p) in self._bucket_of}
        for bucket in self.buckets:
            if id(bucket) in wanted:
                collectives.all_gather_in_place(bucket.flat, self.axis)
                for parameter in bucket.parameters:
                    torch.autograd.graph.increment_version(parameter)


def _check_apart(named: Sequence[tuple[str, Parameter]]) -> None:
    """Parameters become views of one buffer each; those that were the same memory would come apart."""
    spans = sorted(
        (p.device.type, p.untyped_storage().data_ptr(), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n)
        for n, p in named
        if p.numel()
    )
    for (*one, _, end, name), (*other, begin, _, second) in itertools.pairwise(spans):
        if one[:2] == other[:2] and begin < end:
            raise UsageError(
                f"parameters '{name}' and '{second}' are different objects with the same memory, which"
                " 'shard_optimizer_state' would take apart",
                remedy="tie them by making them the same parameter: module.weight = other.weight",
            )
