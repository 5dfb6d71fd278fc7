"""The wrapper that users train: `smp.DistributedModel`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from shardwright.config.rules import check_tracing
from shardwright.data_parallel.join import Join
from shardwright.engine import full_sharding, placement
from shardwright.engine.accessors import PartAccessors
from shardwright.engine.gradients import Gradients
from shardwright.engine.half_precision import accumulate_in_full, hops, to_half
from shardwright.engine.hooks import Hook, HookHandle, HookList, call_hook
from shardwright.engine.model_state import ModelState
from shardwright.engine.module_manners import ModuleManners
from shardwright.engine.part import Part
from shardwright.engine.recomputation import Recomputation
from shardwright.engine.sharded_state import ShardedState
from shardwright.engine.state import state
from shardwright.engine.step_duties import StepDuties
from shardwright.engine.substitution import distribute
from shardwright.engine.ties import ReplicatedTies
from shardwright.engine.wrapping import check_can_wrap
from shardwright.errors import PartitionError, UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.memory import delayed_init
from shardwright.memory.checkpointing_marks import without_wrappers
from shardwright.partition.build import make_plan
from shardwright.partition.plan import PartitionPlan
from shardwright.pipeline import step as steps
from shardwright.pipeline.pipeline_step import PipelineSteps
from shardwright.pipeline.placed import PlacedTensor, current_frame, native
from shardwright.pipeline.runtime import Runtime
from shardwright.precision.policy import policy_of
from shardwright.topology import context
from shardwright.transport import objects

_log = get_logger(__name__)

StateDict = dict[str, Any]


class DistributedModel(PartAccessors, ModelState, ModuleManners):
    """A model spread over pipeline stages and replicated over data-parallel ranks.

    Made by: every rank of the world, with the same module; one per process. Marked modules are replaced by their
    distributed versions here (see `tensor_parallel.substitute`). With one pipeline stage placement
    and the broadcast from the first data-parallel rank happen here. With more they happen in the first step
    call: a trace on fake tensors, the partition (made on world rank 0, sent to all), placement, deferred
    loads, broadcast, then the post-partition hooks. Non-local parameters stay reachable as placeholders of
    one element on the CPU.

    trace_device, trace_execution_times, trace_memory_usage: accepted; the trace runs on fake tensors.
    overlapping_allreduce: reduce gradients bucket by bucket during backward.
    backward_passes_per_step: gradients add up over this many step calls; the last one reduces.
    average_grads_across_microbatches: mean over microbatches, else their sum.
    bucket_cap_mb: bytes per gradient bucket, MiB.   broadcast_buffers: replica 0's buffers count in each
    step.
    gradient_as_bucket_view: gradients alias the buckets.   find_unused_parameters: accepted; always
    supported.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        world = context.world()
        check_can_wrap(module, DistributedModel, state.model)
        module = without_wrappers(module)
        check_tracing(trace_device, trace_execution_times)
        self._precision = policy_of(world.config)
        with delayed_init.go_on() if delayed_init.has_delayed(module) else nullcontext():
            module = distribute(module)
            self.module = hops(module, self._precision)
        self._settle_delayed(module)
        self._fully_sharded = full_sharding.shard(module)
        self._part = Part(module, world.coordinates.pp, world.table.degrees.pp)
        self._average = average_grads_across_microbatches
        self._when_partitioned: list[Callable[[], object]] = []
        self._optimizers: list[Any] = []
        self._post_partition = HookList(self._call_hook)
        self._gradients = Gradients(
            overlap=overlapping_allreduce,
            passes_per_step=backward_passes_per_step,
            bucket_cap_mb=bucket_cap_mb,
            as_view=gradient_as_bucket_view,
        )
        if self._fully_sharded is not None:
            self._gradients.fully_sharded = full_sharding.make_reducer(
                self._fully_sharded, self._part.distribution, self._gradients.arrive
            )
        self._sharding = ShardedState(self._gradients)
        pipeline = None
        if self._part.num_stages > 1:
            runtime = Runtime(self._part.stage, self._part.num_stages, world.device, placement.PipelineWire())
            runtime.gradient_arrived = self._gradients.arrive
            pipeline = PipelineSteps(runtime, world.config.pipeline, self._scale)
        self._recomputation = Recomputation(self._part, None if pipeline is None else pipeline.runtime)
        self._duties = StepDuties(
            self._part,
            self._gradients,
            pipeline=pipeline,
            broadcast_buffers=broadcast_buffers and world.config.ddp,
            post_step=HookList(self._call_hook),
            before_first_step=self._before_first_step,
            after_reduction=self._hand_out_pieces,
            optimizers=lambda: self._optimizers,
            offloader=self._recomputation.offloader,
        )
        state.model_wrapped(self)
        steps.set_driver(self._duties)
        if pipeline is None:
            self._become_ready(placement.place_whole(module, world.device))

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user module's forward. With pipeline stages only inside a step function."""
        if self._part.num_stages == 1:
            if not steps.step_is_active():
                self._duties.forward_outside()
        elif current_frame() is None:
            if not self._part.gathered:
                raise UsageError(
                    "the model was called outside a step function, but it is split over"
                    f" {self._part.num_stages} pipeline stages",
                    remedy="put the call into a function decorated with @smp.step",
                )
        elif not self._part.settled:
            with native(), context.own_view():
                self._partition(args, kwargs)
        if self._fully_sharded is not None:
            with self._fully_sharded.forward():
                return self.module(*args, **kwargs)
        return self.module(*args, **kwargs)

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Distributed `torch.autograd.backward`, inside a step function; averages over microbatches.

        Called by: every rank of the pipeline group. Several calls per microbatch are allowed.
        Raises: UsageError for retain_graph and create_graph.
        """
        if retain_graph or create_graph:
            raise UsageError(
                "model.backward() does not take retain_graph or create_graph",
                remedy="sum the losses and call model.backward() once",
            )
        self._gradients.generation += 1
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given: list[Any] | None = None
        if grad_tensors is not None:
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        frame = current_frame()
        if frame is None and self._part.num_stages > 1:
            raise UsageError(
                "model.backward() was called outside a step function",
                remedy="call it in the @smp.step function",
            )
        if frame is None:
            self._backward_here(roots, given)
            return
        placed = [root for root in roots if isinstance(root, PlacedTensor)]
        if len(placed) < len(roots):
            raise UsageError(
                "model.backward() was given a tensor that doesn't come from the model",
                remedy="compute the loss from the model's output, inside the step function",
            )
        self._gradients.backward_called()
        self._duties.backward_begins()
        frame.backward(placed, given)

    def _backward_here(self, roots: list[torch.Tensor], given: list[Any] | None) -> None:
        """Backward with one pipeline stage."""
        if steps.step_is_active():
            self._gradients.backward_called()
            self._duties.backward_begins()
        scale = self._scale(self._duties.num_microbatches)
        seeds = []
        for i, root in enumerate(roots):
            seed = given[i] if given is not None else None
            if seed is None and root.numel() != 1:
                raise UsageError(
                    f"model.backward() needs grad_tensors for a tensor of shape {list(root.shape)}",
                    remedy="reduce the loss to one number",
                )
            seeds.append(torch.full_like(root, scale) if seed is None else seed * scale)
        torch.autograd.backward(roots, seeds)

    def _scale(self, num_microbatches: int) -> float:
        """What each microbatch's loss counts, times the loss scale; a communication hook averages by itself."""
        scale: float = math.prod(optimizer._sw_backward_scale for optimizer in self._optimizers)
        return scale / num_microbatches if self._average and not self._gradients.has_comm_hook else scale

    # ------------------------------------------------------------------ partition

    @property
    def partitioned(self) -> bool:
        """True once this rank holds its own part only (with one stage: at once)."""
        return self._part.settled

    def get_module(self) -> nn.Module:
        """The user's module."""
        return self._part.module

    def _partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """First step, on every rank of the world at the same point: plan, place, load, broadcast, hooks."""
        part, pipeline, config = self._part, self._duties.pipeline, context.world().config
        assert pipeline is not None
        if part.plan is None:
            text = ""
            if self._precision is not None:
                args, kwargs = to_half((args, kwargs), self._precision.compute)
            if context.world().rank == 0:
                text = make_plan(part.module, args, kwargs, config=config, pp=part.num_stages).to_json()
            part.plan = PartitionPlan.from_json(objects.broadcast_object(text, "world"))
        self._recomputation.check()
        delayed_init.settle_others(part.module)
        part.remember_names()
        table = placement.place(part.module, part.plan, pipeline.runtime)
        if any(len(entry.stages) > 1 for entry in table):
            self._duties.ties = ReplicatedTies(table)
        if rank_zero():
            _log.info("Partition assignments:\n%s", part.plan.explain(config.microbatches))
        self._become_ready(table)
        self._release_post_partition_hooks()

    def _become_ready(self, table: list[placement.Placed]) -> None:
        """The rank holds its part: optimizer groups, loads that waited, equal copies and replicas."""
        self._part.settle(table)
        delayed_init.forget()
        if context.world().config._fp32_grad_accumulation:
            accumulate_in_full(p for _, p in self._part.parameters())
        self.carry_out_marks()
        ties = self._duties.ties
        trained = [(n, p) for n, p in self._part.parameters() if not self.is_copy(p)]
        scaled = [p for _, p in trained if self._part.distribution.is_scaled(p)]
        self._gradients.attach(trained, ties.owned() if ties is not None else (), scaled)
        for optimizer in self._optimizers:
            optimizer._keep_local()
        waiting, self._when_partitioned = self._when_partitioned, []
        for callback in waiting:
            callback()
        self._duties.level_replicas(always=True)
        self.refresh_copies()
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Weights were loaded or exchanged: what optimizers derive from them follows."""
        for optimizer in self._optimizers:
            optimizer._sw_weights_changed()

    @staticmethod
    def _settle_delayed(module: nn.Module) -> None:
        """Parameters without storage get equal values on all ranks, and other tensors get theirs at once.

        Called by: every rank of the world. Collectives: one small broadcast over it, if there are any.
        """
        delayed_init.settle_others(module)
        if delayed_init.has_delayed(module):
            delayed_init.tape.bases[:] = objects.broadcast_object(delayed_init.tape.bases, "world")

    def carry_out_marks(self) -> None:
        """Modules were marked for activation checkpointing: from now on they are recomputed.

        Called by: every rank of the pipeline group, once its part is settled.
        """
        with native():
            self._recomputation.carry_out()

    def run_when_partitioned(self, callback: Callable[[], None]) -> None:
        """Run `callback` now, or right after partitioning, before the post-partition hooks.

        Called by: every rank of the world; the callback may make collective calls, and may load state.
        """
        if not self.partitioned:
            self._when_partitioned.append(callback)
            return
        callback()
        self.refresh_copies()
        self._weights_changed()

    def refresh_copies(self, *, buffers: bool = True) -> None:
        """Send what several stages hold from its owners. Called by: every rank of the pipeline group."""
        ties = self._duties.ties
        if ties is not None:
            ties.send_all() if buffers else ties.send_weights()

    def _hand_out_pieces(self) -> None:
        """At the end of a step: optimizers hold pieces of what is shared, also of what was covered in this step."""
        if not self._gradients.shards or not self.partitioned:
            return
        self._sharding.is_settled = True
        for optimizer in self._optimizers:
            optimizer._hold_pieces()

    def is_copy(self, parameter: torch.Tensor) -> bool:
        """Is it a replicated parameter that another stage owns, which updates and counts it?"""
        return self._duties.ties is not None and self._duties.ties.is_copy(parameter)

    def copies(self) -> list[nn.Parameter]:
        """The replicated parameters on this rank that another stage owns."""
        return [] if self._duties.ties is None else self._duties.ties.copies()

    def optimizer_loaded(self) -> None:
        """Called by the optimizer's wrapper: a state dict was loaded on this rank."""
        self._duties.optimizer_loaded()

    def restore_plan(self, plan: PartitionPlan) -> None:
        """Use a saved partition instead of making one.

        Raises: PartitionError if it isn't one for this model, or the model is partitioned in another way.
        """
        plan.check(self._part.module)
        present = self._part.plan
        if self.partitioned and present is not None and present.stage_of != plan.stage_of:
            raise PartitionError(
                "the checkpoint was saved with another partition than this model already has",
                remedy="resume before the first step",
            )
        if not self.partitioned:
            self._part.plan = plan

    # ------------------------------------------------------------------ hooks

    def register_post_partition_hook(self, hook: Hook) -> HookHandle:
        """Run `hook(model, optimizer)` after partitioning (at once if that is done); returns a handle.

        With one stage, where partitioning is done at once, it waits for the first of: wrapping an optimizer,
        a step.
        """
        no_optimizer_yet = self._part.num_stages == 1 and not self._optimizers
        waits = not self.partitioned or (no_optimizer_yet and not self._duties.first_step_began)
        return self._post_partition.add(hook, now=not waits)

    def register_post_step_hook(self, hook: Hook) -> HookHandle:
        """Run `hook(model, optimizer)` once, when the first (else the next) step ends; returns a handle."""
        return self._duties.post_step.add(hook, now=False)

    def _before_first_step(self) -> None:
        self._recomputation.check_offloading()
        self._release_post_partition_hooks()

    def _release_post_partition_hooks(self) -> None:
        if self.partitioned:
            self._post_partition.release()

    def _call_hook(self, hook: Hook) -> None:
        call_hook(hook, self, state.optimizer)

    def optimizer_wrapped(self, optimizer: Any) -> None:
        """Called by the optimizer's wrapper: it keeps its local parameters, and hooks that waited run."""
        self._optimizers.append(optimizer)
        if self.partitioned:
            optimizer._keep_local()
            if self._sharding.is_settled:
                optimizer._hold_pieces()
            self._release_post_partition_hooks()

    def register_comm_hook(self, hook_state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce the gradient buckets; it owns averaging over replicas and
        microbatches.

        Raises: UsageError without ddp, without overlapping reduction, with sharded optimizer state, or when there is a
            hook already.
        """
        if not context.world().config.ddp:
            raise UsageError("register_comm_hook() needs data parallelism", remedy='set "ddp": true')
        self._refuse_when_sharded("register_comm_hook()", "gradients are reduced by fully_shard, which takes no hook")
        self._gradients.register_comm_hook(hook_state, hook)

    def _refuse_when_sharded(self, call: str, reason: str) -> None:
        if self._fully_sharded is not None:
            raise UsageError(
                f"{call} with 'sharded_data_parallel_degree' above 1: {reason}",
                remedy="leave it out, or set 'sharded_data_parallel_degree' to 1",
            )

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context manager for data-parallel ranks that run out of batches before others (needs ddp).

        Called by: every rank of the data-parallel group. A replica without any batch at all can't come along
        before the model is partitioned.
        """
        if not context.world().config.ddp:
            raise UsageError("join() needs data parallelism", remedy='set "ddp": true')
        if self._gradients.shards and enable:
            raise UsageError(
                "join() with 'shard_optimizer_state': a replica without batches makes no optimizer step, but others need"
                " the share of the parameters that it updates",
                remedy="give all replicas the same number of batches (drop_last, or a padded sampler)",
            )
        self._refuse_when_sharded("join()", "a rank without a batch would have to gather parameters for the others' forward")
        return self._duties.join(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )
