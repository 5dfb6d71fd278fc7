"""The interface to storage: what writing, publishing and deleting need of it."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from shardwright.checkpoint import layout
from shardwright.checkpoint.storage.remote_path import RemotePath

Place = Path | RemotePath
"""A file or folder. Both kinds are read in the words of pathlib."""


class NewFile(Protocol):
    """A file being written. Protocol: write, ..., then finish once; or abandon after an error."""

    def write(self, data: bytes | memoryview) -> Any:
        """Append bytes. Raises: OSError."""

    def finish(self) -> None:
        """Make the file whole and durable under its name, and close it. Raises: OSError."""

    def abandon(self) -> None:
        """Close without promises. Never raises."""


class Storage(ABC):
    """Operations on one kind of storage. All raise OSError, with the place in it, unless they say otherwise.

    One save of a partial checkpoint calls, on rank 0: prepare, clean_leftovers, begin; on every rank: create (or put) in
    the folder that `saving` names; on rank 0: commit, replace_text for `newest`, then remove for what is too old; after
    a failure discard.
    """

    @abstractmethod
    def sizes(self, folder: Any) -> dict[str, int]:
        """The files that lie directly in a folder, with their bytes. Nothing where there is no folder."""

    @abstractmethod
    def open(self, path: Any) -> io.BufferedReader:
        """A file to read from anywhere in it."""

    # ------------------------------------------------------------------ files

    @abstractmethod
    def create(self, path: Any) -> NewFile:
        """Begin a new file that is written piece by piece. There must be none of that name."""

    @abstractmethod
    def put(self, path: Any, data: bytes) -> None:
        """Write a small new file, whole and durable."""

    @abstractmethod
    def replace_text(self, path: Any, text: str, *, unique: str) -> None:
        """Give a file this content in one step: readers see the old text or the new, also after a crash."""

    @abstractmethod
    def upload(self, source: Path, path: Any) -> None:
        """Give a finished local file this name, in place of what has it, in one step; the local file may be gone then."""

    @abstractmethod
    def move(self, path: Any, final: Any) -> None:
        """Give a finished file its name, in place of what has it, in one step."""

    @abstractmethod
    def keep_as(self, path: Any, second: Any) -> None:
        """Give a file a second name, in place of what has that. Does nothing if there is no such file."""

    @abstractmethod
    def sync_folder(self, path: Any) -> None:
        """Make the names inside a folder durable."""

    # ------------------------------------------------------------------ checkpoints

    @abstractmethod
    def prepare(self, root: Any) -> None:
        """Make sure that checkpoints can be written here; a folder is made."""

    @abstractmethod
    def saving(self, root: Any, folder: str, save_id: str) -> Any:
        """Where the files of a save are written before it is valid."""

    @abstractmethod
    def begin(self, saving: Any) -> None:
        """Make the folder of `saving`."""

    @abstractmethod
    def data_folder(self, save_id: str) -> str:
        """What the manifest says about where the files lie: the name of a folder beside it, or "" for its own."""

    @abstractmethod
    def commit(self, saving: Any, final: Any, manifest: bytes, *, unique: str) -> None:
        """Make a finished save valid under its name, in one step, in place of the one that has it; that goes."""

    @abstractmethod
    def remove(self, path: Any, *, unique: str) -> None:
        """Delete a checkpoint so that no half-deleted one looks whole. What can't be deleted is logged, not raised."""

    @abstractmethod
    def discard(self, path: Any) -> None:
        """Delete an unfinished file or folder after a failed save; never raises, the next save tries again."""

    @abstractmethod
    def clean_leftovers(self, root: Any, *, unique: str) -> None:
        """Remove what interrupted saves left in a folder of checkpoints.

        Called by: one rank, when no save into it runs.
        """

    def clean_name(self, root: Any, name: str) -> None:
        """Remove what was left in a folder by whoever was writing something of this name, and was killed.

        Called by: one process that is about to write it.
        """
        for path in root.iterdir() if root.is_dir() else ():
            if layout.is_saving(path.name, name):
                self.remove(path, unique=path.name)
