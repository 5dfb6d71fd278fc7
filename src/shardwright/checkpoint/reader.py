"""Carrying out plans of reads: boxes out of mapped files into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import safe_loading
from shardwright.checkpoint.manifest import KeyPath, Slice
from shardwright.checkpoint.plan import Box, Copy
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError


class Reader:
    """The files of one checkpoint, each opened and mapped when something of it is first read."""

    def __init__(self, folder: Place, *, trust: bool) -> None:
        self._folder = folder
        self._trust = trust
        self._open: dict[str, Any] = {}

    def value(self, file: str, key: KeyPath) -> Any:
        """What lies under a key of a file; tensors are mapped, not read."""
        if file not in self._open:
            self._open[file] = safe_loading.read_file(self._folder / file, trust=self._trust)
        found = self._open[file]
        try:
            for step in key:
                found = found[step]
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{file} has nothing under {'.'.join(map(str, key))!r}, as the manifest says", where=str(self._folder)
            ) from error
        return found

    def at(self, part: Slice) -> Any:
        """What a slice of the manifest names."""
        return self.value(part.file, part.key)

    def fill(self, target: Tensor, offset: Sequence[int], copies: Iterable[Copy]) -> None:
        """Read boxes into a tensor whose first element is at `offset` of the whole one; its dtype stays."""
        for copy in copies:
            fill(target, offset, copy, self.value(copy.source.file, copy.source.key))


@torch.no_grad()
def fill(target: Tensor, offset: Sequence[int], copy: Copy, content: Tensor) -> None:
    """Copy one box. content: the stored tensor that the copy's source names."""
    source = copy.source
    if source.flat is not None:
        sizes = [source.box[dim][1] - source.box[dim][0] for dim in source.order]
        run = content[source.flat : source.flat + prod(sizes)].view(sizes)
        content = run.permute([source.order.index(dim) for dim in range(len(sizes))])
    found = content[relative(copy.box, [start for start, _ in source.box])]
    target[relative(copy.box, offset)].copy_(found)


def relative(box: Box, offset: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first element is at `offset`."""
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, offset, strict=True))

