"""Recording, watching and cutting connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from shardwright.topology.sockets import ConnectionRecord


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    return near, far


def test_only_what_is_opened_inside_is_recorded(server: socket.socket) -> None:
    outside = connect(server)
    record = ConnectionRecord()
    with record.recording():
        inside = connect(server)
    near = inside[0].getsockname()
    assert len(record.routes()) == 2  # both ends are in this process
    assert any(own == f"{near[0]}:{near[1]}" for own, _ in record.routes())
    record.close()
    for connection in (*outside, *inside):
        connection.close()


def test_every_connection_is_found_however_descriptors_are_numbered(server: socket.socket) -> None:
    for _ in range(5):
        record = ConnectionRecord()
        with record.recording():
            pairs = [connect(server) for _ in range(3)]
        assert len(record.routes()) == 6
        record.close()
        for near, far in pairs:
            near.close()
            far.close()


def test_the_stores_connections_are_left_out(server: socket.socket) -> None:
    record = ConnectionRecord(ignored_port=server.getsockname()[1])
    with record.recording():
        near, far = connect(server)
    assert record.routes() == []
    record.cut()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    near.close()
    far.close()


def test_a_closed_peer_is_seen_once_even_behind_unread_data(server: socket.socket) -> None:
    record = ConnectionRecord()
    near, far = connect(server)
    with record.recording():
        duplicate = os.dup(near.fileno())
    assert record.hung_up() == []
    far.sendall(b"unread")
    far.close()
    ((own, _),) = record.hung_up()
    assert own == "{}:{}".format(*near.getsockname())
    assert record.hung_up() == []
    os.close(duplicate)
    near.close()


def test_cut_ends_a_blocked_read(server: socket.socket) -> None:
    record = ConnectionRecord()
    with record.recording():
        near, far = connect(server)
    record.cut()
    assert near.recv(1) == b""
    assert far.recv(1) == b""
    record.cut()
    near.close()
    far.close()
    record.cut()
    record.close()
