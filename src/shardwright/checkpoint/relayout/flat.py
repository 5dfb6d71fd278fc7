"""The flat groups of a layout with sharded data parallelism, out of another checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwright.checkpoint.exchange.source import Source
from shardwright.checkpoint.flat_groups import FlatGroups, FlatParameter
from shardwright.checkpoint.manifest import OBJECT, Entry
from shardwright.checkpoint.relayout.target import Member, OptimizerFile, Target
from shardwright.checkpoint.state import MASTER, TensorRow


class FlatFiles:
    """What is in flat groups of a target's files: nothing where it has no shards of whole parameters, or no optimizer.

    names: the weights that are in them and nowhere else.
    """

    def __init__(self, source: Source, target: Target) -> None:
        self._source = source
        self._degree = target.layout.sharded_data_parallel_degree
        self._model = {entry.name: entry for entry in source.entries("model")}
        self._masters = {e.name: e for e in source.entries("fp16_states") if e.state == MASTER and e.dtype == "float32"}
        self._first = target.optimizers[0] if self._degree > 1 and source.has_optimizer else None
        first = None if self._first is None else self.of(self._first)
        self.names = set() if first is None else first.names(source.manifest.ties)
        before = source.manifest.layout.sharded_data_parallel_degree
        self.changes_user_content = self._first is not None or before > 1

    def of(self, file: OptimizerFile) -> FlatGroups | None:
        """What goes into one rank's file."""
        if self._first is None:
            return None
        groups = [[self._described(member) for member in group] for group in file.groups]
        shard = int(file.names["optimizer"].removesuffix(".pt").rpartition("_")[2])

        def parts() -> list[list[Tensor]]:
            return [self._blocks(flat, *group) for group in zip(groups, file.groups, strict=True)]

        flat = FlatGroups(self._degree, shard, groups, self._buffer_names(), exchange=lambda: None, parts=parts)
        return flat

    def user_content(self, content: Any) -> Any:
        """As a job of the target's layout writes it."""
        flat = None if self._first is None else self.of(self._first)
        return content if flat is None else flat.user_content(content)

    def with_ties(self, table: Sequence[TensorRow]) -> list[TensorRow]:
        """Rows of parameters, and the same of other names that they have."""
        rows = {row.name: row for row in table}
        for names in self._source.manifest.ties:
            known = next((rows[name] for name in names if name in rows), None)
            if known is not None:
                rows.update((name, dataclasses.replace(known, name=name)) for name in names if name in self._model)
        return list(rows.values())

    def _described(self, member: Member) -> FlatParameter:
        name = member.row.name
        master = name in self._masters
        return FlatParameter(name, member.row.shape, not master and self._model[name].dtype == "float32", master)

    def _value(self, name: str) -> Entry:
        return self._masters.get(name, self._model[name])

    def _blocks(self, flat: FlatGroups, parameters: Sequence[FlatParameter], members: Sequence[Member]) -> list[Tensor]:
        return [
            self._source.run(self._value(p.name), member.row.box, flat.span(p), flat.block(p))
            for p, member in zip(parameters, members, strict=True)
        ]

    def _buffer_names(self) -> list[str]:
        manifest = self._source.manifest
        structure = manifest.structure or {}
        parameters = {p[0] for p in structure.get("parameters", ())}
        parameters |= {name for names in (*manifest.param_groups, *manifest.ties) for name in names}
        return [e.name for e in self._model.values() if e.dtype != OBJECT and e.name not in parameters]
