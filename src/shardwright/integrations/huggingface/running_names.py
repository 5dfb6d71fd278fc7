"""A full checkpoint in the names of the original model, seen in those of the model that ran, whose modules were replaced."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import state
from shardwright.checkpoint.deferred import Deferred
from shardwright.checkpoint.exchange.source import Source, dtype_of
from shardwright.checkpoint.manifest import OBJECT, Entry, Slice
from shardwright.checkpoint.plan import Box, box_of
from shardwright.checkpoint.reader import relative
from shardwright.engine.substitution import renamed
from shardwright.errors import CheckpointError
from shardwright.integrations.huggingface import renaming


def in_running_names(source: Source) -> Source:
    """The source itself if it has those names, or its manifest doesn't tell them. Raises: CheckpointError if they don't fit it."""
    running = (source.manifest.origin or {}).get("running")
    return _Running(source, running) if running and running["renamings"] else source


class _Running(Source):
    """What one tensor is made of is read when it is wanted, and views of it are taken."""

    def __init__(self, source: Source, running: dict[str, Any]) -> None:
        super().__init__(source.checkpoint, trust=source.trust)
        self._written = {entry.name: entry for entry in self.entries("model") if entry.dtype != OBJECT}
        content: dict[str, Any] = {e.name: Deferred.named(e.name, e.shape, dtype_of(e)) for e in self._written.values()}
        for names in self.manifest.ties:
            known = [name for name in names if name in content]
            content.update((name, content[known[0]]) for name in known[1:])
        tables = [(prefix, renaming.from_record(record).passing()) for prefix, record in running["renamings"]]
        content = renamed(content, [(prefix, partial(table.to_distributed, copy=False)) for prefix, table in tables])
        for names in running["ties"]:
            known = [name for name in names if name in content]
            content.update((name, content[known[0]]) for name in names if known and name not in content)
        self._content: dict[str, Deferred] = {name: content[name] for name in running["names"] if name in content}
        lacking = [name for name in running["names"] if name not in content]
        if lacking or len(content) > len(self._content):
            odd = (lacking or sorted(content.keys() - self._content.keys()))[0]
            raise CheckpointError(
                f"the names of the running model don't follow from the file's: {odd!r} is in one of them only",
                where=str(source.checkpoint.place),
                remedy="convert a partial checkpoint, or a full one that was saved with translate_if_full=False",
            )
        made = tuple(_entry(source.checkpoint.name, name, tensor) for name, tensor in self._content.items())
        others = tuple(entry for entry in self.manifest.entries if entry.role != "model")
        origin = {**(self.manifest.origin or {}), "renamings": running["renamings"]}
        del origin["running"]
        ties = tuple(tuple(names) for names in running["ties"])
        self.manifest = dataclasses.replace(self.manifest, entries=(*made, *others), ties=ties, origin=origin)

    def whole(self, entry: Entry) -> Any:
        if entry.role != "model":
            return super().whole(entry)
        deferred = self._content[entry.name]
        return deferred.make({name: super(_Running, self).whole(self._written[name]) for name in deferred.needs()})

    def part(self, entry: Entry, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if entry.role != "model":
            return super().part(entry, offset, shape)
        found: Tensor = self.whole(entry)[relative(box_of(offset, shape), [0] * len(shape))]
        return found.clone(memory_format=torch.contiguous_format)

    def run(self, entry: Entry, box: Box, span: tuple[int, int], length: int) -> Tensor:
        if entry.role != "model":
            return super().run(entry, box, span, length)
        made = torch.zeros(length, dtype=dtype_of(entry))
        start, stop = span
        part = self.part(entry, tuple(first for first, _ in box), tuple(last - first for first, last in box))
        made[: stop - start] = part.reshape(-1)[start:stop]
        return made


def _entry(file: str, name: str, tensor: Deferred) -> Entry:
    shape = tuple(tensor.shape)
    return Entry("model", name, None, shape, state.dtype_name(tensor), (Slice(file, (name,), (0,) * len(shape), shape),))
