"""What the engine does around each step: equal replicas before it, reduced gradients and hooks after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.checkpoint.layout import StateRole
from shardwright.data_parallel import sync
from shardwright.data_parallel.join import Join
from shardwright.engine.gradients import Gradients
from shardwright.engine.hooks import HookList
from shardwright.engine.part import Part
from shardwright.engine.replicas import Replicas
from shardwright.engine.ties import ReplicatedTies
from shardwright.errors import CheckpointError, UsageError
from shardwright.memory.activation_offload import Offloader
from shardwright.pipeline.pipeline_step import PipelineSteps
from shardwright.topology import context
from shardwright.transport import collectives

PARTS: tuple[StateRole, StateRole] = "model", "optimizer"


class StepDuties:
    """The wrapped model's side of `pipeline.step.Driver`.

    post_step: hooks for the end of the first (else the next) step.   before_first_step: called once.
    after_reduction: called when the gradients of a step are where they belong.
    optimizers: the wrapped optimizers.
    offloader: what moves activations to the host and back, if something does.

    half_loaded: "model", "optimizer": what a load has overwritten in part, or is about to.

    Loaded replicas: state dicts may be loaded on one replica only (those with rdp_rank() == 0). Replicas tell
    each other at the start of a training step whether anything was loaded since the last one; if so, all take
    over the parameters, buffers and optimizer state of replica 0.
    """

    def __init__(
        self,
        part: Part,
        gradients: Gradients,
        *,
        pipeline: PipelineSteps | None,
        broadcast_buffers: bool,
        post_step: HookList,
        before_first_step: Callable[[], None],
        after_reduction: Callable[[], None],
        optimizers: Callable[[], list[Any]],
        offloader: Offloader | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.num_microbatches = 1
        self.first_step_began = False
        self.ties: ReplicatedTies | None = None
        self._part = part
        self._replicas = Replicas(part)
        self._gradients = gradients
        self._broadcast_buffers = broadcast_buffers
        self.post_step = post_step
        self._before_first_step = before_first_step
        self._after_reduction = gradients.plain_backward_ended = after_reduction
        self._optimizers = optimizers
        self._offloader = offloader
        self._join: Join | None = None
        self._may_train = True
        self._loaded_model = False
        self._loaded_optimizer = False
        self.half_loaded: set[StateRole] = set()

    # ------------------------------------------------------------------ pipeline.step.Driver

    def step_begins(self) -> None:
        """Before the first microbatch, on every rank."""
        if self._part.gathered:
            raise UsageError("a step was called after model.cpu(), which ended the training of this model")
        if not self._tells_replicas():
            self.check_loaded()
        if not self.first_step_began:
            self.first_step_began = True
            self._before_first_step()
        self._gradients.step_begins()
        self._meet_replicas()

    def microbatch_begins(self, index: int, num_microbatches: int) -> None:
        """Before each microbatch; with pipeline stages on the microbatch's own thread."""
        self.num_microbatches = num_microbatches
        if self._offloader is not None:
            self._offloader.begin(index)

    def backward_begins(self) -> None:
        """A microbatch of a step calls backward, on its thread."""
        if self._offloader is not None:
            self._offloader.backward_begins()

    def step_ends(self) -> None:
        """After the last microbatch, on every rank."""
        if self.ties is not None and self._gradients.has_gradients:
            self.ties.reduce_gradients()
        self._gradients.step_ends(self._join if self._may_train else None)
        self._forget_microbatches()
        self._after_reduction()
        self.post_step.release()

    def step_failed(self) -> None:
        """The step raised; nothing of it may be left for the next one."""
        self._gradients.abandon()
        self._forget_microbatches()

    def _forget_microbatches(self) -> None:
        self.num_microbatches = 1
        if self._offloader is not None:
            self._offloader.clear()

    # ------------------------------------------------------------------ replicas

    def forward_outside(self) -> None:
        """A forward outside of steps, with one pipeline stage: what a step does at its start."""
        if not self._tells_replicas():
            self.check_loaded()
        self._gradients.forward_outside()
        self._meet_replicas()

    def check_loaded(self) -> None:
        """Raises: CheckpointError if the last load stopped halfway."""
        if self.half_loaded:
            raise CheckpointError(
                f"the state of the {' and '.join(sorted(self.half_loaded))} was overwritten in part by a load that failed",
                remedy="load a checkpoint that is whole, or build model and optimizer anew",
            )

    def _tells_replicas(self) -> bool:
        """Does `level_replicas` come, which checks for all of them whether the last load stopped halfway?"""
        joined = self._join is not None and self._join.is_open
        return torch.is_grad_enabled() and self._part.settled and not joined and _num_replicas() > 1

    def _meet_replicas(self) -> None:
        """Before a step that may train. Without gradients replicas may make different numbers of steps."""
        self._may_train = torch.is_grad_enabled()
        if not self._may_train:
            return
        if self._join is not None:
            self._join.on_step_start()
        if not self._part.settled:
            return
        self.meet_to_save()
        self._sync_buffers(self._join.source if self._join is not None else 0)

    def meet_to_save(self) -> None:
        """Make replicas equal, unless they are in `join`, where they meet at its end."""
        if self._part.settled and (self._join is None or not self._join.is_open):
            self.level_replicas()

    def level_replicas(self, *, always: bool = False) -> None:
        """Make replicas equal again if a state dict was loaded on any of them, see the class.

        always: give the model of replica 0 to all in any case.
        Raises: CheckpointError on all of them if a load stopped halfway on one, and replica 0 has not loaded anew since.
        """
        if _num_replicas() == 1:
            return
        at = context.world()
        mine = [self._loaded_model, self._loaded_optimizer]
        half = [part in self.half_loaded for part in PARTS]
        given = [part and at.coordinates.rdp == 0 for part in half]
        flags = torch.tensor([*mine, *(not loaded for loaded in mine), *half, *given], dtype=torch.int32)
        collectives.all_reduce(flags, "dp", op="max")
        model_loaded, optimizer_loaded, *told = flags.tolist()
        not_loaded, half, given = told[:2], told[2:4], told[4:]
        is_sharded = at.table.degrees.sdp > 1
        if is_sharded:
            self._check_all_loaded((model_loaded, optimizer_loaded), not_loaded)
        loaded = (model_loaded, optimizer_loaded)
        left = [mark if not here or is_sharded else of_0 for here, mark, of_0 in zip(loaded, half, given, strict=True)]
        self.half_loaded = {part for part, mark in zip(PARTS, left, strict=True) if mark}
        self.check_loaded()
        optimizer_loaded = optimizer_loaded and not is_sharded
        if model_loaded or always:
            self._replicas.broadcast()
        if optimizer_loaded:
            for optimizer in self._optimizers():
                optimizer._level_replicas()
        if model_loaded:
            self._weights_changed()
        self._loaded_model = self._loaded_optimizer = False

    @staticmethod
    def _check_all_loaded(somewhere: Sequence[int], not_everywhere: Sequence[int]) -> None:
        """With sharded parameters one rank can't give the others what it loaded: it has kept its shards only."""
        for what, loaded, missing in zip(("model", "optimizer"), somewhere, not_everywhere, strict=True):
            if loaded and missing:
                raise UsageError(
                    f"a state dict was loaded into the {what} on some data-parallel ranks only, but with sharded data"
                    " parallelism every rank loads its own shards",
                    remedy=f"call {what}.load_state_dict() on every rank",
                )

    def model_loaded(self, *, whole: bool) -> None:
        """A state dict was loaded into this rank's part of the model. whole: nothing of it was missing."""
        self._loaded_model = True
        if whole:
            self.half_loaded.discard("model")

    def optimizer_loaded(self) -> None:
        """A state dict was loaded into this rank's part of the optimizer."""
        self._loaded_optimizer = True
        self.half_loaded.discard("optimizer")

    def _sync_buffers(self, source: int) -> None:
        if self._broadcast_buffers and (self._gradients.reducers or self._gradients.fully_sharded is not None):
            self._replicas.sync_buffers(source)

    def join(self, *, divide_by_initial_world_size: bool, enable: bool, throw_on_early_termination: bool) -> Join:
        """Begin a training loop in which replicas may run out of batches at different times."""
        self._join = Join(
            reducers=self._gradients.reducers,
            final_sync=self._final_sync,
            shadow_buffers=self._shadow_step,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
            enable=enable,
        )
        return self._join

    def _shadow_step(self, source: int) -> None:
        self._part.demand_settled("the first step of others can't be joined by a replica that has no batch at all")
        self._sync_buffers(source)

    def _final_sync(self, source: int) -> None:
        self._replicas.broadcast(source)
        for optimizer in self._optimizers():
            sync.broadcast_optimizer_state(optimizer._in_torch_form(), "dp", source=source)
        self._weights_changed()

    def _weights_changed(self) -> None:
        for optimizer in self._optimizers():
            optimizer._sw_weights_changed()


def _num_replicas() -> int:
    """Ranks that hold copies of anything."""
    degrees = context.world().table.degrees
    return degrees.rdp * degrees.tp
