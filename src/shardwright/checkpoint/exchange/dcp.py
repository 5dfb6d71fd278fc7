"""Folders of torch.distributed.checkpoint (DCP), written and read in one process without a process group.

What is written has two keys: "model", a state dict, and with the optimizer "optim", in the form of
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: state and groups by names of parameters.

What others have written is read tensor by tensor, from a disk or out of an object store.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwright.checkpoint import storage
from shardwright.checkpoint.deferred import Deferred
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError

MODEL = "model"
OPTIMIZER = "optim"
METADATA = ".metadata"
"""The file that makes a folder one of these."""


class Later:
    """A tensor that is read when it is written.

    shape, dtype: of it, known before.   read: makes it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read = read

    def described(self) -> Tensor:
        """A tensor without storage that looks like it."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a new DCP folder; one tensor is held at a time, for each has its own file.

    content: nested dicts, with `Later` in the place of tensors.
    Raises: what `Later.read` raises, and OSError.
    """
    later: dict[int, Later] = {}

    def describe(value: Any) -> Any:
        if isinstance(value, Later):
            described = value.described()
            later[id(described)] = value
            return described
        if isinstance(value, Mapping):
            return {key: describe(item) for key, item in value.items()}
        return value

    writer = FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # one process is what is wanted
        try:
            save(describe(content), storage_writer=writer, planner=_Planner(later), no_dist=True)
        except CheckpointException as error:
            raise _reason(error) from None


def _reason(error: CheckpointException) -> BaseException:
    """Why torch raised this, which is no Exception, and has the reason in a traceback."""
    return next(iter(error.failures.values()))[0]


class _Planner(DefaultSavePlanner):
    """Looks for tensors when they are written."""

    def __init__(self, later: Mapping[int, Later]) -> None:
        super().__init__()
        self._later = later

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._later[id(found)].read() if id(found) in self._later else found


# ------------------------------------------------------------------ reading


class Folder:
    """What somebody has written. Its description, and all that isn't a tensor, is unpickled: only for folders that are trusted.

    content: nested, with deferred tensors, which `values` gets.
    Raises: CheckpointError if it can't be read; OSError from a disk or a store.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        with self._readable():
            self._reader = _Reader(place)
            self._metadata = self._reader.read_metadata()
            paths = self._metadata.planner_data if isinstance(self._metadata.planner_data, Mapping) else {}
            found: dict[str, Any] = {}
            for key, told in self._metadata.state_dict_metadata.items():
                if isinstance(told, TensorStorageMetadata):
                    found[key] = Deferred.named(key, tuple(told.size), told.properties.dtype)
                else:
                    found[key] = None
            objects: dict[str, Any] = {key: None for key, value in found.items() if value is None}
            found.update(self._load(objects))
        self.content: dict[str, Any] = {}
        for key, value in found.items():
            _put(self.content, paths.get(key, (key,)), value)

    def values(self, tensors: Sequence[Deferred]) -> list[Tensor]:
        """Tensors of the content, in memory. Raises: as the constructor."""
        names = [next(iter(tensor.needs())) for tensor in tensors]
        made = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in zip(names, tensors, strict=True)}
        with self._readable():
            self._load(made)
        return [made[name] for name in names]

    def _load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill in tensors, and other values."""
        if wanted:
            load(wanted, storage_reader=self._reader, no_dist=True)
        return wanted

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")  # one process is what is wanted
                yield
        except (Exception, CheckpointException) as found:  # pickle and torch raise anything
            error = _reason(found) if isinstance(found, CheckpointException) else found
            if isinstance(error, (CheckpointError, OSError)) or not isinstance(error, Exception):
                raise error from None
            raise CheckpointError(
                f"the DCP folder can't be read: {type(error).__name__}: {error}", where=str(self._place)
            ) from error


class _Files(FileSystem):
    """A disk, or an object store."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with storage.of(path).open(path) as file:
            yield cast(io.IOBase, file)

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix


class _Reader(FileSystemReader):
    """Reads what it is asked for; the description only once."""

    def __init__(self, place: Place) -> None:
        super().__init__(os.curdir)
        self.fs = _Files()
        self.path: Any = place
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def _put(content: Any, path: Sequence[Any], value: Any) -> None:
    """Set a value inside nested dicts and lists; a number in a path is an index."""
    for step, after in pairwise(path):
        content = _step(content, step, [] if isinstance(after, int) else {})
    _step(content, path[-1], value)


def _step(content: Any, step: Any, value: Any) -> Any:
    """What is there, else the value, which is put there."""
    if isinstance(content, dict):
        return content.setdefault(step, value)
    content.extend([None] * (step + 1 - len(content)))
    if content[step] is None:
        content[step] = value
    return content[step]
