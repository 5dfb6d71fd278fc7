"""Safetensors files that are written tensor by tensor: what they will hold is known first, the tensors come in any order.

Several files have an index, in the form of Hugging Face: tensors fill files in their order, up to a size.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoint import storage
from shardwright.checkpoint.storage import RemotePath
from shardwright.checkpoint.torch_stream import row_major_bytes
from shardwright.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


_MOST_HEADER_BYTES = 100 << 20
"""What the format allows."""


class SafetensorsFile:
    """One new file. In order: `write` for every tensor, `finish` once; `close` in any case.

    tensors: what will be written, with shape and dtype; values aren't looked at.
    Raises: CheckpointError for a dtype that the format doesn't have.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, int] = {}
        position = 0
        # Large elements first, so that all are aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(f"{name!r} is {tensor.dtype}, which safetensors files can't hold")
            end = position + _bytes_of(tensor)
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
            self._places[name] = position
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self._file = open(path, "xb")  # noqa: SIM115 - closed by finish or close
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place. Raises: OSError if the disk refuses."""
        self._file.seek(self._first + self._places.pop(name))
        for piece in row_major_bytes(tensor):
            self._file.write(piece)

    def finish(self) -> None:
        """Bring the file to the disk. Raises: OSError if the disk refuses; CheckpointError if a tensor was not written."""
        if self._places:
            raise CheckpointError(f"{len(self._places)} tensors were not written, the first is {min(self._places)!r}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close without promises."""
        with suppress(OSError):
            self._file.close()


class SafetensorsFiles:
    """The weights of a folder. In order: `write` for every tensor, `finish` once; `close` in any case.

    tensors: as of `SafetensorsFile`.   most_bytes: of the tensors in one file; a larger tensor has a file of its own.
    Raises: CheckpointError for a dtype that the format doesn't have.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], most_bytes: int) -> None:
        self._folder = folder
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        groups = list(_filled(tensors, most_bytes)) or [[]]
        self._weight_map: dict[str, str] = {}
        self.num_bytes = sum(_bytes_of(tensor) for tensor in tensors.values())
        for number, names in enumerate(groups, 1):
            name = "model" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}"
            self._weight_map.update(dict.fromkeys(names, f"{name}.safetensors"))
            self._files.append(SafetensorsFile(folder / f"{name}.safetensors", {name: tensors[name] for name in names}))
            self._file_of.update(dict.fromkeys(names, self._files[-1]))

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place. Raises: OSError if the disk refuses."""
        self._file_of[name].write(name, tensor)

    def finish(self) -> None:
        """Bring the files to the disk, and write the index of several. Raises: as `SafetensorsFile.finish`."""
        for file in self._files:
            file.finish()
        if len(self._files) > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(self._weight_map.items()))}
            storage.of(self._folder).put(self._folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())

    def close(self) -> None:
        """Close without promises."""
        for file in self._files:
            file.close()


def outline(path: RemotePath) -> dict[str, Tensor]:
    """The tensors of a file in an object store, without their content; `range_reads` finds it.

    Raises: CheckpointError if it is no safetensors file.
    """
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    made: dict[str, Tensor] = {}
    try:
        first = 8 + int.from_bytes(path.read_range(0, 8), "little")
        header = json.loads(path.read_range(8, min(first, _MOST_HEADER_BYTES)))
        header.pop("__metadata__", None)
        for name, told in header.items():
            tensor = torch.empty(told["shape"], dtype=dtypes[told["dtype"]], device="meta")
            start, stop = told["data_offsets"]
            if stop - start != _bytes_of(tensor):
                raise ValueError(f"{name!r} has {stop - start} bytes, expected {_bytes_of(tensor)}")
            tensor.untyped_storage()._checkpoint_offset = first + start  # type: ignore[attr-defined]
            made[name] = tensor
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error!r}", where=str(path)) from error
    return made


def _filled(tensors: Mapping[str, Tensor], most_bytes: int) -> Iterable[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + _bytes_of(tensor) > most_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes_of(tensor)
    if names:
        yield names


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
