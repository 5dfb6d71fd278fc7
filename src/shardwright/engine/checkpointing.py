"""Checkpoint calls on the wrappers made last.

The two adapters here are what checkpoints see of the wrappers (`checkpoint.state`).
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from shardwright.checkpoint import load, rank_files, rank_merge, save
from shardwright.checkpoint.flat_groups import FlatGroups
from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.state import PARTIAL_MARK, CheckpointModel, TensorRow, attach_by_name, dtype_name
from shardwright.data_parallel import shards
from shardwright.engine import weights
from shardwright.engine.full_sharding import flat_groups
from shardwright.engine.fully_sharded_optimizer import FullyShardedOptimizer
from shardwright.engine.half_optimizer import HALF_PRECISION_KEYS, HalfPrecisionOptimizer, without_masters
from shardwright.engine.model import DistributedModel
from shardwright.engine.optimizer import WrappedOptimizer
from shardwright.engine.origin import origin_record
from shardwright.engine.state import state
from shardwright.engine.substitution import in_own_names
from shardwright.errors import CheckpointError, UsageError
from shardwright.partition.plan import PartitionPlan
from shardwright.partition.tree import build_tree, to_record
from shardwright.tensor_parallel import randomness
from shardwright.tensor_parallel.module import spec_of
from shardwright.topology import context

StateDict = dict[str, Any]


def save_checkpoint(
    path: Any,
    tag: Any,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    blocking: bool = True,
    trust: bool | None = None,
) -> None:
    """See `shardwright.checkpoint.save.save_checkpoint`: collective over the world.

    Raises: UsageError if `model` or `optimizer` is not a wrapper, besides what is said there.
    """
    if state.model is not None:
        state.model._duties.check_loaded()
    save.save_checkpoint(
        path,
        tag,
        partial,
        _model_to_save(model),
        _optimizer_to_save(optimizer),
        user_content,
        translate_if_full,
        num_kept_partial_checkpoints,
        blocking=blocking,
        trust=trust,
    )


def save_object(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
    *,
    trust: bool | None = None,
) -> None:
    """`smp.save`, see `shardwright.checkpoint.rank_files.save`: of any rank by itself.

    Partial state dicts in `obj` are taken for those of the model wrapped last, and of its optimizer if it has one.
    """
    rank_files.save(obj, f, partial, pickle_module, pickle_protocol, v3, trust=trust, describe=_parts)


def _parts() -> rank_merge.Parts | None:
    """What partial state dicts are parts of; None if that isn't known."""
    model = state.model
    if model is None or not model.partitioned:
        return None
    # Of several optimizers none is told from the others by its state dict.
    only = state.optimizer if len(model._optimizers) == 1 else None
    return rank_merge.describe(SavedModel(model), None if only is None else SavedOptimizer(only))


def prepare_background_save(model: DistributedModel | None = None, optimizer: Any = None) -> None:
    """See `shardwright.checkpoint.save.prepare_background_save`."""
    save.prepare_background_save(_model_to_save(model), _optimizer_to_save(optimizer))


def resume_from_checkpoint(
    path: Any, tag: Any = None, partial: bool = True, strict: bool = True, **options: Any
) -> Any:
    """See `shardwright.checkpoint.load.resume_from_checkpoint`: collective over the world."""
    return load.resume_from_checkpoint(
        path,
        tag,
        partial,
        strict,
        model=_model_to_save(state.model),
        optimizer=_optimizer_to_save(state.optimizer),
        **options,
    )


def _model_to_save(model: DistributedModel | None) -> SavedModel | None:
    if model is not None and not isinstance(model, DistributedModel):
        raise UsageError(
            f"save_checkpoint() got a model of type {type(model).__name__}",
            remedy="pass what smp.DistributedModel returned",
        )
    return None if model is None else SavedModel(model)


def _optimizer_to_save(optimizer: Any) -> SavedOptimizer | None:
    if optimizer is not None and not isinstance(optimizer, WrappedOptimizer):
        raise UsageError(
            f"save_checkpoint() got an optimizer of type {type(optimizer).__name__}",
            remedy="pass what smp.DistributedOptimizer returned",
        )
    return None if optimizer is None else SavedOptimizer(optimizer)


