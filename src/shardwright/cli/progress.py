"""A bar on the terminal while bytes are read or written; nothing where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how much of `total_bytes` is done; what is yielded is called with the bytes of each part."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown:
        task = shown.add_task(what, total=total_bytes)
        yield lambda num_bytes: shown.advance(task, num_bytes)
