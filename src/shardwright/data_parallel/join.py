"""Uneven inputs: data-parallel ranks that run out of batches before others do.

    with model.join():
        for batch in loader:          # some ranks have fewer batches
            train_step(model, batch)

Inside, every step begins with a small exchange that tells who still has data. A rank whose loop has ended
stays in the context's exit and takes part in the steps of the others with zeros, until all have ended. Then
the ranks that stopped early receive what training has changed meanwhile: parameters, buffers, optimizer
state.

Unlike torch's DistributedDataParallel.join this also brings the optimizer state along: without it, moments
that missed the last updates would pull equal replicas apart afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal

import torch

from shardwright.data_parallel.reducer import GradientReducer
from shardwright.errors import ShardwrightError, UsageError
from shardwright.log import get_logger
from shardwright.topology import context
from shardwright.transport import collectives

_logger = get_logger(__name__)


class UnevenInputsError(ShardwrightError, RuntimeError):
    """A data-parallel rank has no more batches, and `throw_on_early_termination` asked to stop there."""


class Join:
    """Keeps the collectives of a data-parallel axis matched while ranks run out of data.

    Protocol, on every rank of the axis (the engine makes these calls from the step decorator):
        `on_step_start()`   before any collective of a step. Afterwards `source` is the rank within the axis
                            whose buffers count in this step.
        `reduce(wants)`     once at the end of each step, also of one that doesn't reduce, in place of the
                            reducers' `finish()`.
    In `__exit__` the rank makes the same two calls for the steps of others, and in between
        `shadow_buffers(source)`    the buffer synchronisation of the step's start, if the engine does one,
    and at last, when no rank has data, unless all ended together,
        `final_sync(source)`        parameters, buffers, optimizer state from `source`, a rank that ran the
                                    last step (`sync.broadcast_parameters`, `sync.broadcast_optimizer_state`).
    A step must issue no other collective on this axis. While inside, the reducers don't overlap: whether a
    step reduces is agreed at its end. Ranks of one pipeline group end together, so joining works per stage.
    Not for
    tensor parallelism: its peers exchange activations inside the step, which a rank without data can't.

    reducers: those of this rank; some may be added to the list while inside, during a first step.
    divide_by_initial_world_size: True divides by the full number of replicas, so that every sample weighs the
        same over the epoch; False by the number of ranks that still have data.
    throw_on_early_termination: raise UnevenInputsError on all ranks as soon as one runs out of data.
    enable: False makes the context do nothing.
    """

    def __init__(
        self,
        *,
        reducers: Sequence[GradientReducer],
        final_sync: Callable[[int], None],
        shadow_buffers: Callable[[int], None] | None = None,
        axis: Literal["dp", "rdp"] = "dp",
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
        enable: bool = True,
    ) -> None:
        self._reducers = reducers
        self._paused: list[GradientReducer] = []
        self._final_sync = final_sync
        self._shadow_buffers = shadow_buffers
        self._axis = axis
        self._divide_by_initial = divide_by_initial_world_size
        self._throw = throw_on_early_termination
        self._enable = enable
        self._entered = False
        world = context.world()
        members = world.groups.ranks(axis)
        self._size = len(members)
        self._group_rank = members.index(world.rank)
        self._active = list(range(self._size))
        if enable and world.table.degrees.tp > 1:
            raise UsageError(
                f"join() with tensor_parallel_degree {world.table.degrees.tp}: a rank without data cannot "
                "take part in the exchange of activations",
                remedy="give all ranks the same number of batches (drop_last, or a padded sampler)",
            )

    @property
    def is_open(self) -> bool:
        """True between enter and exit, unless it was made with `enable=False`."""
        return self._entered

    @property
    def source(self) -> int:
        """The lowest rank within the axis that has data in the current step."""
        return self._active[0]

    @property
    def num_active(self) -> int:
        """How many ranks of the axis have data in the current step."""
        return len(self._active)

    def __enter__(self) -> Join:
        if self._enable:
            self._entered = True
            self._pause_overlap()
        return self

    def _pause_overlap(self) -> None:
        """Reducers that appear while inside (a model partitioned in its first step) are paused in time, too."""
        for reducer in self._reducers:
            if reducer.overlap:
                reducer.overlap = False
                self._paused.append(reducer)

    def on_step_start(self) -> None:
        """Tell the others that this rank has data for one more step.

        Collectives: one all-reduce of as many numbers as the axis has ranks.
        Raises: UnevenInputsError if a rank has ended and `throw_on_early_termination` is set.
        """
        if self._entered:
            self._pause_overlap()
            self._exchange_active(has_data=True)

    def reduce(self, wants: bool) -> bool:
        """Reduce the gradients of this step if any rank wants to; return whether that was done.

        Collectives: one all-reduce of one number, then those of the reducers' `finish`.
        """
        return self._reduce(wants, contribute=True)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._entered:
            return
        try:
            if exc_type is None:
                self._shadow()
        finally:
            self._entered = False
            for reducer in self._paused:
                reducer.overlap = True
            self._paused.clear()

    def _shadow(self) -> None:
        """Take part in the steps of the ranks that still have data, then receive their state."""
        shadowed = 0
        source = self.source
        all_ended_together = len(self._active) == self._size
        while self._exchange_active(has_data=False):
            shadowed += 1
            source = self.source
            all_ended_together = False
            if self._shadow_buffers is not None:
                self._shadow_buffers(source)
            self._reduce(wants=False, contribute=False)
        if shadowed:
            _logger.info("no more batches on this rank; took part in %d further steps with zeros", shadowed)
        if not all_ended_together:
            self._final_sync(source)

    def _reduce(self, wants: bool, contribute: bool) -> bool:
        if self._entered:
            flag = torch.tensor([int(wants)], dtype=torch.int32)
            collectives.all_reduce(flag, self._axis, op="max")
            wants = bool(flag.item())
        if wants:
            for reducer in self._reducers:
                divisor = reducer.average_over
                if self._entered and not self._divide_by_initial:
                    divisor = divisor * self.num_active // self._size
                reducer.finish(average_over=divisor, contribute=contribute)
        return wants

    def _exchange_active(self, has_data: bool) -> bool:
        """Learn who has data for the step that begins now; False if nobody has."""
        marks = torch.zeros(self._size, dtype=torch.int32)
        marks[self._group_rank] = int(has_data)
        collectives.all_reduce(marks, self._axis, op="sum")
        active = marks.nonzero().flatten().tolist()
        if self._throw and 0 < len(active) < self._size:
            ranks = context.world().groups.ranks(self._axis)
            ended = [ranks[i] for i in range(self._size) if i not in active]
            raise UnevenInputsError(
                f"ranks {ended} have no more batches, {len(active)} of {self._size} replicas have",
                remedy="give every replica the same number of batches, or drop throw_on_early_termination",
            )
        if active:
            self._active = active
        return bool(active)
