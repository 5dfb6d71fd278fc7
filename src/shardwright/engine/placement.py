"""Carrying out a partition on one rank: what it keeps, what it lets go of, and what glue must know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.data_parallel.shards import is_shard
from shardwright.memory import delayed_init
from shardwright.partition.plan import PartitionPlan
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.unit import units_of
from shardwright.topology import context
from shardwright.transport import p2p


class PipelineWire:
    """The pipeline group's messages over `transport.p2p`; ranks are pp ranks of this process's group."""

    def __init__(self) -> None:
        self._ranks = context.world().groups.ranks("pp")

    def send(self, tensor: torch.Tensor, to: int, channel: int) -> p2p.Sent:
        return p2p.isend(tensor, self._ranks[to], channel)

    def receive(self, buffer: torch.Tensor, source: int, channel: int) -> p2p.Received:
        return p2p.irecv(buffer, self._ranks[source], channel)


@dataclass(frozen=True)
class Placed:
    """A parameter or buffer of the plain model: its name, where it hangs, and the stages that hold it.

    owner: the stage whose value counts.   stages: all that keep it (more than one for replicated ties).
    """

    name: str
    tensor: torch.Tensor
    home: tuple[nn.Module, str]
    owner: int
    stages: tuple[int, ...]
    is_buffer: bool
    persistent: bool

    def current(self) -> torch.Tensor | None:
        """The tensor as it is now: buffers may have been assigned anew."""
        return self.home[0]._buffers[self.home[1]] if self.is_buffer else self.tensor


def placed_tensors(model: nn.Module, plan: PartitionPlan) -> Iterator[Placed]:
    """Every parameter and buffer once, in the model's order, with the stages that hold it."""
    stage_of_module = {id(m): plan.stage_of[name] for name, m in model.named_modules()}
    copies = {tied.name: tied for tied in plan.replicas}
    stages: dict[int, list[int]] = {}
    for _, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                stages.setdefault(id(tensor), []).append(stage_of_module[id(module)])
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for is_buffer, members in ((False, module._parameters), (True, module._buffers)):
            for key, tensor in members.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                holders = stages[id(tensor)]
                owner = copies[name].owner if name in copies else holders[0]
                persistent = not is_buffer or key not in module._non_persistent_buffers_set
                yield Placed(name, tensor, (module, key), owner, tuple(dict.fromkeys(holders)), is_buffer, persistent)


def place(model: nn.Module, plan: PartitionPlan, runtime: Runtime) -> list[Placed]:
    """Keep this rank's part on its device, let go of the rest, and put borders around the units.

    Parameters keep their identity (their `.data` is exchanged), so optimizers built before stay right. What
    another stage holds becomes a placeholder on the CPU, see `placeholder`.
    """
    table = list(placed_tensors(model, plan))
    for entry in table:
        if runtime.rank in entry.stages:
            keep(entry.tensor, runtime.device)
        else:
            _let_go(entry.tensor)
        runtime.register(entry.name, entry.tensor, entry.owner, entry.home if entry.is_buffer else None)
    runtime.module_names.update((id(module), name) for name, module in model.named_modules())
    runtime.tied.update(_tied(model))
    for unit in units_of(runtime, model, plan.stage_of):
        unit.install()
    _estimate_costs(runtime, plan)
    return table


def _tied(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module has."""
    seen: set[int] = set()
    tied: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def place_whole(model: nn.Module, device: torch.device) -> list[Placed]:
    """With one stage: keep everything, on this rank's device."""
    table = whole_table(model)
    for entry in table:
        if not is_shard(entry.tensor):  # which is there already
            keep(entry.tensor, device)
    return table


def whole_table(model: nn.Module) -> list[Placed]:
    """With one stage: everything, wherever it is."""
    stage_of = {name: 0 for name, _ in model.named_modules()}
    plan = PartitionPlan(num_stages=1, stage_of=stage_of, stages=(), origin="auto", how="none")
    return list(placed_tensors(model, plan))


def keep(tensor: torch.Tensor, device: torch.device) -> None:
    """Put a tensor on this rank's device; one without storage gets its value first, and no more than that is held."""
    if delayed_init.is_delayed(tensor):
        delayed_init.fill(tensor, delayed_init.value_of(tensor).to(device))
    else:
        tensor.data = tensor.data.to(device)


def _let_go(tensor: torch.Tensor) -> None:
    """Another stage holds it."""
    stand_in = placeholder(tensor.shape, tensor.dtype)
    if delayed_init.is_delayed(tensor):
        delayed_init.fill(tensor, stand_in)
    else:
        tensor.data = stand_in
        tensor.grad = None


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for a tensor that another stage holds: its memory is one element, which is not a number."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype).expand(tuple(shape))


def _estimate_costs(runtime: Runtime, plan: PartitionPlan) -> None:
    """Spread each stage's traced work over its units by parameters: all the schedule needs to know."""
    sizes = {u.name: 1 + sum(p.numel() for p in u.parameters) for u in runtime.units}
    for unit in runtime.units:
        stage = plan.stages[unit.owner]
        runtime.cost[unit.name] = stage.work / 3 * sizes[unit.name] / max(1, stage.num_parameters)
