"""Folders of torch.distributed.checkpoint (DCP), written and read in one process without a process group.

What is written has two keys: "model", a state dict, and with the optimizer "optim", in the form of
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: state and groups by names of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

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
        except CheckpointException as error:  # which is no Exception, and has the reason in a traceback
            reason, _ = next(iter(error.failures.values()))
            raise reason from None


class _Planner(DefaultSavePlanner):
    """Looks for tensors when they are written."""

    def __init__(self, later: Mapping[int, Later]) -> None:
        super().__init__()
        self._later = later

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._later[id(found)].read() if id(found) in self._later else found
