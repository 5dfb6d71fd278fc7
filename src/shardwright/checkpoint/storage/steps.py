"""The elementary operations on storage, told to whoever watches: tests let one of them fail, or end the process there.

Operations: "make folder", "create", "write", "sync", "finish", "put", "copy", "move", "link", "exchange", "delete".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watcher = Callable[[str, str], None]
"""Called with an operation and the path or URL, just before it happens. What it raises is the operation's failure."""

_watchers: list[Watcher] = []


def reached(operation: str, where: object) -> None:
    """Tell that an operation is about to happen."""
    for watcher in _watchers:
        watcher(operation, str(where))


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` before every operation of this process, on all threads."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
