"""Gradient reduction to owners: each rank gets the mean gradient of its share of the parameters, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.data_parallel.buckets import gradient_dtype
from shardwright.data_parallel.comm_hook import Waitable
from shardwright.data_parallel.live_bucket import LiveBucket
from shardwright.data_parallel.optimizer_state import FlatBucket, ShardedParameters
from shardwright.data_parallel.reducer import GradientReducer, ReplicaAxis
from shardwright.topology.host_memory import empty_apart
from shardwright.transport import collectives

Buffers = dict[tuple[torch.dtype, torch.device], Tensor]


class ShardedReducer(GradientReducer):
    """A `GradientReducer` whose result are the gradients of pieces (see optimizer_state, Note [Pieces]).

    The calls and their order are the same, with `prepare` before them. When a bucket is started its parameters' `.grad`
    become None; after `finish()` the pieces have gradients, and no rank holds more. A gradient that a piece still
    has from an earlier step is added to.
    Terms are added in rank order, see `collectives.reduce_scatter_into`, so that fp32 results equal those of
    `GradientReducer` bit for bit. There are no communication hooks: they reduce for all ranks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        axis: ReplicaAxis,
        average_over: int,
        bucket_cap_mb: float = 25,
        overlap: bool = True,
    ) -> None:
        super().__init__(
            named_parameters, axis=axis, average_over=average_over, bucket_cap_mb=bucket_cap_mb, overlap=overlap
        )
        self.sharded = ShardedParameters(axis)
        self._live: list[ShardedBucket] = []
        self._buffers: Buffers = {}

    def prepare(self) -> None:
        """Cover parameters that require a gradient and aren't covered yet.

        Called by: every rank of the axis, between steps.
        """
        trained = [(n, p) for n, p in self._named if p.requires_grad]
        for bucket in self.sharded.cover(trained, self._cap_bytes):
            self._live.append(ShardedBucket(bucket, self._buffers, self._reduce_scatter))

    def _rest(self) -> None:
        """The step is over; what gradients were packed into is memory for activations until the next backward."""
        self._buffers.clear()
        super()._rest()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self.prepare()
        self.sharded.check_in_place()
        self._work_on([bucket for bucket in self._live if any(p.requires_grad for p in bucket.parameters)])

    def _start_next(self, *, contribute: bool) -> None:
        """One bucket is under way at a time, so that one buffer is enough, and all that is held of the gradients."""
        if self._num_started:
            with torch.no_grad():
                self._buckets[self._num_started - 1].wait(1)
        super()._start_next(contribute=contribute)

    def _reduce_scatter(self, share: Tensor, flat: Tensor) -> Waitable:
        """Start to fill this rank's share of the sum of all ranks' flat buffers."""
        if not len(share):
            return _Nothing()
        pending = collectives.reduce_scatter_into(share, flat.view(-1, len(share)), self._axis, async_op=True)
        assert pending is not None
        return pending


class _Nothing:
    def wait(self) -> None: ...


class ShardedBucket(LiveBucket):
    """A bucket whose gradients are packed into a buffer that buckets take turns with; this rank's share comes back.

    buffers: by dtype and device; none is in use between `wait` and the next `start`.
    reduce_scatter: starts to fill this rank's share, its first argument, of the sum over ranks of the second.
    The share is the memory of the pieces' gradients, and goes with them.
    """

    def __init__(
        self, home: FlatBucket, buffers: Buffers, reduce_scatter: Callable[[Tensor, Tensor], Waitable]
    ) -> None:
        self._home = home
        self._buffers = buffers
        self._reduce_scatter = reduce_scatter
        self._share: Tensor | None = None
        super().__init__(home.plan, home.parameters, gradient_as_view=True)

    def rest(self) -> None:
        """Forget the step; the pieces' gradients stay."""
        super().rest()
        self._share = None

    def start(self, contribute: bool) -> None:
        """Pack this rank's gradients, or zeros if it does not contribute, let go of them, and start to reduce."""
        self.started = True
        self._share, self._pending = self._sent(contribute)
        self._note_packed()

    def _sent(self, contribute: bool) -> tuple[Tensor, Waitable]:
        """Start the reduction of what gradients there are; return the share to be."""
        home = self._home
        flat = self._buffer()
        flat[home.plan.num_elements :].zero_()
        if contribute:
            self._pack(self._views_of(flat))
        else:
            flat.zero_()
        share = empty_apart(home.share, gradient_dtype(self.parameters[0]), home.flat.device)
        return share, self._reduce_scatter(share, flat)

    def _buffer(self) -> Tensor:
        """Memory to pack into."""
        dtype, like = gradient_dtype(self.parameters[0]), self._home.flat
        buffer = self._buffers.get((dtype, like.device))
        if buffer is None or len(buffer) < len(like):
            buffer = self._buffers[dtype, like.device] = empty_apart(len(like), dtype, like.device)
        return buffer[: len(like)]

    def wait(self, divisor: float) -> None:
        """Wait for the reduction, if that was not done yet. The division happens in `write_back`."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def reduce_again(self, divisor: float, contribute: bool) -> None:
        """After `wait`: add what came on some rank since the start."""
        assert self._share is not None
        late, pending = self._sent(contribute)
        pending.wait()
        self._share.add_(late)

    def write_back(self, had_gradient: Sequence[bool], divisor: float) -> None:
        """Give the pieces of parameters that had a gradient on some rank theirs; the others keep what they have."""
        assert self._share is not None
        if divisor != 1:
            self._share.div_(divisor)
        for piece, had in zip(self._home.pieces, had_gradient, strict=True):
            if not had:
                continue
            start = self._home.offset_in_share(piece)
            gradient = self._share[start : start + piece.stop - piece.start]
            if piece.tensor.grad is None:
                piece.tensor.grad = gradient
            else:
                piece.tensor.grad.add_(gradient)
