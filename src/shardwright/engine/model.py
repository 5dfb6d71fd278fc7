"""The wrapper that users train: `smp.DistributedModel`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.state import PARTIAL_MARK, TensorRow, dtype_name
from shardwright.config.rules import check_supported, check_tracing
from shardwright.data_parallel import sync
from shardwright.data_parallel.join import Join
from shardwright.engine import placement
from shardwright.engine.gradients import Gradients
from shardwright.engine.hooks import HookList
from shardwright.engine.placement import Placed
from shardwright.engine.state import state
from shardwright.engine.ties import ReplicatedTies
from shardwright.errors import PartitionError, UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.partition.build import make_plan
from shardwright.partition.plan import PartitionPlan
from shardwright.pipeline import step as steps
from shardwright.pipeline.pipeline_step import PipelineSteps
from shardwright.pipeline.placed import PlacedTensor, current_frame, native
from shardwright.pipeline.runtime import Runtime
from shardwright.topology import context
from shardwright.transport import collectives, objects

_log = get_logger(__name__)

StateDict = dict[str, Any]


class DataParallelModule(nn.Module):
    """The hop between the wrapper and the user's module; it passes unknown attributes on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class DistributedModel(nn.Module):
    """A model spread over pipeline stages and replicated over data-parallel ranks.

    Made by: every rank of the world, with the same module; one per process. With one pipeline stage placement and the
    broadcast from the first data-parallel rank happen here. With more they happen in the first step call: a trace
    on fake tensors, the partition (made on world rank 0, sent to all), placement, broadcast, deferred loads, then
    the post-partition hooks. Non-local parameters stay reachable as placeholders of one element on the CPU.

    trace_device, trace_execution_times, trace_memory_usage: accepted; the trace runs on fake tensors.
    overlapping_allreduce: reduce gradients bucket by bucket during backward.
    backward_passes_per_step: gradients add up over this many step calls; the last one reduces.
    average_grads_across_microbatches: mean over microbatches, else their sum.
    bucket_cap_mb: bytes per gradient bucket, MiB.   broadcast_buffers: replica 0's buffers count in each step.
    gradient_as_bucket_view: gradients alias the buckets.   find_unused_parameters: accepted; always supported.
    tied_weights: "colocate" or "replicate", instead of the configuration's.
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
        if not isinstance(module, nn.Module):
            raise UsageError(f"smp.DistributedModel takes a torch.nn.Module, not {type(module).__name__}")
        if isinstance(module, (DistributedModel, nn.parallel.DistributedDataParallel)):
            raise UsageError(
                f"the module is a {type(module).__name__} already", remedy="wrap the plain module, once"
            )
        if isinstance(state.model, DistributedModel) and state.model._world is world.groups:
            raise UsageError("a model is wrapped already; one per process", remedy="train one model per script")
        if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
            raise UsageError("script modules can't be split", remedy="wrap the module before torch.jit.script")
        check_tracing(trace_device, trace_execution_times)
        check_supported(world.config)
        self.module = DataParallelModule(module)
        self._config = world.config
        self._world = world.groups
        self._num_stages = world.table.degrees.pp
        self._average = average_grads_across_microbatches
        self._broadcast_buffers = broadcast_buffers and world.config.ddp
        self._plan: PartitionPlan | None = None
        self._table: list[Placed] = []
        self._tensor_names = _names_of(module)
        self._deferred: list[Callable[[], None]] = []
        self._post_partition = HookList(self)
        self._post_step = HookList(self)
        self._ties: ReplicatedTies | None = None
        self._join: Join | None = None
        self._num_microbatches = 1
        self._partitioned = False
        self._first_step_done = False
        self.pipeline: PipelineSteps | None = None
        self._gradients = Gradients(
            overlap=overlapping_allreduce,
            passes_per_step=backward_passes_per_step,
            bucket_cap_mb=bucket_cap_mb,
            as_view=gradient_as_bucket_view,
        )
        state.model, state.optimizer = self, None
        steps.set_driver(self)
        if self._num_stages == 1:
            self._table = list(placement.placed_tensors(module, _single_stage(module)))
            for entry in self._table:
                entry.tensor.data = entry.tensor.data.to(world.device)
            self._become_ready()
        else:
            runtime = Runtime(world.coordinates.pp, self._num_stages, world.device, placement.PipelineWire())
            runtime.gradient_arrived = self._gradients.arrive
            self.pipeline = PipelineSteps(runtime, world.config.pipeline, self._scale)

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user module's forward. With pipeline stages only inside a step function."""
        if self._num_stages > 1:
            if current_frame() is None:
                raise UsageError(
                    "the model was called outside a step function, but it is split over"
                    f" {self._num_stages} pipeline stages",
                    remedy="put the call into a function decorated with @smp.step",
                )
            if not self._partitioned:
                with native(), context.own_view():
                    self._partition(args, kwargs)
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
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given: list[Any] | None = None
        if grad_tensors is not None:
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        self._gradients.backward_called()
        frame = current_frame()
        if frame is not None:
            if not all(type(t) is PlacedTensor for t in roots):
                raise UsageError(
                    "model.backward() was given a tensor that doesn't come from the model",
                    remedy="compute the loss from the model's output, inside the step function",
                )
            frame.backward(roots, given)
            return
        if self._num_stages > 1:
            raise UsageError(
                "model.backward() was called outside a step function", remedy="call it in the @smp.step function"
            )
        scale = self._scale(self._num_microbatches)
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
        return 1.0 / num_microbatches if self._average else 1.0

    # ------------------------------------------------------------------ around a step (pipeline.step.Driver)

    def step_begins(self) -> None:
        self._gradients.step_begins()
        if self._join is not None:
            self._join.on_step_start()
        if self._partitioned and self._broadcast_buffers and torch.is_grad_enabled():
            self._gradients.sync_buffers(self.local_named_buffers(), self._source())

    def microbatch_begins(self, index: int, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches

    def step_ends(self) -> None:
        if self._ties is not None and self._gradients.has_gradients:
            self._ties.reduce_gradients()
        self._gradients.step_ends(self._join)
        if not self._first_step_done:
            self._first_step_done = True
            self._post_partition.release(state.optimizer)
        self._post_step.release(state.optimizer, once=True)
        self._num_microbatches = 1

    def step_failed(self) -> None:
        self._gradients.abandon()
        self._num_microbatches = 1

    def _source(self) -> int:
        return self._join.source if self._join is not None else 0

    # ------------------------------------------------------------------ partition

    @property
    def partitioned(self) -> bool:
        """True once this rank holds its own part only (with one stage: at once)."""
        return self._partitioned

    def _partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """First step, on every rank of the world at the same point: plan, place, broadcast, load, hooks."""
        module = self.get_module()
        plan = self._plan
        if plan is None:
            text = ""
            if context.world().rank == 0:
                text = make_plan(module, args, kwargs, config=self._config, pp=self._num_stages).to_json()
            plan = self._plan = PartitionPlan.from_json(objects.broadcast_object(text, "world"))
        assert self.pipeline is not None
        self._table = placement.place(module, plan, self.pipeline.runtime)
        if plan.replicas:
            self._ties = ReplicatedTies(self._table)
        if rank_zero():
            _log.info("Partition assignments:\n%s", plan.explain(self._config.microbatches))
        self._become_ready()

    def _become_ready(self) -> None:
        """The rank holds its part: equal replicas, loads that waited, optimizer groups, hooks."""
        if context.world().table.degrees.rdp > 1 or context.world().table.degrees.tp > 1:
            self._gradients.broadcast([*self.local_named_parameters(), *self.local_named_buffers()])
        self._partitioned = True
        for entry in self._table:
            if not self._is_local(entry) and not entry.is_buffer:
                entry.tensor.grad = None
        self._gradients.attach(list(self.local_named_parameters()))
        if state.optimizer is not None:
            state.optimizer._shrink_groups()
        deferred, self._deferred = self._deferred, []
        for load in deferred:
            load()
        if self._num_stages > 1:
            self._post_partition.release(state.optimizer)

    def _is_local(self, entry: Placed) -> bool:
        return context.world().coordinates.pp in entry.stages

    def _demand_partitioned(self, what: str) -> None:
        if not self._partitioned:
            raise UsageError(
                f"{what} before the model is partitioned",
                remedy="it is partitioned in the first step call; use register_post_partition_hook",
            )

    def run_when_partitioned(self, callback: Callable[[], None]) -> None:
        """Run `callback` now, or right after partitioning, before the post-partition hooks."""
        if self._partitioned:
            callback()
        else:
            self._deferred.append(callback)

    # ------------------------------------------------------------------ what is here

    def get_module(self) -> nn.Module:
        """The user's module."""
        inner: nn.Module = self.module.module
        return inner

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(plain name, parameter) for what this rank holds; each parameter once."""
        for entry in self._local("local_named_parameters()"):
            if not entry.is_buffer:
                yield entry.name, entry.tensor  # type: ignore[misc]

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds."""
        return (p for _, p in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(plain name, buffer) for what this rank holds."""
        for entry in self._local("local_named_buffers()"):
            if entry.is_buffer:
                yield entry.name, entry.home[0]._buffers[entry.home[1]]  # type: ignore[misc]

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers that this rank holds."""
        return (b for _, b in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(plain name, module) for the modules that live on this rank's stage."""
        self._demand_partitioned("local_named_modules()")
        me = context.world().coordinates.pp
        for name, module in self.get_module().named_modules():
            if self._plan is None or self._plan.stage_of[name] == me:
                yield name, module

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that live on this rank's stage."""
        return (m for _, m in self.local_named_modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """With sharded optimizer state this rank's virtual parameters; otherwise as local_named_parameters()."""
        return self.local_named_parameters()

    def _local(self, what: str) -> list[Placed]:
        if self._num_stages > 1 and not self._table:
            self._demand_partitioned(what)
        return [e for e in self._table if self._num_stages == 1 or self._is_local(e)]

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Tensor-parallel modules (none without tensor parallelism)."""
        return iter(())

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Is it sliced over tp ranks?"""
        return False

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Is it sliced over tp ranks?"""
        return False

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Does it act on the batch of the whole tp group?"""
        return False

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Does it act on the batch of the whole tp group?"""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) whose gradients are reduced over DP_GROUP."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) whose gradients are reduced over RDP_GROUP."""
        return iter(())

    # ------------------------------------------------------------------ state

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> StateDict:
        """The whole model's state dict in the plain module's names, tensors on the CPU.

        Called by: all ranks of an MP_GROUP together (all ranks, or all with dp_rank() == 0). Before partitioning it
        is the unpartitioned one, without communication.
        Collectives: one broadcast per tensor over the group, and one before.
        gather_to_rank0: only world rank 0 gets content, the others {}.
        """
        full: StateDict = OrderedDict()
        if self._num_stages == 1 or not self._partitioned:
            full.update((k, _on_cpu(v)) for k, v in self.get_module().state_dict(*args, **kwargs).items())
        else:
            full.update(self._gathered())
        return full if not gather_to_rank0 or context.world().rank == 0 else {}

    def _gathered(self) -> Iterator[tuple[str, Any]]:
        """Every entry of the plain module's state dict, each sent by its owner to the pipeline group."""
        device = context.world().device
        collectives.barrier("pp")
        mine = self.get_module().state_dict()
        owners = self._owners()
        extras = objects.allgather_object(
            {k: v for k, v in mine.items() if not isinstance(v, torch.Tensor)}, "pp"
        )
        for name, value in mine.items():
            owner = owners.get(name, self._extra_owner(name))
            if not isinstance(value, torch.Tensor):
                yield name, extras[owner][name]
                continue
            held = value.detach().to(device) if context.world().coordinates.pp == owner else None
            buffer = held.contiguous() if held is not None else torch.empty(value.shape, dtype=value.dtype, device=device)
            collectives.broadcast_tensor(buffer, "pp", src_group_rank=owner)
            yield name, buffer.cpu()

    def _owners(self) -> dict[str, int]:
        by_id = {id(e.tensor) if not e.is_buffer else id(e.home[0]._buffers[e.home[1]]): e.owner for e in self._table}
        return {
            name: by_id[id(tensor)]
            for name, tensor in self.get_module().state_dict(keep_vars=True).items()
            if id(tensor) in by_id
        }

    def _extra_owner(self, name: str) -> int:
        assert self._plan is not None
        return self._plan.stage_of.get(name.rpartition(".")[0], 0)

    def local_state_dict(self) -> StateDict:
        """Parameters and persistent buffers that this rank holds, plus `_smp_is_partial: True`. No communication."""
        self._demand_partitioned("local_state_dict()")
        mine: StateDict = OrderedDict()
        for name, value in self.get_module().state_dict(keep_vars=True).items():
            if name in self._held_names():
                mine[name] = value.detach() if isinstance(value, torch.Tensor) else value
        mine[PARTIAL_MARK] = True
        return mine

    def _held_names(self) -> set[str]:
        if self._num_stages == 1:
            return set(self.get_module().state_dict(keep_vars=True))
        me = context.world().coordinates.pp
        local = {id(e.tensor) for e in self._table if not e.is_buffer and e.owner == me}
        local |= {id(e.home[0]._buffers[e.home[1]]) for e in self._table if e.is_buffer and e.owner == me}
        return {
            name
            for name, value in self.get_module().state_dict(keep_vars=True).items()
            if (id(value) in local if isinstance(value, torch.Tensor) else self._extra_owner(name) == me)
        }

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False, **_: Any
    ) -> Any:
        """Load a full or partial state dict in the plain module's names; before partitioning it is remembered.

        Called by: every rank. A partial dict is merged over the MP_GROUP (one object gather) unless
        same_partition_load. The caller's dict is not changed.
        Returns: torch's missing and unexpected keys; empty when deferred.
        Raises: RuntimeError listing names if strict and they don't match, at once where it can be told.
        """
        content = dict(state_dict)
        partial = bool(content.pop(PARTIAL_MARK, False))
        keys = nn.modules.module._IncompatibleKeys([], [])
        if not partial:
            keys = self._compare(content, set(self._tensor_names), strict)
        if self._partitioned:
            return self._load(content, partial, strict, same_partition_load)
        self._deferred.append(lambda: self._load(content, partial, strict, same_partition_load) and None)
        return nn.modules.module._IncompatibleKeys([], []) if partial else keys

    def _load(self, content: StateDict, partial: bool, strict: bool, same_partition: bool) -> Any:
        if partial and not same_partition and self._num_stages > 1:
            merged: StateDict = {}
            for part in objects.allgather_object({k: _on_cpu(v) for k, v in content.items()}, "pp"):
                merged.update(part)
            content, partial = merged, False
        expected = self._held_names() if partial else set(self._tensor_names)
        keys = self._compare(content, expected, strict)
        self.load_local({k: v for k, v in content.items() if k in self._held_names()}, strict=False)
        return keys

    def _compare(self, content: StateDict, expected: set[str], strict: bool) -> Any:
        missing = sorted(expected - set(content))
        unexpected = sorted(set(content) - expected)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.get_module()).__name__}:"
                f" missing keys {missing}, unexpected keys {unexpected}"
            )
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    # ------------------------------------------------------------------ for checkpoints (checkpoint.state)

    def names_and_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the plain state dict with its whole shape."""
        return self._tensor_names

    def tied_names(self) -> list[list[str]]:
        """Groups of names that are one tensor."""
        groups: dict[int, list[str]] = {}
        for name, value in self.get_module().state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                groups.setdefault(id(value), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def tensor_table(self) -> list[TensorRow]:
        """One row per tensor of `local_state_dict()`."""
        return [
            TensorRow(n, tuple(t.shape), dtype_name(t), (0,) * t.dim(), tuple(t.shape))
            for n, t in self.local_state_dict().items()
            if isinstance(t, torch.Tensor)
        ]

    def partition_record(self) -> Mapping[str, Any] | None:
        """The partition as JSON values; None with one stage."""
        return None if self._plan is None else json.loads(self._plan.to_json())

    def restore_partition(self, record: Mapping[str, Any]) -> None:
        """Use a saved partition instead of making one."""
        plan = PartitionPlan.from_json(json.dumps(dict(record)))
        plan.check(self.get_module())
        if self._partitioned and self._plan is not None and self._plan.stage_of != plan.stage_of:
            raise PartitionError(
                "the checkpoint was saved with another partition than this model already has",
                remedy="resume before the first step",
            )
        self._plan = self._plan or plan

    def load_local(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copy values into what this rank holds."""
        mine = self.get_module().state_dict(keep_vars=True)
        held = self._held_names()
        missing = sorted(held - set(state))
        unexpected = sorted(set(state) - held - {PARTIAL_MARK})
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing keys {missing}, unexpected keys {unexpected}")
        module = self.get_module()
        with torch.no_grad():
            for name, value in state.items():
                if name == PARTIAL_MARK or name not in held:
                    continue
                target = mine[name]
                if isinstance(target, torch.Tensor):
                    if target.shape != value.shape:
                        raise RuntimeError(
                            f"'{name}' is {list(value.shape)} in the state dict, {list(target.shape)} in the model"
                        )
                    target.copy_(value)
                else:
                    module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        if self._ties is not None:
            self._ties.send_weights()

    def random_position(self) -> Mapping[str, int]:
        """No counters: each step draws the base of its streams from torch's CPU generator, which is saved."""
        return {}

    def restore_random_position(self, position: Mapping[str, int]) -> None:
        """See `random_position`."""

    # ------------------------------------------------------------------ hooks

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> Any:
        """Run `hook(model, optimizer)` after partitioning (at once if that is done); returns a handle."""
        waits_for_optimizer = self._num_stages == 1 and state.optimizer is None and not self._first_step_done
        return self._post_partition.add(hook, now=self._partitioned and not waits_for_optimizer)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> Any:
        """Run `hook(model, optimizer)` once, at the end of the first (else the next) step; returns a handle."""
        return self._post_step.add(hook, now=False)

    def optimizer_wrapped(self) -> None:
        """Called by the optimizer's wrapper: hooks that waited for it run."""
        if self._partitioned:
            self._post_partition.release(state.optimizer)

    def register_comm_hook(self, hook_state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` reduce the gradient buckets; it owns averaging over replicas and microbatches.

        Raises: UsageError without ddp or without overlapping reduction.
        """
        if not self._config.ddp:
            raise UsageError("register_comm_hook() needs data parallelism", remedy='set "ddp": true')
        self._gradients.register_comm_hook(hook_state, hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context manager for data-parallel ranks that run out of batches before others (needs ddp)."""
        if not self._config.ddp:
            raise UsageError("join() needs data parallelism", remedy='set "ddp": true')
        self._demand_partitioned("join()")
        self._join = Join(
            reducers=self._gradients.reducers,
            final_sync=self._final_sync,
            shadow_buffers=self._shadow_buffers if self._broadcast_buffers else None,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
            enable=enable,
        )
        return self._join

    def _shadow_buffers(self, source: int) -> None:
        self._gradients.sync_buffers(self.local_named_buffers(), source)

    def _final_sync(self, source: int) -> None:
        self._gradients.broadcast([*self.local_named_parameters(), *self.local_named_buffers()], source)
        if state.optimizer is not None:
            sync.broadcast_optimizer_state(state.optimizer, "dp", source=source)

    # ------------------------------------------------------------------ nn.Module manners

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:  # type: ignore[override]
        """Change the dtype before partitioning; devices are the library's business and are ignored."""
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)[:4]
        if dtype is not None and not (self._num_stages > 1 and self._partitioned):
            super().to(dtype=dtype)
        return self

    def cuda(self, device: Any = None) -> DistributedModel:  # type: ignore[override]
        """Returns the model: parts are on their devices after partitioning."""
        return self

    def cpu(self) -> DistributedModel:
        """Gather all parameters and buffers over the MP_GROUP and put the whole model on the CPU.

        Called by: every rank. Afterwards the model is a plain module in `get_module()`; it can't be trained further.
        """
        if self._num_stages > 1 and self._partitioned:
            full = self.state_dict()
            assert self.pipeline is not None
            for unit in self.pipeline.runtime.units:
                unit.remove()
            for name, tensor in self.get_module().state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor):
                    tensor.data = full[name].clone()
            return self
        return super().cpu()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


def _single_stage(module: nn.Module) -> PartitionPlan:
    stage_of = {name: 0 for name, _ in module.named_modules()}
    return PartitionPlan(num_stages=1, stage_of=stage_of, stages=(), origin="auto", how="none")


def _names_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
