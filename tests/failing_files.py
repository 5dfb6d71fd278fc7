"""Faults in the operations that change files below a folder: the process ends, or the disk refuses.

Works at the system's own functions, whichever module calls them: open, write, fsync, mkdir, rename, link, delete.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from shardwright.checkpoint.storage import local

How = Literal["before", "after", "half", "error"]
"""before, after: the process is killed beside the operation. half: it is killed when a file has half of what was written
to it; beside an operation on a name as "before". error: the operation fails."""


class Faults:
    """Strikes at an operation below `root`.

    at: its step (see `step_of`), and the how manieth of these (from 0); None: never.   code: of the error.   steps: of all
    operations that were done, in order.
    """

    def __init__(self, root: Path, at: tuple[str, int] | None, how: How, code: int) -> None:
        self.root, self.at, self.how, self.code = os.path.realpath(root), at, how, code
        self.steps: list[str] = []

    def around(self, what: str, path: Any, call: Callable[[], Any], *, half: Callable[[], None] | None = None) -> Any:
        """Do an operation, unless it is the one that fails."""
        if not self._below(path):
            return call()
        step = step_of(what, os.path.relpath(path, self.root))
        number = self.steps.count(step)
        self.steps.append(step)
        if (step, number) != self.at:
            return call()
        if self.how == "error":
            raise OSError(self.code, os.strerror(self.code), str(path))
        print("struck", self.how, step, number, file=sys.stderr, flush=True)
        if self.how == "half" and half is not None:
            half()
        if self.how == "after":
            call()
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def _below(self, path: Any) -> bool:
        text = os.path.abspath(os.fsdecode(path))
        return text.startswith(self.root + os.sep) or text == self.root


def step_of(what: str, path: str) -> str:
    """What an operation is called, the same in every save: without ids and numbers."""
    return f"{what} {re.sub('[0-9a-f]{32}|[0-9]+', '#', path)}"


class _File:
    """An open file whose writes count as operations."""

    def __init__(self, file: Any, path: Any, faults: Faults) -> None:
        self._file, self._path, self._faults = file, path, faults

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(bytes(data)[: len(bytes(data)) // 2] if not isinstance(data, str) else data[: len(data) // 2])
            self._file.flush()

        return self._faults.around("write", self._path, lambda: self._file.write(data), half=half)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def installed(faults: Faults) -> Iterator[Faults]:
    """Faults for all threads of this process."""
    real: dict[tuple[Any, str], Any] = {}

    def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
        real[owner, name] = getattr(owner, name)
        setattr(owner, name, function)

    def on_paths(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(path: Any, *args: Any, **options: Any) -> Any:
            where = path
            if options.get("dir_fd") is not None:
                where = os.path.join(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), path)
            return faults.around(name, where, lambda: original(path, *args, **options))

        put(owner, name, call)

    def opened(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not isinstance(file, (str, os.PathLike)) or not set(mode) & set("wxa") or not faults._below(file):
                return original(file, mode, *args, **options)
            made = faults.around("open", file, lambda: original(file, mode, *args, **options))
            return _File(made, file, faults)

        return call

    def fsync(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")

        def half() -> None:
            if os.path.isfile(path):
                os.truncate(path, os.path.getsize(path) // 2)

        faults.around("fsync", path, lambda: real[os, "fsync"](fd), half=half)

    for name in ("rename", "replace", "link", "unlink", "rmdir", "mkdir"):
        on_paths(os, name)
    on_paths(local, "_exchange")
    put(os, "fsync", fsync)
    put(builtins, "open", opened(builtins.open))
    put(io, "open", opened(io.open))
    try:
        yield faults
    finally:
        for (owner, name), function in real.items():
            setattr(owner, name, function)
