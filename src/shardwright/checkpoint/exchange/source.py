"""One checkpoint of ours, partial or full, as whole tensors and settings that are read when they are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import plan, state
from shardwright.checkpoint.flat_groups import users_own
from shardwright.checkpoint.inspection import Checkpoint, usable_manifest
from shardwright.checkpoint.manifest import OBJECT, Entry, Manifest, Slice
from shardwright.checkpoint.reader import unrolled
from shardwright.errors import CheckpointError

SCALER_IS_NOT = ("state", "param_groups", state.PARAM_NAMES, state.SPANS, state.MASTER, state.PARTIAL_MARK)


class Source:
    """What is in a checkpoint.

    manifest: its own; of a full checkpoint with entries for the optimizer too, which is one file there.
    trust: read files that could run code.
    """

    def __init__(self, checkpoint: Checkpoint, *, trust: bool) -> None:
        self.checkpoint = checkpoint
        self.trust = trust
        self.reader = checkpoint.reader(trust=trust)
        self.manifest = usable_manifest(checkpoint)
        if checkpoint.kind == "full" and (file := self.manifest.role_of("optimizer")) is not None:
            self.manifest = _with_optimizer(self.manifest, file, self.reader.outline(file, ()))

    @property
    def has_optimizer(self) -> bool:
        """Was an optimizer saved?"""
        return self.manifest.role_of("optimizer") is not None

    def entries(self, role: str) -> Iterator[Entry]:
        """Of one role, in the order in which they were saved."""
        return (entry for entry in self.manifest.entries if entry.role == role)

    def whole(self, entry: Entry) -> Any:
        """The tensor (mapped where one file has all of it), or the value that isn't one."""
        if entry.dtype == OBJECT or (entry.slices[0].shape == entry.shape and entry.slices[0].span is None):
            return self.reader.at(entry.slices[0])
        zeros = (0,) * len(entry.shape)
        return self.part(entry, zeros, entry.shape)

    def part(self, entry: Entry, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a tensor, in memory of its own."""
        made = torch.empty(shape, dtype=dtype_of(entry))
        self.reader.fill(made, offset, plan.plan(entry, [plan.box_of(offset, shape)]))
        return made

    def run(self, entry: Entry, box: plan.Box, span: tuple[int, int], length: int) -> Tensor:
        """Elements [start, stop) of a box, in row-major order, with zeros behind up to `length`."""
        made = torch.zeros(length, dtype=dtype_of(entry))
        offset, shape = [start for start, _ in box], [stop - start for start, stop in box]
        for part in plan.stored(Slice("", (), tuple(offset), tuple(shape), span)):
            self.reader.fill(unrolled(made, part), [start for start, _ in part.box], plan.plan(entry, [part.box]))
        return made

    def groups(self) -> list[dict[str, Any]]:
        """The settings of each parameter group, without its parameters. Raises: CheckpointError without an optimizer."""
        file = self.manifest.role_of("optimizer")
        if file is None:
            raise CheckpointError(f"{self.checkpoint.name} holds no optimizer: it was saved with optimizer=None")
        known = ("params", state.PARAM_NAMES)
        return [{k: v for k, v in group.items() if k not in known} for group in self.reader.value(file, ("param_groups",))]

    @property
    def groups_are_named(self) -> bool:
        """Does torch keep names of parameters in the groups?"""
        file = self.manifest.role_of("optimizer")
        return file is not None and any(state.PARAM_NAMES in g for g in self.reader.value(file, ("param_groups",)))

    def scaler(self) -> dict[str, Any]:
        """Plain values of the loss scaler; {} in full precision."""
        file = self.manifest.role_of("fp16_states") or (self.manifest.role_of("optimizer") if self.checkpoint.kind == "full" else None)
        if file is None:
            return {}
        keys = (key for key in self.reader.outline(file, ()) if key not in SCALER_IS_NOT)
        return {key: self.reader.value(file, (key,)) for key in keys}

    def user_content(self) -> Any:
        """What resume gives back."""
        file = self.manifest.role_of("user_content")
        return {} if file is None else users_own(self.reader.value(file, ()))


def dtype_of(entry: Entry) -> torch.dtype:
    """The dtype of a tensor."""
    found: torch.dtype = getattr(torch, entry.dtype)
    return found


def _with_optimizer(manifest: Manifest, file: str, content: dict[str, Any]) -> Manifest:
    found = state.optimizer_entries("optimizer", file, content["state"], content[state.PARAM_NAMES], ())
    roles = [dataclasses.replace(e, role="fp16_states") if e.state == state.MASTER else e for e in found]
    return dataclasses.replace(manifest, entries=(*manifest.entries, *roles))
