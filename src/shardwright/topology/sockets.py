"""The connections that group creation opens: whose they are, whether the other end is gone, cutting them.

A blocked wait on gloo can't be cancelled: the only way to end it is to shut its connection down. So the
connections that appear while groups are created are kept here, as duplicates of the file descriptors: a
number that gloo has closed, and the system has given to another file, is never touched. The duplicates also
see the moment a peer process dies, whichever rank this process is waiting for.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_FD_FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
_HAS_RDHUP: Final = hasattr(select, "POLLRDHUP")
_HANGUP: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

Route = tuple[str, str]
"""Both ends of a connection, this side's first. The peer knows the same connection by the reverse."""


class ConnectionRecord:
    """The connections of this process's groups.

    ignored_port: connections that have it at either end are left out. It is the rendezvous store's: ranks
    connect to a store served by this process at any time, and must still reach it when the groups are cut.
    """

    def __init__(self, ignored_port: int | None = None) -> None:
        self._ignored = f":{ignored_port}"
        self._sockets: dict[Route, socket.socket] = {}
        self._originals: dict[int, int] = {}  # the groups' own descriptors, with their inode

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every connection that is there after the block and wasn't before."""
        before = _open_descriptors()
        yield
        for descriptor, inode in sorted(_open_descriptors().items()):
            connection = None if before.get(descriptor) == inode else _connected_socket(descriptor)
            if connection is None:
                continue
            route = _route(connection)
            if any(end.endswith(self._ignored) for end in route):
                connection.close()
                continue
            self._originals[descriptor] = inode
            self._sockets[route] = connection

    def routes(self) -> list[Route]:
        """Return both ends of every connection, for peers to look up whose connection broke."""
        return list(self._sockets)

    def hung_up(self) -> list[Route]:
        """Return the connections whose other end has closed since the last call."""
        poll = select.poll()
        by_descriptor: dict[int, Route] = {}
        for route, connection in self._sockets.items():
            by_descriptor[connection.fileno()] = route
            poll.register(connection, _HANGUP if _HAS_RDHUP else select.POLLIN)
        gone = [
            by_descriptor[descriptor]
            for descriptor, events in poll.poll(0)
            if events & _HANGUP or (not _HAS_RDHUP and _at_end(self._sockets[by_descriptor[descriptor]]))
        ]
        for route in gone:
            self._sockets.pop(route).close()
        return gone

    def cut(self) -> None:
        """Shut every connection down: what waits on one of them raises at once, here and on the peer."""
        for connection in list(self._sockets.values()):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                if error.errno not in (errno.ENOTCONN, errno.EBADF):
                    raise

    def close(self) -> None:
        """Let go of the duplicates; the groups' own descriptors stay open."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()
        self._originals.clear()

    def abandon_in_child(self) -> None:
        """In a forked child: give up the parent's connections, so that they end when the parent does.

        The numbers stay taken (by /dev/null), for the copies of gloo's objects believe that they own them.
        """
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, inode in self._originals.items():
            try:
                if os.fstat(descriptor).st_ino == inode:
                    os.dup2(nothing, descriptor)
            except OSError:
                pass  # closed since
        os.close(nothing)
        self.close()


def _open_descriptors() -> dict[int, int]:
    """Return the open file descriptors with their inodes."""
    folder = next((folder for folder in _FD_FOLDERS if os.path.isdir(folder)), None)
    found: dict[int, int] = {}
    for name in os.listdir(folder) if folder is not None else ():
        try:
            found[int(name)] = os.fstat(int(name)).st_ino
        except (OSError, ValueError):
            pass  # the folder's own descriptor, closed by now
    return found


def _connected_socket(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a descriptor if it is a connected TCP socket."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _route(connection: socket.socket) -> Route:
    def text(address: tuple[object, ...]) -> str:
        return f"{address[0]}:{address[1]}"

    return text(connection.getsockname()), text(connection.getpeername())


def _at_end(connection: socket.socket) -> bool:
    """True if nothing is left to read, where the system has no event for it."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK)
