"""Reserving a port."""

from __future__ import annotations

import socket

import pytest

from shardwright.errors import ConfigError
from shardwright.launch import ports


def test_free_ports_differ_while_reserved() -> None:
    held = [ports.reserve(None) for _ in range(50)]
    try:
        assert len({ports.port_of(sock) for sock in held}) == 50
    finally:
        for sock in held:
            sock.close()


@pytest.mark.parametrize("asked", [False, True])
def test_a_store_can_listen_on_a_reserved_port_but_nobody_else_gets_it(asked: bool) -> None:
    with ports.reserve(None) as sock:
        number = ports.port_of(sock)
    with ports.reserve(number if asked else None) as reserved:
        number = ports.port_of(reserved)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", number))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", number))
            store.listen()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {number} is taken"):
            ports.reserve(number)
