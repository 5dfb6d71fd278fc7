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
from shardwright.transport import collectives

# So many buckets are in flight before the oldest is waited for: their buffers are all that is held of the gradients.
_IN_FLIGHT = 1


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
        self._pool = SparePool()

    def prepare(self) -> None:
        """Cover parameters that require a gradient and aren't covered yet.

        Called by: every rank of the axis, between steps.
        """
        trained = [(n, p) for n, p in self._named if p.requires_grad]
        for bucket in self.sharded.cover(trained, self._cap_bytes):
            self._live.append(ShardedBucket(bucket, self._pool, self._reduce_scatter))

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self.prepare()
        self.sharded.check_in_place()
        self._work_on([bucket for bucket in self._live if any(p.requires_grad for p in bucket.parameters)])

    def _start_next(self, *, contribute: bool) -> None:
        super()._start_next(contribute=contribute)
        if self._num_started > _IN_FLIGHT:
            with torch.no_grad():
                self._buckets[self._num_started - 1 - _IN_FLIGHT].wait(1)

    def _reduce_scatter(self, share: Tensor, flat: Tensor) -> Waitable:
        """Start to fill this rank's share of the sum of all ranks' flat buffers."""
        pending = collectives.reduce_scatter_into(share, flat.view(-1, len(share)), self._axis, async_op=True)
        assert pending is not None or not len(share)
        return pending or _Nothing()


class _Nothing:
    def wait(self) -> None: ...


class SparePool:
    """Buffers that buckets pack their gradients into, one after the other.

    They stay: the first touch of fresh memory costs several times a copy, and large blocks that come and go between
    small ones leave holes.
    """

    def __init__(self) -> None:
        self._spare: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of at least so many elements; its content is whatever it is."""
        spare = self._spare.setdefault((dtype, device), [])
        for index, buffer in enumerate(spare):
            if buffer.numel() >= num_elements:
                return spare.pop(index)
        return torch.empty(num_elements, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back that nothing writes to any more."""
        self._spare[buffer.dtype, buffer.device].append(buffer)

    def clear(self) -> None:
        self._spare.clear()


class ShardedBucket(LiveBucket):
    """A bucket whose gradients are packed into a buffer of the pool, of which this rank's share comes back.

    reduce_scatter: starts to fill this rank's share, its first argument, of the sum over ranks of the second.
    """

    def __init__(
        self, home: FlatBucket, pool: SparePool, reduce_scatter: Callable[[Tensor, Tensor], Waitable]
    ) -> None:
        self._home = home
        self._pool = pool
        self._reduce_scatter = reduce_scatter
        self._share: Tensor | None = None
        self._packed_buffer: Tensor | None = None
        super().__init__(home.plan, home.parameters, gradient_as_view=True)

    def rest(self) -> None:
        """Forget the step; the pieces' gradients stay."""
        super().rest()
        self._share = self._packed_buffer = None

    def start(self, contribute: bool) -> None:
        """Pack this rank's gradients, or zeros if it does not contribute, let go of them, and start to reduce."""
        self.started = True
        self._share, self._packed_buffer, self._pending = self._sent(contribute)
        self._note_packed()

    def _sent(self, contribute: bool) -> tuple[Tensor, Tensor, Waitable]:
        """Start the reduction of what gradients there are; return the share to be, and what must live until then."""
        home = self._home
        buffer = self._pool.take(len(home.flat), gradient_dtype(self.parameters[0]), home.flat.device)
        flat = buffer[: len(home.flat)]
        flat[home.plan.num_elements :].zero_()
        if contribute:
            self._pack(self._views_of(flat))
        else:
            flat.zero_()
        share = flat.new_empty(home.share)
        return share, buffer, self._reduce_scatter(share, flat)

    def wait(self, divisor: float) -> None:
        """Wait for the reduction, if that was not done yet. The division happens in `write_back`."""
        if self._pending is not None:
            assert self._packed_buffer is not None
            self._pending.wait()
            self._pool.give(self._packed_buffer)
            self._pending = self._packed_buffer = None

    def reduce_again(self, divisor: float, contribute: bool) -> None:
        """After `wait`: add what came on some rank since the start."""
        assert self._share is not None
        late, buffer, pending = self._sent(contribute)
        pending.wait()
        self._pool.give(buffer)
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
