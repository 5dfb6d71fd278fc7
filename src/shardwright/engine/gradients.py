"""When gradients are reduced over data-parallel replicas: the reducers, fed from the parameters' own hooks.

Note [Two reductions]: a parameter that acts on the samples of its whole tp group has a gradient that holds the sum over
the tp ranks' losses already (with `prescaled_batch`, where tp ranks have the same samples, that of the one loss). It is
summed over rdp and divided by the number of losses: the dp size, with `prescaled_batch` the rdp size. Every other
parameter's gradient is the mean over dp.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.fully_sharded_pieces import FullyShardedPieces
from shardwright.data_parallel.fully_sharded_reducer import FullyShardedReducer
from shardwright.data_parallel.join import Join
from shardwright.data_parallel.optimizer_state import ShardedParameters
from shardwright.data_parallel.reducer import GradientReducer, ReplicaAxis
from shardwright.data_parallel.sharded_reducer import ShardedReducer
from shardwright.errors import UsageError
from shardwright.pipeline.tape import in_parts
from shardwright.topology import context

CommHook = Callable[[Any, Any], Any]


class Gradients:
    """The gradients of this rank's part of the model, over the data-parallel axes.

    A parameter's gradient is complete when it has arrived as often as in the step before; the reducer then
    starts full buckets while backward goes on. Where a step differs, the end of the step makes it right.

    In order, per step: `step_begins`, any number of `backward_called`, then `step_ends` or `abandon`.
    Backward outside of steps (with one pipeline stage) counts as a step of its own, after which `plain_backward_ended`
    is called.

    generation: grows with every backward, so that those who keep something of gradients know that they are others now.
    """

    def __init__(self, *, overlap: bool, passes_per_step: int, bucket_cap_mb: float, as_view: bool) -> None:
        self._overlap = overlap
        self._passes_per_step = passes_per_step
        self._bucket_cap_mb = bucket_cap_mb
        self._as_view = as_view
        self._parameters: list[tuple[str, nn.Parameter]] | None = None
        self._reduced_early: set[int] = set()
        self._scaled: set[int] = set()
        self._reducer_of: dict[int, GradientReducer] = {}
        self._comm_hook: tuple[object, CommHook] | None = None
        self._num_passes = 0
        self._in_step = False
        self._in_plain_backward = False
        self._arrived: dict[nn.Parameter, int] = {}
        self._expected: dict[nn.Parameter, int] = {}
        self.has_gradients = False
        self.generation = 0
        self.reducers: list[GradientReducer] = []
        self.plain_backward_ended: Callable[[], None] = lambda: None
        self.fully_sharded: FullyShardedReducer | None = None

    @property
    def has_comm_hook(self) -> bool:
        """Does a hook of the script reduce the buckets, and average them?"""
        return self._comm_hook is not None

    @property
    def shards(self) -> bool:
        """Is optimizer state to be sharded? Known before the reducers are made."""
        world = context.world()
        return world.config.shard_optimizer_state and world.size > world.table.degrees.pp

    def attach(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        changed_late: Collection[nn.Parameter] = (),
        scaled: Collection[nn.Parameter] = (),
    ) -> None:
        """Watch the parameters that this rank updates from now on.

        changed_late: those of them to whose gradients something is added after backward.
        scaled: those that act on the samples of the whole tp group.
        """
        self._parameters = list(parameters)
        self._reduced_early = {id(p) for _, p in parameters} - {id(p) for p in changed_late}
        self._scaled = {id(p) for p in scaled}
        self._make_reducers()
        if self._in_step:
            self._prepare()

    @property
    def sharded(self) -> Sequence[ShardedParameters | FullyShardedPieces]:
        """Parameters in pieces, for each axis over which optimizer state, or the parameters too, are sharded."""
        if self.fully_sharded is not None:
            return [self.fully_sharded.sharded]
        return [reducer.sharded for reducer in self.reducers if isinstance(reducer, ShardedReducer)]

    def _prepare(self) -> None:
        """Between steps: what requires a gradient by now, and is to be in pieces, is put there."""
        for reducer in self.reducers:
            if isinstance(reducer, ShardedReducer):
                reducer.prepare()

    def register_comm_hook(self, hook_state: object, hook: CommHook) -> None:
        """Let `hook(hook_state, bucket)` reduce the buckets.

        Raises: UsageError without overlap, twice, with tensor parallelism, where there is no one average, or with
        sharded optimizer state.
        """
        if self.shards:
            raise UsageError(
                "register_comm_hook() with 'shard_optimizer_state': gradients are reduced to their owners only, and a"
                " hook reduces them for all ranks",
                remedy="leave the reduction to the library, or switch 'shard_optimizer_state' off",
            )
        if context.world().table.degrees.tp > 1:
            raise UsageError(
                "register_comm_hook() with tensor parallelism: parameters of distributed modules are reduced over"
                " another group, and averaged otherwise, than the rest, which a hook can't know",
                remedy="leave the reduction to the library",
            )
        if not self._overlap:
            raise UsageError(
                "register_comm_hook() needs overlapping gradient reduction, which is off",
                remedy="pass overlapping_allreduce=True to smp.DistributedModel",
            )
        if self._comm_hook is not None:
            raise UsageError("a communication hook is registered already", remedy="register one hook, once")
        for reducer in self.reducers:
            reducer.register_comm_hook(hook_state, hook)
        self._comm_hook = (hook_state, hook)
        self._make_reducers()

    def _make_reducers(self) -> None:
        """Reducers where there are replicas to reduce over, or a hook that wants to see the buckets."""
        world = context.world()
        num_replicas = world.size // world.table.degrees.pp
        wanted = world.config.ddp and (num_replicas > 1 or self._comm_hook is not None)
        if self._parameters is None or self.reducers or self.fully_sharded is not None or not wanted:
            return
        scaled = [(n, p) for n, p in self._parameters if id(p) in self._scaled]
        others = [(n, p) for n, p in self._parameters if id(p) not in self._scaled]
        if others or not scaled:
            self._make_reducer(others, "dp", num_replicas)
        if scaled:
            losses = world.table.degrees.rdp if world.config.prescaled_batch else num_replicas
            self._make_reducer(scaled, "rdp", losses)
        for _, parameter in self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrive)  # type: ignore[no-untyped-call]

    def _make_reducer(self, parameters: list[tuple[str, nn.Parameter]], axis: ReplicaAxis, average_over: int) -> None:
        options: dict[str, Any] = {
            "axis": axis,
            "average_over": average_over,
            "bucket_cap_mb": self._bucket_cap_mb,
            "overlap": self._overlap,
        }
        world = context.world()
        if world.config.shard_optimizer_state and len(world.groups.ranks(axis)) > 1:
            reducer: GradientReducer = ShardedReducer(parameters, **options)
        else:
            reducer = GradientReducer(parameters, gradient_as_bucket_view=self._as_view, **options)
        if self._comm_hook is not None:
            reducer.register_comm_hook(*self._comm_hook)
        self.reducers.append(reducer)
        self._reducer_of.update((id(p), reducer) for _, p in parameters)

    # ------------------------------------------------------------------ a step

    def step_begins(self) -> None:
        """Before the first microbatch."""
        self._in_step = True
        self.has_gradients = False
        self._arrived.clear()
        self._prepare()

    def forward_outside(self) -> None:
        """A forward outside of steps; a backward outside that raised is forgotten."""
        if self._in_plain_backward:
            self.abandon()
        self._prepare()

    def backward_called(self) -> None:
        """The script called for a backward."""
        self.has_gradients = True

    def arrive(self, parameter: nn.Parameter) -> None:
        """A parameter's `.grad` has grown: by one call, or by all calls of a microbatch that share it."""
        if id(parameter) in in_parts:
            return
        if not self._in_step and not self._in_plain_backward:
            self._plain_backward_begins()
        self.has_gradients = True
        if self._num_passes + 1 < self._passes_per_step or id(parameter) not in self._reduced_early:
            return
        count = self._arrived.get(parameter, 0) + 1
        self._arrived[parameter] = count
        if count >= self._expected.get(parameter, 1 << 60):
            reducer = self._reducer_of.get(id(parameter))
            if reducer is not None:
                reducer.ready(parameter)

    def _plain_backward_begins(self) -> None:
        """A `loss.backward()` outside of steps reduces when autograd is done with it."""
        self._in_plain_backward = True
        self.generation += 1
        self._arrived.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._plain_backward_ends)

    def _plain_backward_ends(self) -> None:
        self._in_plain_backward = False
        self.step_ends(None)
        self.has_gradients = False
        self.plain_backward_ended()

    def step_ends(self, join: Join | None) -> None:
        """Reduce what is left, if this step had a backward and is the last of its passes."""
        self._in_step = False
        if self.fully_sharded is not None:
            self.fully_sharded.rest()
        wants = False
        if self.has_gradients:
            self._num_passes += 1
            wants = self._num_passes == self._passes_per_step
        if join is not None:
            if not join.reduce(wants):
                return
        elif not wants:
            return
        else:
            for reducer in self.reducers:
                reducer.finish()
            if self.fully_sharded is not None:
                self.fully_sharded.finish()
        self._num_passes = 0
        self._expected = dict(self._arrived)

    def abandon(self) -> None:
        """The step failed: forget what it had begun."""
        self._in_step = self._in_plain_backward = False
        for reducer in self.reducers:
            reducer.abandon()
        if self.fully_sharded is not None:
            self.fully_sharded.abandon()
