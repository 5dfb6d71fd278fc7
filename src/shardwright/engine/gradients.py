"""When gradients are reduced over data-parallel replicas: the reducer, fed from the parameters' own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel import sync
from shardwright.data_parallel.join import Join
from shardwright.data_parallel.reducer import GradientReducer
from shardwright.pipeline.tape import in_parts
from shardwright.topology import context

Named = tuple[str, torch.Tensor]


class Gradients:
    """The gradients of this rank's part of the model, over the data-parallel axis.

    A parameter's gradient is complete when it has arrived as often as in the step before; the reducer then starts
    full buckets while backward goes on. Where a step differs, the end of the step makes it right.

    In order, per step: `step_begins`, any number of `backward_called`, then `step_ends` or `abandon`.
    """

    def __init__(self, *, overlap: bool, passes_per_step: int, bucket_cap_mb: float, as_view: bool) -> None:
        self._overlap = overlap
        self._passes_per_step = passes_per_step
        self._bucket_cap_mb = bucket_cap_mb
        self._as_view = as_view
        self._reducer: GradientReducer | None = None
        self._comm_hook: tuple[object, Callable[..., Any]] | None = None
        self._num_passes = 0
        self._in_step = False
        self._arrived: dict[nn.Parameter, int] = {}
        self._expected: dict[nn.Parameter, int] = {}
        self.has_gradients = False

    def attach(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Watch this rank's parameters; makes the reducer if there are replicas."""
        world = context.world()
        num_replicas = world.size // world.table.degrees.pp
        if not world.config.ddp or num_replicas == 1:
            return
        self._reducer = GradientReducer(
            parameters,
            axis="dp",
            average_over=num_replicas,
            bucket_cap_mb=self._bucket_cap_mb,
            overlap=self._overlap,
            gradient_as_bucket_view=self._as_view,
        )
        if self._comm_hook is not None:
            self._reducer.register_comm_hook(*self._comm_hook)
        for _, parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrive)

    def register_comm_hook(self, hook_state: object, hook: Callable[..., Any]) -> None:
        if self._reducer is None:
            self._comm_hook = (hook_state, hook)
        else:
            self._reducer.register_comm_hook(hook_state, hook)

    def broadcast(self, tensors: Iterable[Named], source: int = 0) -> None:
        """Give all replicas the parameters and buffers of one."""
        sync.broadcast_parameters(tensors, "dp", source=source)

    def sync_buffers(self, buffers: Iterable[Named], source: int) -> None:
        """Give all replicas the buffers of one."""
        if self._reducer is not None:
            sync.sync_buffers(buffers, "dp", source=source)

    @property
    def reducers(self) -> list[GradientReducer]:
        """What reduces this rank's gradients; none without replicas."""
        return [] if self._reducer is None else [self._reducer]

    # ------------------------------------------------------------------ a step

    def step_begins(self) -> None:
        self._in_step = True
        self.has_gradients = False
        self._arrived.clear()

    def backward_called(self) -> None:
        self.has_gradients = True

    def arrive(self, parameter: nn.Parameter) -> None:
        """A parameter's `.grad` has grown: by one call, or by all calls of a microbatch that share it."""
        if id(parameter) in in_parts:
            return
        if not self._in_step or self._reducer is None or self._num_passes + 1 < self._passes_per_step:
            return
        count = self._arrived.get(parameter, 0) + 1
        self._arrived[parameter] = count
        if count >= self._expected.get(parameter, 1 << 60):
            self._reducer.ready(parameter)

    def step_ends(self, join: Join | None) -> None:
        """Reduce what is left, if this step had a backward and is the last of its passes."""
        self._in_step = False
        wants = False
        if self.has_gradients:
            self._num_passes += 1
            wants = self._num_passes == self._passes_per_step
        if join is not None and self._reducer is not None:
            if not join.reduce(wants):
                return
        elif not wants:
            return
        elif self._reducer is not None:
            self._reducer.finish()
        self._num_passes = 0
        self._expected = dict(self._arrived)

    def abandon(self) -> None:
        """The step failed: forget what it had begun."""
        self._in_step = False
        if self._reducer is not None:
            self._reducer.abandon()
