"""Carrying out plans of reads: boxes out of mapped files into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import range_reads, safe_loading
from shardwright.checkpoint.manifest import KeyPath, Slice
from shardwright.checkpoint.plan import Box, Copy, Stored
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.errors import CheckpointError


class Reader:
    """The files of one checkpoint, each opened when something of it is first read: mapped, or in an object store read
    only as far as it is asked for.

    elsewhere: those that don't lie in the folder under their own names.
    """

    def __init__(self, folder: Place, *, trust: bool, elsewhere: Mapping[str, Place] | None = None) -> None:
        self._folder = folder
        self._elsewhere = elsewhere or {}
        self._trust = trust
        self._open: dict[str, Any] = {}

    def value(self, file: str, key: KeyPath) -> Any:
        """What lies under a key of a file; tensors are mapped where the file is local."""
        found = self.outline(file, key)
        place = self._place(file)
        return range_reads.fetched(place, found) if isinstance(place, RemotePath) else found

    def outline(self, file: str, key: KeyPath) -> Any:
        """The same, to look at shapes and keys: tensors need not have their content."""
        if file not in self._open:
            self._open[file] = self._content(file)
        try:
            return follow(self._open[file], key)
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{file} has nothing under {'.'.join(map(str, key))!r}, as the manifest says", where=str(self._folder)
            ) from error

    def _content(self, file: str) -> Any:
        return safe_loading.read_lazily(self._place(file), trust=self._trust)

    def _place(self, file: str) -> Place:
        return self._elsewhere.get(file, self._folder / file)

    def at(self, part: Slice) -> Any:
        """What a slice of the manifest names."""
        return self.value(part.file, part.key)

    def fill(self, target: Tensor, offset: Sequence[int], copies: Iterable[Copy]) -> None:
        """Read boxes into a tensor whose first element is at `offset` of the whole one; its dtype stays."""
        for copy in copies:
            file = copy.source.file
            found, place = ends_of(target, offset, copy, self.outline(file, copy.source.key))
            range_reads.copy(self._place(file), place, found)


@torch.no_grad()
def fill(target: Tensor, offset: Sequence[int], copy: Copy, content: Tensor) -> None:
    """Copy one box. content: the tensor that the copy's source names."""
    found, place = ends_of(target, offset, copy, content)
    place.copy_(found)


def ends_of(target: Tensor, offset: Sequence[int], copy: Copy, content: Tensor) -> tuple[Tensor, Tensor]:
    """The two ends of copying one box, as views: what is stored, and where it belongs."""
    return taken(content, copy), target[relative(copy.box, offset)]


def taken(content: Tensor, copy: Copy) -> Tensor:
    """The box of a copy, as a view of the stored tensor."""
    return unrolled(content, copy.source)[relative(copy.box, [start for start, _ in copy.source.box])]


def unrolled(content: Tensor, stored: Stored) -> Tensor:
    """A stored tensor in the shape of its box; of a flat one the part that is the box."""
    if stored.flat is None:
        return content
    sizes = [stored.box[dim][1] - stored.box[dim][0] for dim in stored.order]
    run = content[stored.flat : stored.flat + prod(sizes)].view(sizes)
    return run.permute([stored.order.index(dim) for dim in range(len(sizes))])


def follow(content: Any, key: KeyPath) -> Any:
    """What lies under a path of dict keys and list indices."""
    for step in key:
        content = content[step]
    return content


def relative(box: Box, offset: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first element is at `offset`."""
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, offset, strict=True))

