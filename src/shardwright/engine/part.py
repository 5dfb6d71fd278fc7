"""What of the model is on this rank, under the plain module's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.shards import is_shard
from shardwright.engine.distribution import Distribution
from shardwright.engine.placement import Placed
from shardwright.errors import UsageError
from shardwright.partition.plan import PartitionPlan


class Part:
    """This rank's part of the wrapped model, and what it knows of the parts of others.

    module: the user's.   stage, num_stages: this rank's place in the pipeline.
    plan: the partition as soon as it is known; always None with one stage.
    entries: every parameter and buffer of the model once, with its holders; empty until `settle`.
    settled: this rank holds its own part only.   gathered: it holds everything again, for good.
    distribution: what of it is cut over tp ranks.
    """

    def __init__(self, module: nn.Module, stage: int, num_stages: int) -> None:
        self.module = module
        self.distribution = Distribution(module)
        self.stage = stage
        self.num_stages = num_stages
        self.plan: PartitionPlan | None = None
        self.entries: list[Placed] = []
        self.settled = False
        self.gathered = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._keys: tuple[str, ...] = ()
        self._stage_of_module: dict[int, int] = {}

    def remember_names(self) -> None:
        """Note the names and shapes of the whole model, before this rank lets go of what isn't its own."""
        self._keys, self._shapes = self.keys(), self.shapes()

    def settle(self, entries: list[Placed]) -> None:
        """From here on this rank holds its own part only."""
        self.entries = entries
        self.settled = True
        if self.plan is not None:
            stage_of = self.plan.stage_of
            self._stage_of_module = {id(m): stage_of[n] for n, m in self.module.named_modules()}

    def demand_settled(self, what: str) -> None:
        """Raise UsageError, naming the call, while the model is not partitioned."""
        if not self.settled:
            raise UsageError(
                f"{what} before the model is partitioned",
                remedy="it is partitioned in the first step call; use register_post_partition_hook",
            )

    # ------------------------------------------------------------------ the whole model

    @property
    def is_whole(self) -> bool:
        """True while every rank holds every tensor, or its slice of it."""
        return self.num_stages == 1 or not self.settled or self.gathered

    @property
    def is_complete(self) -> bool:
        """True while every rank holds every tensor as a whole."""
        return self.is_whole and not self.distribution.is_cut and not self.is_sharded

    @property
    def is_sharded(self) -> bool:
        """True with sharded data parallelism: parameters are shards."""
        return any(is_shard(entry.tensor) for entry in self.entries)

    def keys(self) -> tuple[str, ...]:
        """Every name in the plain state dict, in its order; equal on all ranks."""
        return tuple(self.module.state_dict(keep_vars=True)) if self.is_whole else self._keys

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the plain state dict with its whole shape; equal on all ranks."""
        if not self.is_whole:
            return self._shapes
        content = self.module.state_dict(keep_vars=True)
        whole = self.distribution.whole_shape
        return {n: whole(n, t) for n, t in content.items() if isinstance(t, torch.Tensor)}

    def tied_names(self) -> list[list[str]]:
        """Groups of names in the plain state dict that are one tensor."""
        groups: dict[int, list[str]] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                groups.setdefault(id(value), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    # ------------------------------------------------------------------ what is here

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters on this rank, copies of replicated ones included; each once."""
        for entry in self.entries:
            if self.stage in entry.stages and isinstance(entry.tensor, nn.Parameter):
                yield entry.name, entry.tensor

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers on this rank, as they are now."""
        return ((name, buffer) for name, buffer, _ in self.buffers_with_homes())

    def buffers_with_homes(self) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
        """Buffers on this rank, as they are now, and the module each hangs on."""
        for entry in self.entries:
            if self.stage in entry.stages and entry.is_buffer:
                buffer = entry.current()
                if buffer is not None:
                    yield entry.name, buffer, entry.home[0]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that live on this rank's stage."""
        for name, module in self.module.named_modules():
            if self.plan is None or self.plan.stage_of.get(name) == self.stage:
                yield name, module

    def elsewhere(self) -> Iterator[torch.Tensor]:
        """Placeholders: tensors that only other ranks hold."""
        for entry in self.entries:
            tensor = entry.current()
            if self.stage not in entry.stages and tensor is not None:
                yield tensor

    def held_state(self) -> dict[str, Any]:
        """The part of the plain state dict that this rank answers for: live tensors, and extra states.

        What several stages hold is in the state of its owner only, so that all parts together are the whole.
        """
        content: dict[str, Any] = self.module.state_dict(keep_vars=True)
        if self.is_whole:
            return content
        owners = {id(entry.current()): entry.owner for entry in self.entries}
        for name, value in list(content.items()):
            if owners.get(id(value), self._stage_of_key(name)) != self.stage:
                del content[name]
        return content

    def answered_state(self) -> dict[str, Any]:
        """`held_state`, but where every stage holds everything only one of them answers."""
        return {} if self.is_whole and self.num_stages > 1 and self.stage > 0 else self.held_state()

    def here(self) -> dict[str, Any]:
        """The part of the plain state dict that is on this rank: `held_state`, and copies of others'."""
        held = self.held_state()
        local = {id(t) for _, t in (*self.parameters(), *self.buffers())}
        content = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in content.items() if name in held or id(value) in local}

    def held_extras(self) -> dict[str, Any]:
        """The extra states of this rank's modules, by their keys in the state dict."""
        return {n: v for n, v in self.held_state().items() if not isinstance(v, torch.Tensor)}

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and all buffers, those that aren't saved too, that this rank answers for."""
        mine = [(entry.name, entry.current()) for entry in self.entries if entry.owner == self.stage]
        return {name: tensor for name, tensor in mine if tensor is not None}

    def _stage_of_key(self, key: str) -> int:
        """The stage of the innermost known module on the way to a key of the state dict."""
        module, stage = self.module, self._stage_of_module[id(self.module)]
        for step in key.split(".")[:-1]:
            child = module._modules.get(step)
            if child is None:
                break
            module, stage = child, self._stage_of_module.get(id(child), stage)
        return stage
