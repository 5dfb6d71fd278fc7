"""Gradients of sharded parameters over the ranks that hold the same shards.

`fully_shard` has summed them over the shard group, microbatch by microbatch. Here, once for each optimizer step, the sums of the
replica groups meet, those of whole parameters on tp ranks too, and become means.

Note [Fresh gradients]: `.grad` may hold what earlier steps left, which is a mean already. It is set aside when the first
gradient of a step arrives, and added at the end.

Note [No gradient]: the ranks of a shard group must reduce the same tensors, so a parameter without a gradient counts as zeros
there. Which parameters had one on any rank is agreed at the end; the others' `.grad` stays what it was, mostly None, so that the
optimizer passes them over as it does on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from shardwright.data_parallel import shards
from shardwright.data_parallel.fully_sharded import FullySharded, divided_by
from shardwright.data_parallel.fully_sharded_pieces import FullyShardedPieces
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives


class FullyShardedReducer:
    """Makes means over all data of what `fully_shard` has summed.

    sharded: this rank's pieces, which have the means as their gradients afterwards.

    scaled: names of parameters that act on the samples of the whole tp group.
    average_over, average_scaled_over: the numbers of losses that the sums hold.
    bucket_numel: elements that travel together (`sdp_reduce_bucket_size`).
    arrived: called, during backward, with each parameter that got a gradient.
    """

    def __init__(
        self,
        model: FullySharded,
        scaled: Collection[str],
        *,
        average_over: int,
        average_scaled_over: int,
        bucket_numel: int,
        arrived: Callable[[nn.Parameter], None],
    ) -> None:
        self._model = model
        self._scaled = frozenset(scaled)
        self._average_over = average_over
        self._average_scaled_over = average_scaled_over
        self._bucket_numel = bucket_numel
        self.sharded = FullyShardedPieces(model)
        self._tell = arrived
        self._arrived: set[str] = set()
        self._before: dict[str, Tensor | None] | None = None
        model.on_gradient(self._note)

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return self._model.parameters

    def _note(self, name: str) -> None:
        """Autograd made a gradient; see Note [Fresh gradients]."""
        if self._before is None:
            self._before = {n: p.grad for n, p in self._named.items()}
            for parameter in self._named.values():
                parameter.grad = None
            self.sharded.hand_out_gradients()
        self._arrived.add(name)
        self._tell(self._named[name])

    @torch.no_grad()
    def finish(self) -> None:
        """Write the means into `.grad`.

        Called by: every rank, after the last backward of an optimizer step.
        Collectives: one all-reduce of two numbers over the shard group, one of a flag for each parameter over DP_GROUP, and
        the gradients, in buckets, over the replica group, those of whole parameters over TP_GROUP too.
        Raises: UsageError if ranks have called different blocks.
        """
        self._model.check_calls()
        had = self._agreed()
        before = self._before or {}
        for name, parameter in self._named.items():
            if not had[name]:
                parameter.grad = before.get(name)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        reduced = [n for n in self._named if had[n]]
        sharded = [n for n in reduced if n not in self._model.whole]
        whole = [n for n in reduced if n in self._model.whole]
        self._mean([n for n in sharded if n in self._scaled], ("replica",), self._average_scaled_over)
        self._mean([n for n in sharded if n not in self._scaled], ("replica", "tp"), self._average_over)
        self._mean([n for n in whole if n in self._scaled], ("rdp",), self._average_scaled_over)
        self._mean([n for n in whole if n not in self._scaled], ("dp",), self._average_over)
        for name in reduced:
            earlier = before.get(name)
            if earlier is not None:
                shards.local(self._gradient(name)).add_(shards.local(earlier))
        self.sharded.hand_out_gradients()
        self._forget()

    def rest(self) -> None:
        """At the end of every step, with a backward or without: nothing stays gathered."""
        self._model.reshard()

    def abandon(self) -> None:
        """Forget the step under way, after an error."""
        self._model.abandon()
        self._forget()

    def _forget(self) -> None:
        self._arrived.clear()
        self._before = None

    def _agreed(self) -> dict[str, bool]:
        """For each parameter: did it get a gradient on any rank?"""
        flags = torch.tensor([name in self._arrived for name in self._named], dtype=torch.int32)
        collectives.all_reduce(flags, "dp", op="max")
        return dict(zip(self._named, flags.bool().tolist(), strict=True))

    def _gradient(self, name: str) -> Tensor:
        gradient = self._named[name].grad
        assert gradient is not None
        return gradient

    def _mean(self, names: Sequence[str], axes: Sequence[Axis], divisor: int) -> None:
        """Replace gradients by their sums over the axes, divided."""
        groups = context.world().groups
        several = [axis for axis in axes if len(groups.ranks(axis)) > 1]
        gradients = [self._gradient(name) for name in names]
        already = {t.dtype: divided_by(t.dtype) for t in gradients if shards.is_shard(t)}
        for bucket in self._buckets([shards.local(t) for t in gradients if shards.local(t).numel()]):
            dtype = bucket[0].dtype
            rest = divisor / already.get(dtype, 1)
            if several:
                flat = torch.cat([t.reshape(-1) for t in bucket])
                if dtype is torch.float16:  # before the sum, which would overflow
                    flat.div_(rest)
                for axis in several:
                    collectives.all_reduce(flat, axis)
                if dtype is not torch.float16:
                    flat.div_(rest)
                parts = flat.split([t.numel() for t in bucket])
                torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])
            else:
                torch._foreach_div_(bucket, rest)

    def _buckets(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Tensors of one dtype, in order, up to the size of a bucket."""
        buckets: list[list[Tensor]] = []
        size = 0
        for tensor in tensors:
            if not buckets or buckets[-1][0].dtype is not tensor.dtype or size + tensor.numel() > self._bucket_numel:
                buckets.append([])
                size = 0
            buckets[-1].append(tensor)
            size += tensor.numel()
        return buckets
