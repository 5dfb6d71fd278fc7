"""Passing output on by lines, holding tracebacks back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardwright.launch.relay import HOLD_S, PARTIAL_LINE_S, Relay

TRACEBACK = b'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n'


class _Sink:
    """The far end of a relay."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        os.set_blocking(self._read_fd, False)

    def take(self) -> bytes:
        try:
            return os.read(self._read_fd, 1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self.fd)


@pytest.fixture
def sink() -> Iterator[_Sink]:
    it = _Sink()
    yield it
    it.close()


def test_lines_are_whole(sink: _Sink) -> None:
    relay = Relay(sink.fd, tag="[rank 1] ")
    relay.feed(b"one\ntw", 0.0)
    assert sink.take() == b"[rank 1] one\n"
    relay.feed(b"o\r\nthree", 0.0)
    assert sink.take() == b"[rank 1] two\r\n"
    relay.close(0.0)
    assert sink.take() == b"[rank 1] three\n"


def test_a_progress_bar_shows(sink: _Sink) -> None:
    relay = Relay(sink.fd)
    relay.feed(b"\r10%", 0.0)
    assert sink.take() == b"\r"
    relay.feed(b"\r20%\r", 0.1)
    assert sink.take() == b"10%\r"
    relay.tick(0.2)
    assert sink.take() == b""
    relay.tick(0.2 + PARTIAL_LINE_S)
    assert sink.take() == b"20%\r"


def test_a_last_traceback_is_held_back(sink: _Sink) -> None:
    relay = Relay(sink.fd, hold_tracebacks=True)
    relay.feed(b"loss 1\n" + TRACEBACK[:50], 7.0)
    relay.feed(TRACEBACK[50:], 7.5)
    relay.close(8.0)
    assert sink.take() == b"loss 1\n"
    assert relay.traceback.encode() == TRACEBACK
    assert (relay.traceback_time_s, relay.shown) == (7.0, False)


def test_a_traceback_behind_a_progress_bar(sink: _Sink) -> None:
    relay = Relay(sink.fd, hold_tracebacks=True)
    relay.feed(b"50%|##" + TRACEBACK, 0.0)
    relay.close(0.0)
    assert sink.take() == b"50%|##\n"
    assert relay.traceback.encode() == TRACEBACK


def test_a_survived_traceback_goes_on_after_a_while(sink: _Sink) -> None:
    relay = Relay(sink.fd, hold_tracebacks=True)
    relay.feed(TRACEBACK + b"going on\n", 0.0)
    relay.tick(HOLD_S - 0.1)
    assert sink.take() == b""
    relay.tick(HOLD_S + 0.1)
    assert sink.take() == TRACEBACK + b"going on\n"
    assert relay.shown
    relay.feed(b"next\n", HOLD_S + 1)
    assert sink.take() == b"next\n"


def test_a_reader_that_went_away_does_not_matter() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    Relay(write_fd).feed(b"line\n", 0.0)
    os.close(write_fd)
