"""Gradient reduction over equal replicas, bucket by bucket, while backward still runs.

Note [Reduction order]: every rank starts the same reductions in the same order: bucket 0, 1, 2, ... of the
plan, then one vector of counts, then a second reduction of the buckets that some rank found changed. A bucket
whose gradients are all ready waits until every earlier bucket has been started. What a rank does not have at
the end of the step counts as zero. Nothing that is known to one rank alone decides whether a reduction takes
place.

Note [Counts]: one int32 vector per step says how many ranks had a gradient for each parameter, and how many
ranks got a gradient after its bucket had been started. It is reduced once, after the last bucket, in a buffer
of its own on the CPU: inside fp16 or bf16 buckets counts above 256 would be rounded, and on a GPU reading
them would stop the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.data_parallel.buckets import MIB, TensorInfo, gradient_dtype, plan_buckets
from shardwright.data_parallel.comm_hook import CommHook, HookBucket, Waitable
from shardwright.data_parallel.live_bucket import LiveBucket, ReplicatedBucket
from shardwright.errors import UsageError
from shardwright.topology import context
from shardwright.transport import collectives

ReplicaAxis = Literal["dp", "rdp"]


class GradientReducer:
    """Makes the gradients of equal replicas equal: their mean over all data.

    Calls of one step, in order, on every rank of the axis:
        `ready(param)`   any number of times, in any order, on any subset of the parameters: the gradient of
                         this step is complete. Starts buckets; never waits.
        `finish()`       once: reduces the rest, waits, writes `.grad`.
    A step that does not reduce (forward only, or not the last of `backward_passes_per_step`) calls neither.
    After a step that raised, `abandon()` puts the reducer back.
    Between the start of a bucket and `finish()` the reduction owns the bucket's memory; with
    `gradient_as_bucket_view` the parameters' `.grad` is None in that time.

    A gradient that changes after its bucket was started (`ready` called again, `late`, or simply found
    changed in `finish()`) makes that bucket reduce a second time, on all ranks; the result is exact.

    overlap: may be switched between steps, on all ranks alike; False makes `ready` only take note.

    After `finish()`: a parameter that had a gradient on some rank has the same one on all ranks, bit for bit:
    the sum over the axis divided by `average_over`. One that had a gradient nowhere keeps None.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        axis: ReplicaAxis,
        average_over: int,
        bucket_cap_mb: float = 25,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        comm_hook: CommHook | None = None,
    ) -> None:
        """Take note of the parameters; nothing is allocated or sent before the first reduction.

        named_parameters: those that this rank holds, in the same order on every rank of the axis. A parameter
            with several names counts once; frozen ones are left out until they require a gradient.
        axis: "dp", or "rdp" for parameters of distributed modules.
        average_over: what the sum is divided by. Not always the size of the axis: a gradient that already
            holds the sum over tp ranks is summed over rdp and divided by the dp size (semantics 2.5).
        bucket_cap_mb: bytes per bucket in MiB; the first bucket is at most 1 MiB.
        overlap: False reduces everything in `finish()`.
        gradient_as_bucket_view: `.grad` is a view of the bucket, which saves one copy of all gradients.
        comm_hook: reduces buckets in place of the library, see `register_comm_hook`.
        """
        unique: dict[int, tuple[str, Parameter]] = {}
        for name, parameter in named_parameters:
            unique.setdefault(id(parameter), (name, parameter))
        self._named = list(unique.values())
        self._axis: ReplicaAxis = axis
        self.average_over = average_over
        self._cap_bytes = int(bucket_cap_mb * MIB)
        self.overlap = overlap
        self._as_view = gradient_as_bucket_view
        self._hook: CommHook | None = None
        self._planned_for: list[tuple[bool, torch.dtype, torch.device]] | None = None
        self._buckets: list[LiveBucket] = []
        self._home: dict[int, LiveBucket] = {}
        self._begun = False
        self._num_started = 0
        self._alone = len(context.world().groups.ranks(axis)) == 1
        if comm_hook is not None:
            self.register_comm_hook(comm_hook.state, comm_hook.hook)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], torch.futures.Future[Any]]) -> None:
        """Let `hook(state, bucket)` reduce the buckets. It owns averaging over replicas and microbatches.

        Called by: every rank of the axis, before a step's first gradient.
        Raises: UsageError without overlap, during a reduction, or when there is a hook already.
        """
        if not self.overlap:
            raise UsageError(
                "a communication hook needs overlapping gradient reduction, which is off",
                remedy="pass overlapping_allreduce=True to smp.DistributedModel",
            )
        if self._hook is not None:
            raise UsageError("a communication hook is registered already", remedy="register one hook, once")
        if not callable(hook):
            raise UsageError(f"the communication hook is {type(hook).__name__}, expected a callable")
        if self._num_started:
            raise UsageError("a communication hook was registered in the middle of a step")
        self._hook = CommHook(state, hook)

    def ready(self, parameter: Parameter) -> None:
        """Say that a parameter's gradient of this step is complete.

        Called by: the pipeline, on whatever rank and in whatever order; from one thread at a time.
        Collectives: starts the reduction of buckets that are complete, see Note [Reduction order].
        Raises: UsageError for a parameter that is not reduced here.
        """
        self._begin()
        bucket = self._home.get(id(parameter))
        if bucket is None:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} is not reduced over {self._axis}: it was "
                "frozen or unknown when the step began"
            )
        if bucket.started:
            bucket.changed = True
            return
        bucket.waiting_for.discard(id(parameter))
        if self.overlap and not (self._alone and self._hook is None):
            while self._num_started < len(self._buckets) and not self._buckets[self._num_started].waiting_for:
                self._start_next(contribute=True)

    def late(self, parameter: Parameter) -> None:
        """Say that a gradient changed after `ready`; the same as calling `ready` once more."""
        self.ready(parameter)

    def finish(self, *, average_over: int | None = None, contribute: bool = True) -> None:
        """Reduce what is left, wait for everything, and write the parameters' `.grad`.

        Called by: every rank of the axis, once at the end of a step that reduces.
        Collectives: one all-reduce per bucket that is not started yet, one of the counts, one per changed
            bucket.
        average_over: divisor for this step instead of the usual one.
        contribute: False takes part with zeros and leaves this rank's `.grad` alone: for a rank that has run
            out of data (see `join`). With `gradient_as_bucket_view` its `.grad` becomes None.
        Raises: what a broken or timed-out collective raises; then call `abandon()`.
        """
        self._begin()
        divisor = self.average_over if average_over is None else average_over
        if self._hook is not None:
            divisor = 1
        elif self._alone and divisor == 1:
            return self._rest()
        if not self._buckets:  # nothing trainable here, on any rank of the axis
            return self._rest()
        with torch.no_grad():
            while self._num_started < len(self._buckets):
                self._start_next(contribute=contribute)
            counts = self._counts(contribute)
            pending_counts = collectives.all_reduce(counts, self._axis, async_op=True) or _Done()
            for bucket in self._buckets:
                bucket.wait(divisor / bucket.divided_by)
            pending_counts.wait()
            had_gradient, changed = self._read(counts)
            for bucket, again in zip(self._buckets, changed, strict=True):
                if again:
                    bucket.reduce_again(divisor / bucket.divided_by, contribute)
            if contribute:
                for bucket, had in zip(self._buckets, had_gradient, strict=True):
                    bucket.write_back(had, divisor / bucket.divided_by)
        self._rest()

    def abandon(self) -> None:
        """Forget the step under way, after an error. Gradients of that step are undefined.

        Called by: any rank, alone. Collectives: none. Buffers that a reduction may still write to are let go.
        """
        self._planned_for = None
        self._rest()

    def _begin(self) -> None:
        """At the first call of a step: plan the buckets, if parameters were (un)frozen, moved or cast."""
        if self._begun:
            return
        self._begun = True
        planned_for = [(p.requires_grad, gradient_dtype(p), p.device) for _, p in self._named]
        if planned_for == self._planned_for:
            return
        self._planned_for = planned_for
        named = [(n, p) for n, p in self._named if p.requires_grad]
        plan = plan_buckets(
            [TensorInfo.of_gradient(n, p) for n, p in named],
            cap_bytes=self._cap_bytes,
            first_cap_bytes=min(MIB, self._cap_bytes),
            reverse=True,
        )
        num_ranks = len(context.world().groups.ranks(self._axis))
        shares = num_ranks if num_ranks > 2 else 1  # see `collectives.all_reduce_in_order`
        self._work_on(
            [
                ReplicatedBucket(b, [named[s.position][1] for s in b.slots], self._as_view, self._reduction, shares)
                for b in plan
            ]
        )

    def _work_on(self, buckets: Sequence[LiveBucket]) -> None:
        """Reduce these buckets from now on."""
        self._buckets = list(buckets)
        self._home = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}

    def _rest(self) -> None:
        self._begun = False
        self._num_started = 0
        for bucket in self._buckets:
            bucket.rest()

    def _start_next(self, *, contribute: bool) -> None:
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        half = gradient_dtype(bucket.parameters[0]) is torch.float16
        bucket.divided_by = self.average_over if half and self._hook is None else 1
        with torch.no_grad():
            bucket.start(contribute)

    def _reduction(self, bucket: LiveBucket, flat: Tensor, views: Sequence[Tensor]) -> Waitable:
        """Start the reduction of one flat buffer that belongs to `bucket`."""
        if self._hook is not None:
            last = bucket.plan.index == len(self._buckets) - 1
            gradients = flat[: bucket.plan.num_elements]
            seen = HookBucket(bucket.plan.index, gradients, views, bucket.parameters, last)
            return self._hook.start(seen, context.world().config.timeout_s)
        return collectives.all_reduce_in_order(flat, self._axis, async_op=True) or _Done()

    def _counts(self, contribute: bool) -> Tensor:
        """What this rank adds to the counts, see Note [Counts]: each bucket's parameters, then the bucket."""
        mine: list[bool] = []
        for bucket in self._buckets:
            had, changed = bucket.count() if contribute else ([False] * len(bucket.parameters), False)
            mine += [*had, changed]
        return torch.tensor(mine, dtype=torch.int32)

    def _read(self, counts: Tensor) -> tuple[list[list[bool]], list[bool]]:
        """Return for each bucket which parameters had a gradient on some rank; and which buckets changed."""
        positive = iter((counts > 0).tolist())
        had_gradient, changed = [], []
        for bucket in self._buckets:
            had_gradient.append([next(positive) for _ in bucket.parameters])
            changed.append(next(positive))
        return had_gradient, changed


class _Done:
    """The reduction over an axis of one rank."""

    def wait(self) -> None: ...
