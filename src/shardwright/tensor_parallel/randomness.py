"""Random streams inside distributed modules: the same on all tp ranks, or a different one on each.

Dropout on copied activations must use one mask on all tp ranks, dropout on sliced ones (attention
probabilities of a rank's own heads, sliced hidden states) different masks. The global generators can't give
that, for scripts seed them with or without the tp rank. So such a block runs on streams of its own, derived
from (base, pp rank, rdp rank, number of the block) and, for split streams, the tp rank.

Note [Blocks are numbered]: the base is one random number of tp rank 0, sent at the first block. Blocks count up,
alike on all tp ranks. A recomputed block (activation checkpointing) must get its old number: each block draws
one number from torch's global CPU generator, as a mark; recomputation restores that generator, so within a
backward pass a mark that is known tells the block's number. This needs nothing from whoever recomputes but what
`torch.utils.checkpoint` does by default (`preserve_rng_state`).

For a seed everything is reproducible: base and marks come from torch's global generator.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.topology import context
from shardwright.topology.rng import derive_seed, torch_forked
from shardwright.transport import collectives
from shardwright.transport import differentiable as comm

_BITS = 62
_MARKS_KEPT = 1 << 16


class _Blocks:
    """This process's numbering of blocks, see Note [Blocks are numbered]."""

    def __init__(self) -> None:
        self.base: int | None = None
        self.world: context.World | None = None
        self.count = 0
        self.by_mark: OrderedDict[int, int] = OrderedDict()

    def next(self) -> int:
        """Return the number of the block that begins now."""
        mark = _draw()
        if _in_backward() and mark in self.by_mark:
            return self.by_mark[mark]
        self.count += 1
        self.by_mark[mark] = self.count
        if len(self.by_mark) > _MARKS_KEPT:
            self.by_mark.popitem(last=False)
        return self.count

    def seed(self, *parts: int | str) -> int:
        here = context.world() if context.is_initialized() else None
        if self.base is None or self.world is not here:
            self.base = _common()
            self.world = here
        place = (here.coordinates.pp, here.coordinates.rdp) if here else (0, 0)
        return derive_seed(self.base, *place, self.next(), *parts)


_blocks = _Blocks()


def same_stream() -> torch_forked:
    """Return a context in which all tp ranks draw the same numbers.

    Called by: every rank of the tp group. Collectives: one broadcast, at the first block of the process.
    """
    return torch_forked(_blocks.seed("same"))


def split_stream() -> torch_forked:
    """Return a context in which every tp rank draws numbers of its own. Called by and collectives: as above."""
    return torch_forked(_blocks.seed("split", comm.position()))


def dropout(x: Tensor, probability: float, training: bool, *, split: bool) -> Tensor:
    """Dropout on a tensor that is equal on all tp ranks (one mask), or of which each rank has its own part.

    Nothing is drawn when there is nothing to drop.
    """
    if not training or probability == 0:
        return x
    if comm.is_silent(x):
        return nn.functional.dropout(x, probability, True)
    with split_stream() if split else same_stream():
        return nn.functional.dropout(x, probability, True)


def begin(seed: int | None = None) -> None:
    """Start numbering anew, from a base that is given or drawn at the first block.

    Called by: every rank of the tp group, with the same seed.
    """
    global _blocks
    _blocks = _Blocks()
    if seed is not None:
        _blocks.base = seed
        _blocks.world = context.world() if context.is_initialized() else None


def state() -> dict[str, Any]:
    """Return where the numbering stands, to be kept in a checkpoint. The same on all tp ranks."""
    return {"base": _blocks.base, "count": _blocks.count}


def set_state(kept: dict[str, Any]) -> None:
    """Go on where `state` was taken."""
    begin(kept["base"])
    _blocks.count = kept["count"]


def _common() -> int:
    before = torch.default_generator.get_state()
    number = torch.tensor([_draw()])
    torch.default_generator.set_state(before)  # the first block draws its mark where a recomputation will draw it
    if comm.size() > 1:
        collectives.broadcast_tensor(number, "tp")
    return int(number.item())


def _draw() -> int:
    return int(torch.randint(1 << _BITS, (), device="cpu").item())


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1
