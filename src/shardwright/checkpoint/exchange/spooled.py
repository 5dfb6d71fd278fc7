"""Files and folders that are written on a disk, not always from front to back, and appear under their name when they are whole."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

from shardwright.checkpoint import layout, storage
from shardwright.checkpoint.storage import Place, RemotePath


class Spooled:
    """A file or folder while it is made: beside its place, or for an object store in the folder of temporary files.

    path: where to write it; nothing is there.   last: the file of a folder that makes it one. In an object store, which has no
        folders, it is sent after the others, so that nobody takes a part for the whole.
    Protocol: write below `path`, publish; discard in any case.
    """

    def __init__(self, out: Place, last: str = "") -> None:
        self._out = out
        self._last = last
        self._scratch: Path | None = None
        if isinstance(out, RemotePath):
            self._scratch = Path(tempfile.mkdtemp(prefix=layout.WORK_PREFIX))
            self.path = self._scratch / out.name
        else:
            storage.of(out).clean_name(out.parent, out.name)
            self.path = out.parent / layout.saving_folder(out.name, uuid.uuid4().hex)

    def publish(self) -> None:
        """Give it its name. Raises: OSError; in an object store nothing is left then of what was sent."""
        store = storage.of(self._out)
        if isinstance(self._out, RemotePath):
            self._send(self._out)
            return
        if self.path.is_dir():
            store.sync_folder(self.path)
        os.rename(self.path, self._out)
        store.sync_folder(self._out.parent)

    def discard(self) -> None:
        """Delete what was not published. Never raises."""
        storage.of(self.path).discard(self.path)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _send(self, out: RemotePath) -> None:
        store = storage.of(out)
        if self.path.is_file():
            store.upload(self.path, out)
            return
        sent: list[RemotePath] = []
        files = [path for path in self.path.rglob("*") if path.is_file()]
        try:
            for path in sorted(files, key=lambda path: (path.name == self._last, path)):
                sent.append(out / path.relative_to(self.path).as_posix())
                store.upload(path, sent[-1])
        except BaseException:
            for file in sent:
                store.discard(file)
            raise
