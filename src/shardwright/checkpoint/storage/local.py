"""Durable and atomic file operations on a local or network file system."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from shardwright.checkpoint import layout
from shardwright.log import get_logger

_log = get_logger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


def fsync_folder(path: Path) -> None:
    """Make the names inside a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EROFS):  # file systems that can't, or needn't
            raise
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str, *, unique: str) -> None:
    """Give `path` this content in one step: readers see the old text or the new, also after a crash."""
    temporary = path.parent / f"{layout.WORK_PREFIX}{path.name}-{unique}"
    try:
        write_durably(temporary, text.encode())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def keep_as(path: Path, second: Path) -> None:
    """Give a file a second name, in place of what has that; where there are no hard links, it only has the second name
    then. Does nothing if there is no such file.
    """
    second.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        try:
            os.link(path, second)
        except FileNotFoundError:
            raise
        except OSError:
            os.replace(path, second)


def publish(temporary: Path, final: Path, *, unique: str) -> None:
    """Give a finished folder its final name; at no moment is the tag without a complete checkpoint.

    If `final` exists the two are exchanged and the old one is deleted; where the file system can't exchange,
    the old one is moved to the name of `layout.previous_folder`, which resume accepts, until the new one is
    in place.
    """
    if not os.path.lexists(final):
        os.rename(temporary, final)
        fsync_folder(final.parent)
        return
    if _exchange(temporary, final):
        fsync_folder(final.parent)
        remove(temporary, unique=unique)
        return
    previous = final.parent / layout.previous_folder(final.name)
    os.rename(final, previous)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(previous, final)
        raise
    fsync_folder(final.parent)
    remove(previous, unique=unique)


def remove(path: Path, *, unique: str) -> None:
    """Delete a folder or file so that no half-deleted one keeps its name. What can't be deleted is logged,
    not raised.
    """
    doomed = path.parent / layout.deleting_folder(path.name, unique)
    try:
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


def clean_leftovers(path: Path, *, unique: str) -> None:
    """Remove what interrupted saves left in `path`; put a replaced checkpoint back if its successor never
    came.

    Called by: one rank, when no save into `path` runs.
    """
    for name in sorted(os.listdir(path)):
        entry = path / name
        if name.startswith(layout.WORK_PREFIX):
            _log.info("removing the leftover of an interrupted save: %s", entry)
            remove(entry, unique=unique)
        elif name.endswith(layout.PARTIAL_SUFFIX + layout.PREVIOUS_SUFFIX):
            final = path / name.removesuffix(layout.PREVIOUS_SUFFIX)
            if os.path.lexists(final):
                remove(entry, unique=unique)
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


def discard(path: Path) -> None:
    """Delete an unfinished folder after a failed save; never raises, the next save tries again."""
    with suppress(OSError):
        shutil.rmtree(path)
