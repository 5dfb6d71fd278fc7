"""Requests to an object store: passing failures are tried again, and what remains says what to do."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from shardwright.errors import CheckpointError
from shardwright.log import get_logger

_log = get_logger(__name__)
_T = TypeVar("_T")

ATTEMPTS_ENV = "SHARDWRIGHT_STORAGE_ATTEMPTS"
_DEFAULT_ATTEMPTS = 4
_FIRST_WAIT_S = 0.5
_PATIENCE_S = 60.0
"""No attempt begins later than this: a store that never answers takes long to give up on."""
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_LASTING_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_PROGRAM = (TypeError, ValueError, KeyError, AttributeError, NotImplementedError, ImportError, MemoryError)


class StorageError(OSError):
    """A request to an object store that failed.

    remedy: what the user can do.   passing: the same may work later, and has not been tried often enough.
    """

    def __init__(self, code: int, what: str, url: str, remedy: str, passing: bool = False) -> None:
        super().__init__(code, what, url)
        self.remedy = remedy
        self.passing = passing

    def __reduce__(self) -> tuple[type[StorageError], tuple[object, ...]]:
        return StorageError, (self.errno, self.strerror, self.filename, self.remedy, self.passing)


def num_attempts() -> int:
    """How often a request is tried. Raises: CheckpointError if the environment says something else than a number."""
    told = os.environ.get(ATTEMPTS_ENV, "").strip()
    if not told:
        return _DEFAULT_ATTEMPTS
    if not told.isdecimal() or int(told) < 1:
        raise CheckpointError(f"{ATTEMPTS_ENV} is {told!r}, expected a whole number of at least 1", remedy="unset it for the default")
    return int(told)


def attempt(operation: str, url: object, work: Callable[[], _T]) -> _T:
    """Do something that may be repeated, until it works or has failed often enough; waits twice as long each time.

    operation: in words, for errors: "write", "list".
    Raises: FileNotFoundError naming the URL, and the like as they come; StorageError naming operation and URL for everything else.
    """
    last = num_attempts()
    started = time.monotonic()
    for number in range(1, last + 1):
        try:
            return work()
        except FileNotFoundError as error:  # clients don't always say which
            raise FileNotFoundError(errno.ENOENT, "not in the store", str(url)) from error
        except Exception as error:
            if isinstance(error, _LASTING) and not isinstance(error, PermissionError):
                raise
            if isinstance(error, (*_PROGRAM, CheckpointError)):
                raise
            if number == last or not is_passing(error) or time.monotonic() - started > _PATIENCE_S:
                raise failure(operation, url, error, number) from error
            wait_s = _FIRST_WAIT_S * 2 ** (number - 1) * random.uniform(0.75, 1.25)
            _log.warning(
                "could not %s %s: %s; trying again in %.1f s (%d of %d)", operation, url, said(error), wait_s, number, last
            )
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def is_passing(error: BaseException) -> bool:
    """May the same request work a little later?"""
    if isinstance(error, StorageError):
        return error.passing
    if isinstance(error, (*_LASTING, *_PROGRAM)) or "Credentials" in type(error).__name__:
        return False
    return getattr(error, "errno", None) not in _LASTING_CODES


def failure(operation: str, url: object, error: BaseException, number: int = 1) -> StorageError:
    """The error to raise for a request that failed for good."""
    cause = error.__cause__ if isinstance(error, StorageError) and error.__cause__ is not None else error
    code = getattr(cause, "errno", None) or errno.EIO
    tried = f" after {number} attempts" if number > 1 else ""
    return StorageError(code, f"could not {operation} it{tried}: {said(cause)}", str(url), _remedy(cause, code))


def said(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _remedy(error: BaseException, code: int) -> str:
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "check the credentials and their rights on this bucket and prefix: reading, writing, listing, deleting"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free some of the quota, or keep fewer checkpoints (num_kept_partial_checkpoints)"
    return f"check the endpoint, the network and the bucket; {ATTEMPTS_ENV} sets how often a request is tried"
