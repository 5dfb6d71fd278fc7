"""Checkpoints in an object store (s3, gs, ...) by fsspec.

Note [No rename]
    There are no folders to rename in an object store: objects appear whole when their upload ends, and that is all that
    happens in one step. So a save writes its files where no other save ever writes, below a folder named by its id,
    and the manifest, which names that folder, is the one object that is replaced:

        {tag}_partial/manifest.json              the commit mark, written last
        {tag}_partial/{save id}/model_0_0.pt     and so on, the files of the contract

    A save of the same tag that is interrupted leaves the old manifest with its files; one that ends replaces the manifest
    and then deletes the old folder. A process that was thought dead and goes on writing can't harm another save.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.checkpoint import layout
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.storage import steps
from shardwright.checkpoint.storage.attempts import attempt, failure, is_passing
from shardwright.checkpoint.storage.base import Storage
from shardwright.checkpoint.storage.remote_path import RemotePath
from shardwright.errors import CheckpointError
from shardwright.log import get_logger

_log = get_logger(__name__)

PART_BYTES = 16 << 20
"""Bytes of one part of an upload; about twice as many are held."""
_SAVE_ID = re.compile(r"[0-9a-f]{32}")


class _Upload:
    """See `NewFile`. A multipart upload where the store has some; it becomes an object when it ends."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        steps.reached("create", path)
        open_file = partial(path.fs.open, path.key, "wb", block_size=PART_BYTES)
        self._file: Any = attempt("write", path, open_file)
        self._is_whole = False

    def write(self, data: bytes | memoryview) -> int:
        """Raises: StorageError. A part that the store's client could not send is not tried again here: see
        `safe_loading.write_file`, which begins the file again.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            steps.reached("write", self._path)
            self._do(partial(self._file.write, view[start : start + PART_BYTES]))
        return len(view)

    def finish(self) -> None:
        steps.reached("finish", self._path)
        self._do(self._file.close)
        self._is_whole = True

    def abandon(self) -> None:
        if self._is_whole:
            return
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # or the garbage collector would upload the rest

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            failed = failure("write", self._path, error)
            failed.passing = is_passing(error)
            raise failed from error


class ObjectStorage(Storage):
    """See Note [No rename]."""

    def sizes(self, folder: RemotePath) -> dict[str, int]:
        return folder.sizes()

    def open(self, path: RemotePath) -> io.BufferedReader:
        return path.open()

    # ------------------------------------------------------------------ files

    def create(self, path: RemotePath) -> _Upload:
        return _Upload(path)

    def put(self, path: RemotePath, data: bytes) -> None:
        def work() -> None:
            steps.reached("put", path)
            path.fs.pipe_file(path.key, data)

        attempt("write", path, work)

    def replace_text(self, path: RemotePath, text: str, *, unique: str) -> None:
        self.put(path, text.encode())

    def upload(self, source: Path, path: RemotePath) -> None:
        def work() -> None:
            steps.reached("put", path)
            path.fs.put_file(str(source), path.key)

        attempt("write", path, work)

    def move(self, path: RemotePath, final: RemotePath) -> None:
        """The store copies it, which takes one step as seen from outside."""
        self._copy(path, final)
        path.unlink(missing_ok=True)

    def keep_as(self, path: RemotePath, second: RemotePath) -> None:
        if path.is_file():
            self._copy(path, second)
        else:
            second.unlink(missing_ok=True)

    def sync_folder(self, path: RemotePath) -> None:
        """Objects are durable as soon as they are there."""

    def _copy(self, path: RemotePath, second: RemotePath) -> None:
        def work() -> None:
            steps.reached("copy", second)
            path.fs.cp_file(path.key, second.key)

        attempt("copy", path, work)

    # ------------------------------------------------------------------ checkpoints

    def prepare(self, root: RemotePath) -> None:
        """Folders need not be made."""

    def saving(self, root: RemotePath, folder: str, save_id: str) -> RemotePath:
        return root / folder / self.data_folder(save_id)

    def begin(self, saving: RemotePath) -> None:
        """Folders need not be made."""

    def data_folder(self, save_id: str) -> str:
        return save_id

    def commit(self, saving: RemotePath, final: RemotePath, manifest: bytes, *, unique: str) -> None:
        old = [path for path in final.iterdir() if path.name not in (saving.name, layout.MANIFEST)]
        self.put(final / layout.MANIFEST, manifest)
        for path in old:
            self._delete(path)

    def remove(self, path: RemotePath, *, unique: str) -> None:
        try:
            (path / layout.MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("could not delete %s: %s (left for the next save)", path, error)
            return
        self._delete(path)

    def discard(self, path: RemotePath) -> None:
        with suppress(OSError):
            self._delete_all(path)

    def clean_leftovers(self, root: RemotePath, *, unique: str) -> None:
        for path in root.iterdir():
            if path.name.startswith(layout.WORK_PREFIX):
                _log.info("removing the leftover of an interrupted save: %s", path)
                self._delete(path)
            elif path.name.endswith(layout.PARTIAL_SUFFIX):
                self._clean_tag(path)

    def clean_name(self, root: RemotePath, name: str) -> None:
        super().clean_name(root, name)
        if name.endswith(layout.PARTIAL_SUFFIX):
            self._clean_tag(root / name)

    def _clean_tag(self, folder: RemotePath) -> None:
        """Delete the folders of saves that were interrupted, or replaced. What others put there stays."""
        names = {path.name for path in folder.iterdir()}
        saves = {name for name in names if _SAVE_ID.fullmatch(name)}
        if layout.MANIFEST in names and len(saves) > 1:
            try:
                saves.discard(Manifest.from_bytes((folder / layout.MANIFEST).read_bytes(), where=str(folder)).data_folder)
            except CheckpointError:  # nobody knows which of them is whole
                return
        elif layout.MANIFEST in names:
            return
        for name in sorted(saves):
            _log.info("removing the leftover of an interrupted save: %s", folder / name)
            self._delete(folder / name)

    def _delete(self, path: RemotePath) -> None:
        try:
            self._delete_all(path)
        except OSError as error:
            _log.warning("could not delete %s: %s (left for the next save)", path, error)

    def _delete_all(self, path: RemotePath) -> None:
        def work() -> None:
            steps.reached("delete", path)
            with suppress(FileNotFoundError):  # someone else was faster: what was wanted is the case
                path.fs.rm(path.key, recursive=True)

        attempt("delete", path, work)
