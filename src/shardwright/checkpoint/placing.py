"""Reading values of a checkpoint straight to where they belong, each file once, in its order, and checked on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.manifest import FileRecord, KeyPath
from shardwright.checkpoint.plan import Copy
from shardwright.checkpoint.reader import Reader, ends_of
from shardwright.checkpoint.torch_file import TorchFile, Transfer, is_checkable
from shardwright.topology.host_memory import empty_apart


class Placing(Reader):
    """A reader that first hears of everything that is wanted, and then reads and checks each byte once.

    check: compare what is read with the manifest's sums of blocks, where it has some.
    in_place: live tensors are overwritten while their values are checked; else only when all are known to be good, which
        takes a second pass over what is for them.
    Protocol: value, placed, fill, ... name what is wanted; check_all; run.
    """

    def __init__(self, folder: Any, records: Mapping[str, FileRecord], *, trust: bool, check: bool, in_place: bool) -> None:
        super().__init__(folder, trust=trust)
        self._records = records
        self._check = check
        self._in_place = in_place
        self._files: dict[str, TorchFile] = {}
        self._new: set[int] = set()
        self._wanted: dict[str, list[Transfer]] = {}

    def _content(self, file: str) -> Any:
        path, record = self._folder / file, self._records[file]
        check = self._check and is_checkable(record)
        self._files[file] = TorchFile(path, record, trust=self._trust, check=check)
        return self._files[file].content

    def value(self, file: str, key: KeyPath) -> Any:
        """What lies under a key of a file; of tensors only what is `placed` gets its content."""
        return self.outline(file, key)

    def room(self, shape: Sequence[int], dtype: torch.dtype, live: Any) -> Tensor:
        """Memory for a value: that of the live one if it is a tensor of the same kind, else new."""
        if isinstance(live, Tensor) and (live.shape, live.dtype, live.layout) == (shape, dtype, torch.strided):
            return live.detach()
        made = empty_apart(prod(shape), dtype, torch.device("cpu")).view(tuple(shape))
        self._new.add(made.untyped_storage().data_ptr())
        return made

    def placed(self, file: str, value: Any, live: Any = None) -> Any:
        """A part of a file's content whose tensors are the caller's to keep once `run` has read them.

        live: such a value of now. Its tensors are filled, and are the result, where shape and dtype are the same.
        """
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return value.clone()
            target = self.room(value.shape, value.dtype, live)
            self._want(file, value, target)
            return target
        if isinstance(value, dict):
            inner = live if isinstance(live, dict) else {}
            items = {key: self.placed(file, item, inner.get(key)) for key, item in value.items()}
            if type(value) is dict:
                return items
            made = value.copy()  # with what else it has, such as the factory of a defaultdict
            for key, item in items.items():
                made[key] = item
            return made
        if type(value) in (list, tuple):
            return type(value)(self.placed(file, item) for item in value)
        return value

    def fill(self, target: Tensor, offset: Sequence[int], copies: Iterable[Copy]) -> None:
        """Read boxes into a tensor whose first element is at `offset` of the whole one; its dtype stays."""
        for copy in copies:
            file = copy.source.file
            self._want(file, *ends_of(target, offset, copy, self.value(file, copy.source.key)))

    def _want(self, file: str, source: Tensor, target: Tensor) -> None:
        at_once = self._in_place or target.untyped_storage().data_ptr() in self._new
        self._wanted.setdefault(file, []).append(Transfer(source, target, at_once))

    def check_all(self) -> None:
        """Make sure of everything that was asked for; what goes into new memory, or all with `in_place`, is read by that.

        Raises: Damaged if bytes aren't those that were saved; without `in_place` nothing live has changed then.
        """
        for file in sorted(self._wanted) if self._check else ():
            self._wanted[file] = self._files[file].check(self._wanted[file])

    def run(self) -> None:
        """Read the rest."""
        wanted, self._wanted = self._wanted, {}
        for file in sorted(wanted):
            self._files[file].fetch(wanted[file])
