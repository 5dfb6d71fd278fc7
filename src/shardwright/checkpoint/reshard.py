"""Loading a partial checkpoint into another layout than it was saved with.

Every rank asks the manifest for what it holds now, by plain name and place in the whole tensor, and reads just that
(`plan`, `reader`). Weights go straight into the parameters; optimizer state is put together for this rank's parameters.

What a change of precision means: masters of a half precision run become the weights of an fp32 run; where there are no
masters, the saved weights are their values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import plan, state
from shardwright.checkpoint.choice import Choice
from shardwright.checkpoint.manifest import OBJECT, Entry, Slice
from shardwright.checkpoint.placing import Placing
from shardwright.checkpoint.reader import unrolled
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer, TensorRow
from shardwright.errors import CheckpointError
from shardwright.log import get_logger, once

_log = get_logger(__name__)

_STATE_ROLES = ("optimizer", "fp16_states")


def plan_load(
    chosen: Choice,
    model: CheckpointModel,
    optimizer: CheckpointOptimizer | None,
    reader: Placing,
    *,
    with_model: bool,
    strict: bool,
    moments: bool,
) -> Callable[[], None]:
    """Ask the reader for this rank's share of the model, and of the optimizer if there is one.

    Called by: every rank, once the model is partitioned. Collectives: none.
    with_model: does the checkpoint hold a model?   moments: False plans for masters and loss scaler only.
    Returns: what reads and loads it.
    Raises: CheckpointError naming what is nowhere in the checkpoint; Damaged.
    """
    work = _Load(chosen, model, reader)
    rest = work.plan_model(strict=strict) if with_model else {}
    content = None if optimizer is None else work.plan_optimizer(optimizer, strict=strict, moments=moments)

    def load() -> None:
        reader.run()
        if rest:
            model.load_local(rest, strict=False)
        if optimizer is not None and content is not None:
            optimizer.load_local(content)

    return load


class _Load:
    """One load on one rank."""

    def __init__(self, chosen: Choice, model: CheckpointModel, reader: Placing) -> None:
        self._chosen = chosen
        self._model = model
        self._reader = reader
        self._rows = {row.name: row for row in model.tensor_table()}
        self._parameters = {row.name: row for row in model.parameter_table()}
        self._spans: state.Spans = {}
        self._entries: dict[str, list[Entry]] = {}
        for entry in chosen.manifest.entries:
            self._entries.setdefault(entry.name, []).append(entry)

    # ------------------------------------------------------------------ the model

    def plan_model(self, *, strict: bool) -> dict[str, Any]:
        """Ask for this rank's parameters and buffers, in place. Returns: values of the model that aren't tensors."""
        rest = {}
        for name, target in self._model.local_state_dict().items():
            entry = self._of_model(name)
            if name == state.PARTIAL_MARK or (entry is None and not strict):
                continue
            if entry is None:
                raise CheckpointError(f"{name!r} is only in the model", remedy="strict=False goes on without it")
            if isinstance(target, Tensor) and entry.dtype != OBJECT:
                self._fill(target, self._weights(entry, target.dtype), self._rows[name])
            else:
                rest[name] = self._reader.at(entry.slices[0])
        return rest

    def _of_model(self, name: str) -> Entry | None:
        return next((entry for entry in self._entries.get(name, ()) if entry.role == "model"), None)

    def _weights(self, entry: Entry, dtype: torch.dtype) -> Entry:
        """Where the values of a parameter are best: in its master, if the parameter is fp32 now."""
        master = self._master(entry.name)
        return entry if master is None or dtype is not torch.float32 else master

    def _master(self, name: str) -> Entry | None:
        found = (e for e in self._entries.get(name, ()) if e.role == "fp16_states" and e.state == state.MASTER)
        return next(found, None)

    def _fill(self, target: Tensor, entry: Entry, row: TensorRow) -> None:
        copies = plan.plan(entry, [plan.box_of(row.offset, row.local_shape)])
        self._reader.fill(target, row.offset, copies)

    # ------------------------------------------------------------------ the optimizer

    def plan_optimizer(self, optimizer: CheckpointOptimizer, *, strict: bool, moments: bool) -> dict[str, Any]:
        """Ask for the state of what this rank updates, parameters or pieces. Returns: what to hand to the optimizer then."""
        manifest = self._chosen.manifest
        present = optimizer.local_state_dict(gather_if_shard=False)
        present_half = optimizer.half_precision_state()
        half = present_half is not None
        self._spans = present.get(state.SPANS) or {}
        names = optimizer.group_names()
        settings = state.settings_of(present)
        if moments:
            settings = self._settings(optimizer.full_group_names(), strict=strict)
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        for options, group in zip(settings, names, strict=True):
            indices = range(index, index + len(group))
            index += len(group)
            groups.append({**options, "params": list(indices)})
            for number, name in zip(indices, group, strict=True):
                live = {**present["state"].get(number, {})}
                if present_half is not None:
                    live.update(present_half["state"].get(number, {}))
                values = self._state_of(name, live, half=half, moments=moments)
                if values:
                    states[number] = values
        scaler = {}
        if half and manifest.has("fp16_states"):
            first = next(name for name, record in manifest.files.items() if record.role == "fp16_states")
            known = ("state", "param_groups", state.PARAM_NAMES, state.SPANS)
            scaler = {key: value for key, value in self._reader.value(first, ()).items() if key not in known}
            scaler = self._reader.placed(first, scaler)
        spans = {state.SPANS: self._spans} if self._spans else {}
        return {"state": states, "param_groups": groups, **scaler, **spans, state.PARTIAL_MARK: True}

    def _settings(self, present: Sequence[Sequence[str]], *, strict: bool) -> list[dict[str, Any]]:
        """The settings of each group, which are the same in every file."""
        manifest = self._chosen.manifest
        first = next(name for name, record in manifest.files.items() if record.role == "optimizer")
        groups = self._reader.placed(first, self._reader.value(first, ("param_groups",)))
        everything = {
            "state": {},
            "param_groups": [
                {**group, "params": [f"{number} {name}" for name in names]}
                for number, (group, names) in enumerate(zip(groups, manifest.param_groups, strict=True))
            ],
            state.PARAM_NAMES: {
                f"{number} {name}": name for number, names in enumerate(manifest.param_groups) for name in names
            },
        }
        attached = state.attach_by_name(everything, present, strict=strict)
        return state.settings_of(attached)

    def _state_of(self, name: str, live: Mapping[Any, Any], *, half: bool, moments: bool) -> dict[Any, Any]:
        """Everything saved of one parameter, as torch nests it. live: its state of now."""
        values: dict[Any, Any] = {}
        for entry in self._entries.get(name, ()):
            if entry.role not in _STATE_ROLES or not (half if entry.state == state.MASTER else moments):
                continue
            path = state.path_of(entry)
            inner, now = values, live
            for step in path[:-1]:
                inner, now = inner.setdefault(step, {}), now.get(step, {}) if isinstance(now, dict) else {}
            inner[path[-1]] = self._value(entry, now.get(path[-1]) if isinstance(now, dict) else None)
        row = self._parameters.get(name)
        saved = self._of_model(name)
        if half and state.MASTER not in values and row is not None and saved is not None:
            once(_log, logging.INFO, "the checkpoint has no fp32 masters; they begin as its weights")
            values[state.MASTER] = self._assembled(saved, row, torch.float32, live.get(state.MASTER))
        return values

    def _value(self, entry: Entry, live: Any) -> Any:
        """One value of a parameter's state: this rank's part of it, or all of it where it isn't cut like the parameter."""
        row = self._parameters.get(entry.name)
        if entry.dtype != OBJECT and row is not None and entry.shape == row.shape:
            return self._assembled(entry, row, getattr(torch, entry.dtype), live)
        return self._reader.placed(entry.slices[0].file, self._reader.at(entry.slices[0]), live)

    def _assembled(self, entry: Entry, row: TensorRow, dtype: torch.dtype, live: Any) -> Tensor:
        """This rank's part of a tensor that is cut like its parameter, or its piece of that part."""
        span = self._spans.get(row.name)
        if span is None:
            made = self._reader.room(row.local_shape, dtype, live)
            self._fill(made, entry, row)
            return made
        start, stop = span[0], span[1]
        strides = tuple(span[3]) if len(span) > 3 else None
        made = self._reader.room((stop - start,), dtype, live)
        for part in plan.stored(Slice("", (), row.offset, row.local_shape, (start, stop), strides)):
            first = [low for low, _ in part.box]
            self._reader.fill(unrolled(made, part), first, plan.plan(entry, [part.box]))
        return made


def files_of(chosen: Choice, *, with_optimizer: bool) -> Iterator[str]:
    """The state files that such a load may read, on whichever rank."""
    manifest = chosen.manifest
    roles = ("model", "fp16_states", *(("optimizer",) if with_optimizer else ()))
    holders = {part.file for entry in manifest.entries if entry.role in roles for part in entry.slices}
    return (name for name, record in manifest.files.items() if record.role in roles or name in holders)

