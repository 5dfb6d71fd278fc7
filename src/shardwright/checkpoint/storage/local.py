"""Durable and atomic file operations on a local or network file system."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
from contextlib import suppress
from pathlib import Path

from shardwright.checkpoint import layout
from shardwright.checkpoint.storage import steps
from shardwright.checkpoint.storage.base import Storage
from shardwright.log import get_logger

_log = get_logger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
_BUFFER_BYTES = 64 << 10
_WRITE_BACK_BYTES = 32 << 20
_START_WRITE_BACK = 2  # SYNC_FILE_RANGE_WRITE


class _File:
    """See `NewFile`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        steps.reached("create", path)
        self._file = open(path, "xb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by finish or abandon
        self._written = self._told = 0

    def write(self, data: bytes | memoryview) -> int:
        steps.reached("write", self._path)
        count = self._file.write(data)
        self._written += count
        if self._written - self._told >= _WRITE_BACK_BYTES:
            _start_write_back(self._file.fileno(), self._told, self._written - self._told)
            self._told = self._written
        return count

    def finish(self) -> None:
        try:
            steps.reached("sync", self._path)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            self.abandon()
            raise
        self._file.close()

    def abandon(self) -> None:
        with suppress(OSError):  # the buffer may hold what the disk refused
            self._file.close()


def _start_write_back(fd: int, start: int, num_bytes: int) -> None:
    """Let the disk begin with what was written, so that `finish` has little left to wait for. A hint; may do nothing."""
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(num_bytes), _START_WRITE_BACK)


class LocalStorage(Storage):
    """A save is written into a folder of its own, which is renamed to its final name; see `layout` for the names."""

    def sizes(self, folder: Path) -> dict[str, int]:
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # just deleted, or a link that leads nowhere
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def open(self, path: Path) -> io.BufferedReader:
        return open(path, "rb")

    # ------------------------------------------------------------------ files

    def create(self, path: Path) -> _File:
        return _File(path)

    def put(self, path: Path, data: bytes) -> None:
        file = self.create(path)
        try:
            file.write(data)
            file.finish()
        except OSError as error:
            file.abandon()
            raise OSError(error.errno, error.strerror, str(path)) from error  # a write doesn't tell the name

    def replace_text(self, path: Path, text: str, *, unique: str) -> None:
        temporary = path.parent / f"{layout.WORK_PREFIX}{path.name}-{unique}"
        try:
            self.put(temporary, text.encode())
            self.move(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)

    def upload(self, source: Path, path: Path) -> None:
        self.move(source, path)
        self.sync_folder(path.parent)

    def move(self, path: Path, final: Path) -> None:
        steps.reached("move", final)
        os.replace(path, final)

    def keep_as(self, path: Path, second: Path) -> None:
        """Where there are no hard links the file only has the second name then."""
        steps.reached("link", second)
        second.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            try:
                os.link(path, second)
            except FileNotFoundError:
                raise
            except OSError:
                os.replace(path, second)

    def sync_folder(self, path: Path) -> None:
        steps.reached("sync", path)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.EROFS):  # file systems that can't, or needn't
                raise
        finally:
            os.close(fd)

    # ------------------------------------------------------------------ checkpoints

    def prepare(self, root: Path) -> None:
        steps.reached("make folder", root)
        root.mkdir(parents=True, exist_ok=True)

    def saving(self, root: Path, folder: str, save_id: str) -> Path:
        return root / layout.saving_folder(folder, save_id)

    def begin(self, saving: Path) -> None:
        steps.reached("make folder", saving)
        saving.mkdir()

    def data_folder(self, save_id: str) -> str:
        return ""

    def commit(self, saving: Path, final: Path, manifest: bytes, *, unique: str) -> None:
        """At no moment is the tag without a complete checkpoint. If `final` exists the two folders are exchanged and the
        old one is deleted; where the file system can't exchange, the old one is moved to the name of
        `layout.previous_folder`, which resume accepts, until the new one is in place.
        """
        self.put(saving / layout.MANIFEST, manifest)
        self.sync_folder(saving)
        self.publish(saving, final, unique=unique)

    def publish(self, temporary: Path, final: Path, *, unique: str) -> None:
        """Give a folder with its manifest its final name, see `commit`."""
        if not os.path.lexists(final):
            steps.reached("move", final)
            os.rename(temporary, final)
            self.sync_folder(final.parent)
            return
        steps.reached("exchange", final)
        if _exchange(temporary, final):
            self.sync_folder(final.parent)
            self.remove(temporary, unique=unique)
            return
        previous = final.parent / layout.previous_folder(final.name)
        steps.reached("move", previous)
        os.rename(final, previous)
        try:
            steps.reached("move", final)
            os.rename(temporary, final)
        except OSError:
            os.rename(previous, final)
            raise
        self.sync_folder(final.parent)
        self.remove(previous, unique=unique)

    def remove(self, path: Path, *, unique: str) -> None:
        doomed = path.parent / layout.deleting_folder(path.name, unique)
        try:
            steps.reached("delete", path)
            if not path.name.startswith(layout.WORK_PREFIX):
                os.rename(path, doomed)
                path = doomed
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            return  # someone else was faster: what was wanted is the case
        except OSError as error:
            _log.warning("could not delete %s: %s (left for the next save)", path, error)

    def discard(self, path: Path) -> None:
        with suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def clean_leftovers(self, root: Path, *, unique: str) -> None:
        """A replaced checkpoint whose successor never came is put back."""
        for name in sorted(os.listdir(root)):
            entry = root / name
            if name.startswith(layout.WORK_PREFIX):
                _log.info("removing the leftover of an interrupted save: %s", entry)
                self.remove(entry, unique=unique)
            elif name.endswith(layout.PARTIAL_SUFFIX + layout.PREVIOUS_SUFFIX):
                final = root / name.removesuffix(layout.PREVIOUS_SUFFIX)
                if os.path.lexists(final):
                    self.remove(entry, unique=unique)
                else:
                    os.rename(entry, final)
                    _log.warning("restored %s, whose replacement was interrupted", final)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (renameat2 with RENAME_EXCHANGE). False where the system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    status = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if status == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))
