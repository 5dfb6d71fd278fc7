"""Pass the output of workers on, whole lines at a time, and hold back what may be a last traceback.

A worker that dies prints its traceback and ends. Held back, the traceback can be shown once, with a word on
who failed first, instead of in the middle of the other ranks' noise. One that the worker survives is let
through after `HOLD_S`.
"""

from __future__ import annotations

import os
import re
from typing import BinaryIO

from shardwright.launch.report import traceback_start

HOLD_S = 5.0  # more than a failing rank needs to tell the others and end
PARTIAL_LINE_S = 0.5  # a line without an end is shown after this time: progress dots, prompts
_MAX_HELD_BYTES = 1 << 20
_MAX_PARTIAL_BYTES = 1 << 16
# Between lines; a progress bar ends its lines with "\r" alone.
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n|\Z)")


class Relay:
    """One stream (stdout or stderr) of one worker.

    Calls: `feed` for each piece read, `tick` from time to time, `close` when the worker has ended. With
    `hold_tracebacks`, `close` leaves the last traceback in `traceback` and the caller shows it; `shown` says
    that it went through already.
    """

    def __init__(
        self, target_fd: int, *, tag: str = "", log: BinaryIO | None = None, hold_tracebacks: bool = False
    ) -> None:
        self.traceback = ""
        self.traceback_time_s = 0.0
        self.shown = False
        self._target_fd = target_fd
        self._tag = tag.encode()
        self._log = log
        self._hold_tracebacks = hold_tracebacks
        self._partial = b""
        self._partial_time_s = 0.0
        self._line_open = False  # the start of the current line was shown already
        self._held: list[bytes] = []
        self._holding = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take what the worker wrote and pass on the lines that are whole."""
        if self._log is not None:
            self._log.write(data)
        *pieces, self._partial = _LINE_END.split(self._partial + data)
        self._partial_time_s = now_s
        for piece in pieces:
            self._take(piece, now_s)
        if len(self._partial) > _MAX_PARTIAL_BYTES and not self._holding:
            self._show_partial()

    def tick(self, now_s: float) -> None:
        """Let go of what has waited long enough."""
        if self._holding and now_s - self.traceback_time_s > HOLD_S:
            self.release()
        if self._partial and not self._holding and now_s - self._partial_time_s > PARTIAL_LINE_S:
            self._show_partial()

    def release(self) -> None:
        """Show the traceback that is held back."""
        if self._holding:
            self._holding = False
            self.shown = True
            for piece in self._held:
                self._write(piece)

    def drop(self) -> None:
        """Forget the traceback that is held back."""
        self._holding = False
        self.traceback = ""

    def close(self, now_s: float) -> None:
        """Pass on the rest; the worker writes no more."""
        if self._partial:
            self._take(self._partial + b"\n", now_s)
            self._partial = b""
        elif self._line_open:
            write_all(self._target_fd, b"\n")
        if self._log is not None:
            self._log.close()

    def _take(self, piece: bytes, now_s: float) -> None:
        if self._hold_tracebacks and not self._holding:
            text = piece.decode(errors="replace")
            start = traceback_start(text)
            if start is not None:
                if start > 0 or self._line_open:
                    self._write(text[:start].encode() + b"\n")
                    self._line_open = False
                    piece = text[start:].encode()
                self._holding, self.shown = True, False
                self._held, self.traceback, self.traceback_time_s = [], "", now_s
        if not self._holding:
            self._write(piece)
            self._line_open = False
            return
        self._held.append(piece)
        self.traceback += piece.decode(errors="replace")
        if len(self.traceback) > _MAX_HELD_BYTES:
            self.release()

    def _show_partial(self) -> None:
        self._write(self._partial)
        self._line_open = True
        self._partial = b""

    def _write(self, piece: bytes) -> None:
        write_all(self._target_fd, piece if self._line_open or not self._tag else self._tag + piece)


def write_all(fd: int, data: bytes) -> None:
    """Write to a descriptor; a reader that went away is no reason to stop a training run."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError:
            return


def say(text: str) -> None:
    """Write a line of the launcher's own to stderr."""
    write_all(2, f"shardwright run: {text}\n".encode())
