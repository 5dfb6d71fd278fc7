"""State dicts of the wrapped model: `model.state_dict()` and its kin."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from shardwright.checkpoint.state import PARTIAL_MARK
from shardwright.checkpoint.whole import WholeModel
from shardwright.data_parallel.shards import local
from shardwright.engine import weights
from shardwright.engine.part import Part
from shardwright.engine.step_duties import StepDuties
from shardwright.engine.substitution import in_own_names
from shardwright.errors import UsageError
from shardwright.memory import delayed_init
from shardwright.topology import context

StateDict = dict[str, Any]


class ModelState(nn.Module):
    """State dicts in the plain module's names, whole and of this rank; mixed into the wrapper, which has the rest."""

    _part: Part
    _duties: StepDuties
    _when_partitioned: list[Callable[[], object]]
    get_module: Callable[[], nn.Module]
    refresh_copies: Callable[[], None]
    _weights_changed: Callable[[], None]

    def state_dict(  # type: ignore[override]
        self,
        destination: StateDict | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        *,
        gather_to_rank0: bool = False,
    ) -> StateDict:
        """The whole model's state dict in the plain module's names, tensors on the CPU.

        Called by: all ranks of an MP_GROUP together (all ranks, or all with rdp_rank() == 0); with sharded data parallelism
        all ranks. Before partitioning, if nothing is cut over tp ranks, without communication.
        Collectives: see `weights.gather`.
        gather_to_rank0: only world rank 0 gets content, the others {}, and need no more memory than for a message; see
            `checkpoint.whole`.
        keep_vars: where nothing is gathered, the very parameters instead of detached ones.
        """
        self._demand_values("model.state_dict()")
        keep = not gather_to_rank0 or context.world().rank == 0
        plain = self.get_module().state_dict(keep_vars=True)
        if not self._part.is_complete:
            content = (
                self._whole_on_rank0("model.state_dict()")
                if gather_to_rank0
                else weights.gather(self._part, self._part.answered_state(), "model.state_dict()")
            )
        elif keep:
            content = {n: v if keep_vars else weights.on_cpu(v) for n, v in plain.items()}
        else:
            content = {}
        result: StateDict = OrderedDict() if destination is None else destination
        result.update((prefix + name, value) for name, value in content.items())
        return weights.with_metadata(result, plain)

    def _whole_on_rank0(self, call: str) -> StateDict:
        """The whole state dict on world rank 0; {} on the others. Called by: as `state_dict`."""
        from shardwright.engine.checkpointing import SavedModel  # which knows this class

        if context.world().coordinates.rdp > 0 and not self._part.is_sharded:
            return {}
        content = WholeModel(call, SavedModel(cast(Any, self)), "world" if self._part.is_sharded else "mp").collected()
        return content if context.world().rank == 0 else {}

    def _answered_state(self) -> StateDict:
        """What this rank answers for in the whole state dict, see `CheckpointModel.answered_state`."""
        self._demand_values("the whole state dict")
        held = self._part.answered_state()
        local_of = {id(v): local(v).detach() for v in held.values() if isinstance(v, torch.Tensor)}
        return weights.with_metadata(OrderedDict((n, local_of.get(id(v), v)) for n, v in held.items()), held)

    def _demand_values(self, what: str) -> None:
        self._duties.check_loaded()
        if not self._part.settled and delayed_init.has_delayed(self._part.module):
            raise UsageError(
                f"{what} before the model is partitioned, but its parameters are built with delayed"
                " initialisation and have no values yet",
                remedy="call it after the first step",
            )

    def local_state_dict(self) -> StateDict:
        """Parameters (with sharded data parallelism the rows here) and persistent buffers, plus `_smp_is_partial: True`.

        Nothing is communicated.
        """
        self._duties.check_loaded()
        return self._local_state_dict()

    def _local_state_dict(self) -> StateDict:
        """The same, whether or not the values are of use."""
        self._part.demand_settled("local_state_dict()")
        held = self._part.held_state()
        mine: StateDict = OrderedDict()
        mine.update((n, local(v).detach() if isinstance(v, torch.Tensor) else v) for n, v in held.items())
        mine[PARTIAL_MARK] = True
        return weights.with_metadata(mine, held)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> weights.Keys:
        """Load a full or partial state dict in the plain module's names.

        Called by: every rank, or those with rdp_rank() == 0: the other replicas take over the values when the
        model is partitioned, or in the next training step. With sharded data parallelism every rank. The caller's dict is not
        changed.
        A full one without the key `_smp_is_partial` may be in the names of the original model, see
        `smp.state.module_manager.translate_functions`. A partial one holds this tp rank's slices. It is merged over
        PP_GROUP (one object gather); with same_partition_load it is loaded as it is, before partitioning right after
        that. assign: accepted; values are always copied.
        Returns: torch's missing and unexpected keys; empty when deferred.
        Raises: RuntimeError listing names and sizes that don't match, names only if strict.
        """
        if not self._part.settled and delayed_init.has_delayed(self._part.module):
            again = functools.partial(self.load_state_dict, state_dict, strict, same_partition_load)
            self._when_partitioned.append(again)  # nothing is there yet to load into
            return weights.Keys([], [])
        content, mark = weights.split_mark(state_dict)
        partial = bool(mark)
        if partial and same_partition_load and not self._part.settled:
            self._when_partitioned.append(functools.partial(self._load_own, content, strict))
            return weights.Keys([], [])
        if partial and same_partition_load:
            keys = self._load_own(content, strict)
        else:
            expected = self._part.keys()
            if partial:
                content = weights.merge(content)
            elif mark is None:
                content = weights.with_metadata(in_own_names(content, expected, self._part.tied_names()), content)
            keys = weights.load(self._part, content, expected, strict=strict, slices=partial)
        self._duties.model_loaded(whole=not keys.missing_keys)
        self.refresh_copies()
        self._weights_changed()
        return keys

    def _load_own(self, content: StateDict, strict: bool) -> weights.Keys:
        return weights.load(self._part, content, self._part.held_state().keys(), strict=strict, slices=True)
