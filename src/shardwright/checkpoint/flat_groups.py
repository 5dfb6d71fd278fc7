"""Shards of sharded data parallelism in the form of the original's files, with each value stored once. Pure.

An optimizer file has "partition_count", the degree, and "fp32_flat_groups": for each parameter group one fp32 tensor, in which
this rank's blocks of the group's parameters lie back to back. A block is the r-th of `degree` equal parts of the flattened
parameter, padded with zeros. From these, and from "param_shapes" and "buffer_names" in `user_content.pt`, scripts put the model
together without any library. In full precision the values are the weights, in half precision the fp32 masters; no other file
has them, and the manifest points into the flat tensors.

`fully_shard` cuts rows, which are not always blocks. So a rank reads what it holds by way of the manifest, like one of another
layout.

Source: api.md 8.5, 9.5 and 9.8.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.checkpoint.manifest import Entry, Slice
from shardwright.checkpoint.state import MASTER, TensorRow
from shardwright.checkpoint.torch_stream import Joined

MODULE = "module"
"""Key of the state dict in a model file."""
COUNT = "partition_count"
GROUPS = "fp32_flat_groups"
SHAPES = "param_shapes"
BUFFERS = "buffer_names"
_ADDED = "_smp_added"
_WRAPPED = "_smp_user_content"


class FlatParameter(NamedTuple):
    """One parameter of the optimizer.

    shape: of the whole one, with tensor parallelism of this rank's slice.   is_weight, is_master: the optimizer holds the weight
    itself, or a master of it, in fp32; neither for a weight of another dtype, whose block is a copy in fp32.
    """

    name: str
    shape: tuple[int, ...]
    is_weight: bool
    is_master: bool


@dataclass(frozen=True)
class FlatGroups:
    """What a rank writes.

    shard: this rank's place in its shard group.   exchange: called by every rank, before `parts`; gets elements of this rank's
    blocks that others hold.   parts: of each flat group what lies in it back to back, flat.
    """

    degree: int
    shard: int
    groups: Sequence[Sequence[FlatParameter]]
    buffer_names: Sequence[str]
    exchange: Callable[[], None]
    parts: Callable[[], Sequence[Sequence[Tensor]]]

    def block(self, parameter: FlatParameter) -> int:
        """Elements of each rank's block, padding included."""
        return -(-prod(parameter.shape) // self.degree)

    def span(self, parameter: FlatParameter) -> tuple[int, int]:
        """The elements of this rank's block, without padding."""
        block, num_elements = self.block(parameter), prod(parameter.shape)
        return min(self.shard * block, num_elements), min((self.shard + 1) * block, num_elements)

    def beside_state(self) -> dict[str, Any]:
        """What the optimizer file has besides."""
        return {COUNT: self.degree, GROUPS: [Joined(group, torch.float32) for group in self.parts()]}

    def user_content(self, content: Any) -> Any:
        """The user's object with what helpers read beside it at top level; what is under these keys already stays.

        Anything but a dict is put into one. See `users_own`.
        """
        told = {
            SHAPES: [OrderedDict((p.name, torch.Size(p.shape)) for p in group) for group in self.groups],
            BUFFERS: list(self.buffer_names),
        }
        if not isinstance(content, dict):
            return {_WRAPPED: content, **told}
        added = [key for key in told if key not in content]
        if not added:
            return content
        made = copy.copy(content)
        for key in added:
            made[key] = told[key]
        made[_ADDED] = added
        return made

    def names(self, ties: Sequence[Sequence[str]]) -> set[str]:
        """The weights that are in the flat groups and need no other place, by all their names."""
        return {name for group in self.groups for p in group if p.is_weight for name in _tied(p.name, ties)}

    def without_masters(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """The state of a file of masters less those that are in the flat groups."""
        parameters = [p for group in self.groups for p in group]
        left = {
            index: {key: value for key, value in values.items() if key != MASTER or not parameters[index].is_master}
            for index, values in state.items()
        }
        return {index: values for index, values in left.items() if values}

    def entries(self, file: str, table: Sequence[TensorRow], ties: Sequence[Sequence[str]]) -> Iterator[Entry]:
        """Where in an optimizer file weights and masters are.

        table: of parameters, see `CheckpointModel.parameter_table`.   ties: groups of names of one parameter.
        """
        rows = {row.name: row for row in table}
        for number, group in enumerate(self.groups):
            at = 0
            for p in group:
                span, block = self.span(p), self.block(p)
                if span[0] < span[1] or 0 in p.shape:
                    row = rows[p.name]
                    part = Slice(file, (GROUPS, number), row.offset, row.local_shape, span, at=at)
                    if p.is_master:
                        yield Entry("fp16_states", p.name, MASTER, row.shape, "float32", (part,))
                    elif p.is_weight:
                        known = (name for name in _tied(p.name, ties) if name in rows)
                        yield from (Entry("model", name, None, row.shape, "float32", (part,)) for name in known)
                at += block


def in_module(state: Mapping[str, Any], elsewhere: Collection[str], mark: str) -> dict[str, Any]:
    """The content of a model file, with empty tensors in place of what is elsewhere."""
    module = {name: torch.empty(0) if name in elsewhere else value for name, value in state.items() if name != mark}
    return {MODULE: module, mark: True}


def users_own(content: Any) -> Any:
    """What the user saved, from what `FlatGroups.user_content` or a save without sharding made of it; may be changed."""
    if not isinstance(content, dict):
        return content
    if _WRAPPED in content:
        return content[_WRAPPED]
    for key in content.pop(_ADDED, ()):
        content.pop(key, None)
    return content


def _tied(name: str, ties: Sequence[Sequence[str]]) -> Sequence[str]:
    return next((names for names in ties if name in names), (name,))