class SavedModel:
    """A wrapped model as `checkpoint.state.CheckpointModel`."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        self._part = model._part

    @property
    def partitioned(self) -> bool:
        """True once this rank holds its own part only."""
        return self._model.partitioned

    @property
    def is_delayed(self) -> bool:
        """True while parameters have no memory."""
        return any(parameter.is_meta for parameter in self._part.module.parameters())

    def names_and_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the plain state dict with its whole shape."""
        return self._part.shapes()

    def tied_names(self) -> list[list[str]]:
        """Groups of names that are one tensor."""
        return self._part.tied_names()

    def local_state_dict(self) -> StateDict:
        """What this rank answers for, with the mark of partial state dicts."""
        return self._model._local_state_dict()

    def tensor_table(self) -> list[TensorRow]:
        """One row per tensor of `local_state_dict()`."""
        held = self._part.held_state()
        return [_rows_here(row, held[row.name]) for row in self.parameter_table()]

    def parameter_table(self) -> list[TensorRow]:
        """The same, with sharded data parallelism for the parameters of which shards are here."""
        cut = self._part.distribution
        return [
            TensorRow(n, cut.whole_shape(n, t), dtype_name(t), cut.offset(n, t), tuple(t.shape))
            for n, t in self._part.held_state().items()
            if isinstance(t, torch.Tensor)
        ]

    def partition_record(self) -> Mapping[str, Any] | None:
        """The partition as JSON values; None with one stage."""
        plan = self._part.plan
        record: dict[str, Any] | None = None if plan is None else json.loads(plan.to_json())
        return record

    def structure_record(self) -> Mapping[str, Any]:
        """Modules, parameters, which of these act on the samples of the whole tp group, and what any tp degree cuts how."""
        tree = build_tree(self._part.module)
        parameters = dict(self._part.module.named_parameters())
        scaled = self._part.distribution.is_scaled
        specs = spec_of(self._part.module).items()
        return {
            **to_record(tree),
            "scaled": [p.name for p in tree.parameters if scaled(parameters[p.name])],
            "cuts": {name: [spec.dim, spec.units.size, spec.units.shared_by] for name, spec in specs if spec.dim is not None},
        }

    def restore_partition(self, record: Mapping[str, Any]) -> None:
        """Use a saved partition instead of making one."""
        self._model.restore_plan(PartitionPlan.from_json(json.dumps(dict(record))))

    def run_when_partitioned(self, callback: Callable[[], None]) -> None:
        """Run `callback` now, or right after partitioning."""
        self._model.run_when_partitioned(callback)

    def level_replicas(self) -> None:
        """As before a step."""
        self._model._duties.meet_to_save()

    def load_begins(self, parts: Collection[StateRole]) -> set[StateRole]:
        """The values of these parts are being overwritten. Returns: those that were left half loaded before."""
        before = set(self._model._duties.half_loaded)
        self._model._duties.half_loaded |= set(parts)
        return before

    def load_ends(self, parts: Collection[StateRole]) -> None:
        """They are loaded."""
        self._model._duties.half_loaded -= set(parts)

    def load_local(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copy values into what this rank holds."""
        content = {name: value for name, value in state.items() if name != PARTIAL_MARK}
        weights.load(self._part, content, self._part.held_state().keys(), strict=strict, slices=True)

    def origin_record(self) -> Mapping[str, Any] | None:
        """What the model was before modules were replaced."""
        return origin_record(self._part.module)

    def answered_state(self) -> StateDict:
        """What this rank answers for in the state dict of the whole."""
        return self._model._answered_state()

    def original_names(self, content: StateDict) -> StateDict:
        """In the names of the model before modules were replaced."""
        for to_original, _ in state.module_manager.translate_functions:
            content = to_original(content)
        return content

    def fitted(self, content: Mapping[str, Any], *, strict: bool, translated: bool) -> StateDict:
        """Whole tensors in the names of the wrapped model, which fit it."""
        whole, mark = weights.split_mark(content)
        if not translated and mark is None:
            whole = in_own_names(whole, self._part.keys(), self.tied_names())
        try:
            weights.check(self._part, whole, strict=strict)
        except RuntimeError as error:
            raise CheckpointError(
                str(error),
                remedy="build the model as it was when saved, and mark the same modules for tensor parallelism, whatever the"
                " degree; strict=False tolerates names, not shapes",
            ) from error
        return {**whole, PARTIAL_MARK: False}

    def load_whole(self, content: Mapping[str, Any], *, strict: bool) -> None:
        """Copy this rank's share of whole tensors."""
        self._model.load_state_dict(content, strict=strict)

    def random_position(self) -> Mapping[str, int]:
        """Where the streams of distributed modules stand; {} before they were used.

        Each step draws the base of its other streams from torch's CPU generator, which is saved.
        """
        kept = randomness.state()
        return {} if kept["base"] is None else {f"tp_{name}": value for name, value in kept.items()}

    def restore_random_position(self, position: Mapping[str, int]) -> None:
        """Continue those streams from here."""
        kept = {name.removeprefix("tp_"): value for name, value in position.items() if name.startswith("tp_")}
        if kept:
            randomness.set_state(kept)
        else:
            randomness.begin()


def _rows_here(row: TensorRow, tensor: torch.Tensor) -> TensorRow:
    """What of a tensor is on this rank, if it is a shard."""
    if not shards.is_shard(tensor):
        return row
    start, _ = shards.layout_of(tensor).rows(context.world().coordinates.shard)
    offset = (row.offset[0] + start, *row.offset[1:])
    return dataclasses.replace(row, offset=offset, local_shape=tuple(shards.local(tensor).shape))


class SavedOptimizer:
    """A wrapped optimizer as `checkpoint.state.CheckpointOptimizer`."""

    def __init__(self, optimizer: WrappedOptimizer) -> None:
        self._optimizer = optimizer

    def full_group_names(self) -> Sequence[Sequence[str]]:
        """Per group: plain names of all its parameters in the unpartitioned order."""
        return self._optimizer._full_group_names()

    def group_names(self) -> Sequence[Sequence[str]]:
        """Per group: plain names of the parameters that this rank updates."""
        return self._optimizer._group_names()

    def flat_groups(self, model: CheckpointModel) -> FlatGroups | None:
        """What is written in flat form, with sharded data parallelism."""
        if not isinstance(self._optimizer, FullyShardedOptimizer) or not isinstance(model, SavedModel):
            return None
        return flat_groups(model._model, self._optimizer)

    def local_state_dict(self, *, gather_if_shard: bool = True) -> StateDict:
        """torch's form over this rank's parameters, with the mark of partial state dicts."""
        content = self._optimizer._sw_local_state_dict(gather_if_shard)
        return {key: value for key, value in content.items() if key not in HALF_PRECISION_KEYS}

    def half_precision_state(self) -> StateDict | None:
        """Masters and the loss scaler; None in full precision."""
        optimizer = self._optimizer
        return optimizer._sw_half_state() if isinstance(optimizer, HalfPrecisionOptimizer) else None

    def parameter_table(self) -> Sequence[TensorRow]:
        """Rows of the model's parameters."""
        return SavedModel(self._optimizer._sw_model).parameter_table()

    def fitted(self, state: StateDict, *, strict: bool) -> StateDict:
        """A whole state for the present groups; masters only if this optimizer has some."""
        content = attach_by_name(state, self.full_group_names(), strict=strict)
        if isinstance(self._optimizer, HalfPrecisionOptimizer):
            content.update((key, state[key]) for key in HALF_PRECISION_KEYS if key in state)
        else:
            content["state"] = without_masters(content["state"])
        return content

    def load_whole(self, state: StateDict) -> None:
        """Take over this rank's share of a whole state."""
        self._optimizer.load_state_dict(state)

    def load_local(self, state: StateDict) -> None:
        """Take over a dict in torch's form, indexed over this rank's groups."""
        self._optimizer._take_over({key: value for key, value in state.items() if key != PARTIAL_MARK}, keep=True)
