"""Files that load without running code: what may be inside, writing them, reading them.

Loading uses torch's weights-only unpickler with the allow-list below. Writing reads each file back the same
way, so that what save accepts, load returns; everything else is refused at save time with the name of the
type.

`trust=True`, or SHARDWRIGHT_TRUST_CHECKPOINTS=1, turns the check off on both sides: then a file may hold any
picklable object, and loading it may run any code its author put there.

Source: design.md section 9.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import functools
import io
import os
import pathlib
import pickle
import types
import uuid
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.serialization import (
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from shardwright.checkpoint import storage
from shardwright.checkpoint.integrity import HashingWriter
from shardwright.checkpoint.manifest import Blocks
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.checkpoint.storage.attempts import StorageError, attempt
from shardwright.errors import CheckpointError

TRUST_ENV = "SHARDWRIGHT_TRUST_CHECKPOINTS"
_ALLOWED_IN_WORDS = (
    "numbers, strings, bytes, None, lists, tuples, sets, dicts, collections, tensors and torch types, "
    "numpy scalars and arrays, argparse.Namespace, pathlib paths, datetime"
)


def trusted(trust: bool | None) -> bool:
    """Return the decision of the call, or of the environment where the call leaves it open."""
    if trust is not None:
        return trust
    return os.environ.get(TRUST_ENV, "").strip().lower() in ("1", "true", "yes", "on")


class Written(NamedTuple):
    """A file on the disk: its size, its digest (xxh3_128, hex), and digests of its blocks."""

    size_bytes: int
    digest: str
    blocks: Blocks


def write_file(path: Place, content: object, *, trust: bool, name: str = "") -> Written:
    """Write a new torch file durably, by torch.save, and make sure that it can be read back.

    name: what errors call it, if the path is only its first one.
    Raises: OSError if the disk refuses; CheckpointError naming the type if the content can't be pickled, or
        safe loading would refuse it.
    """
    work = partial(_write_once, path, content, trust=trust, name=name or path.name)
    # What is lost of an upload can't be sent again alone, so the file begins again.
    return attempt("write", path, work) if isinstance(path, RemotePath) else work()


def _write_once(path: Place, content: object, *, trust: bool, name: str) -> Written:
    writer = HashingWriter(path)
    try:
        torch.save(content, cast(IO[bytes], writer), pickle_module=_Portable)
    except Exception as error:
        writer.close()
        raise not_picklable(name, error) from error
    digest = writer.finish()
    check_readable(path, trust=trust, name=name)
    return Written(writer.size_bytes, digest, writer.blocks())


def read_file(path: Place, *, trust: bool, mmap: bool = True, map_location: Any = "cpu") -> Any:
    """Load a torch file. Its tensors are mapped from the file (privately) unless mmap is False, or it is of the form
    before torch 1.6.

    map_location: as in torch.load.

    Raises: CheckpointError naming the file, and the type where that is the reason.
    """
    try:
        if isinstance(path, RemotePath):
            with path.open() as file:
                return _load(file, trust=trust, mmap=False, map_location=map_location)
        return _load(path, trust=trust, mmap=mmap and zipfile.is_zipfile(path), map_location=map_location)
    except StorageError:
        raise
    except Exception as error:
        refused = [] if trust else _refused_types(path)
        if refused:
            raise CheckpointError(
                f"{path.name} holds {', '.join(refused)}, which safe loading refuses: it could run code",
                where=str(path),
                remedy=f"if you know who wrote it: trust=True or {TRUST_ENV}=1",
            ) from error
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise CheckpointError(
            f"{path.name} can't be loaded{'' if trust else ' safely'}: {reason}",
            where=str(path),
        ) from error


def read_lazily(path: Place, *, trust: bool) -> Any:
    """Load a torch file without the content of its tensors, if it is in an object store and torch can: they lie on the
    meta device then, see `range_reads`. Otherwise as `read_file`.
    """
    lazily = isinstance(path, RemotePath) and _torch_tells_offsets()
    return read_file(path, trust=trust, map_location="meta" if lazily else "cpu")


@functools.cache
def _torch_tells_offsets() -> bool:
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    return hasattr(torch.load(file, map_location="meta", weights_only=True).untyped_storage(), "_checkpoint_offset")


def _load(file: Path | IO[bytes], *, trust: bool, mmap: bool, map_location: Any) -> Any:
    with nullcontext() if trust else safe_globals(allow_list()):
        return torch.load(file, weights_only=not trust, mmap=mmap, map_location=map_location)


@functools.cache
def allow_list() -> list[Any]:
    """Return the classes and functions that a file may name, in the form torch.serialization.safe_globals
    takes.

    Each only builds the value it stands for. Data classes and other user types are left out on purpose:
    whether building one is harmless only its author knows.
    """
    builtin = (
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        dict,
        set,
        frozenset,
        range,
        slice,
    )
    standard = (
        argparse.Namespace,
        types.SimpleNamespace,
        collections.OrderedDict,
        collections.Counter,
        collections.defaultdict,
        collections.deque,
        datetime.datetime,
        datetime.date,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
    )
    paths = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    # Python 3.13 writes these under another module name than earlier versions read, and the other way round.
    path_names = [
        (cls, f"{module}.{cls.__name__}") for cls in paths for module in ("pathlib", "pathlib._local")
    ]
    return [*builtin, *standard, *path_names, *_numpy_allow_list()]


def _numpy_allow_list() -> list[Any]:
    scalars = {kind for kind in np.sctypeDict.values() if kind is not np.object_}
    dtypes = {type(np.dtype(kind)) for kind in np.sctypeDict.values()}
    rebuild_array = np.ndarray(0).__reduce__()[0]
    rebuild_scalar = np.float64(0).__reduce__()[0]
    # numpy 1 and 2 call the same two functions by different module names.
    functions = [
        (function, f"{module}.multiarray.{name}")
        for module in ("numpy.core", "numpy._core")
        for function, name in ((rebuild_array, "_reconstruct"), (rebuild_scalar, "scalar"))
    ]
    return [np.ndarray, np.dtype, *scalars, *dtypes, *functions]


def not_picklable(name: str, error: Exception) -> CheckpointError:
    """What to raise for content that pickle refuses."""
    return CheckpointError(
        f"{name} can't be written, its content can't be pickled: {type(error).__name__}: {error}",
        remedy=f"save plain values: {_ALLOWED_IN_WORDS}",
    )


def check_readable(path: Place, *, trust: bool, name: str) -> None:
    """Make sure, unless `trust`, that safe loading accepts a file that was just written. name: what errors call it.

    Raises: CheckpointError naming the type that it refuses.
    """
    if trust:
        return
    try:
        read_lazily(path, trust=False)
    except CheckpointError as error:
        refused = _refused_types(path)
        what = (
            f"{name} would hold {', '.join(refused)}, which safe loading refuses"
            if refused
            else f"{name} could not be loaded again: {error.what}"
        )
        raise CheckpointError(
            what,
            remedy=f"save plain values ({_ALLOWED_IN_WORDS}; dataclasses.asdict for a data class), "
            f"or opt in for saving and loading with trust=True or {TRUST_ENV}=1",
        ) from error


def _refused_types(path: Place) -> list[str]:
    try:
        with safe_globals(allow_list()), storage.of(path).open(path) as file:
            return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # not a torch file at all: the caller reports the first error
        return []


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


class PortablePickler(pickle.Pickler):
    """Writes collections in the one form that the weights-only unpickler can rebuild: a call with all the
    items.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if type(obj) is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        return NotImplemented


class _Portable:
    """The pickle module that torch.save is given."""

    Pickler: Callable[..., pickle.Pickler] = PortablePickler
    dump = pickle.dump
    dumps = pickle.dumps
