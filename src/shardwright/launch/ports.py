"""A port for the rendezvous that no other job can get in between.

Choosing a free port and handing on its number leaves seconds, until rank 0 listens, in which a second job
can be given the same number. Here the socket stays bound, without listening, for as long as the job lives:
the system gives the number to nobody else, and rank 0, whose store sets SO_REUSEADDR as this socket does,
can still listen on it.
"""

from __future__ import annotations

import errno
import socket

from shardwright.errors import ConfigError


def reserve(port: int | None) -> socket.socket:
    """Bind a port on all addresses of this host and keep it; close the socket to let go.

    port: the number asked for, or None for any free one. Read the number with `port_of`.
    Raises: ConfigError if it is taken or not allowed.
    """
    if port is None:
        return _bind(0)
    try:
        probe = _bind(port)
        try:
            probe.listen(1)  # binding alone succeeds beside a socket that does not listen yet
        finally:
            probe.close()
        return _bind(port)
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "is taken by another program on this host",
            errno.EACCES: "may not be used without more rights",
        }.get(error.errno or 0, f"can't be used: {error.strerror}")
        raise ConfigError(
            f"port {port} {reason}",
            remedy="leave --master-port out to get a free one, or name another",
        ) from error


def port_of(reserved: socket.socket) -> int:
    """Return the number of a reserved port."""
    return int(reserved.getsockname()[1])


def _bind(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if port != 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
        # For a free port only now: with it set before, the system may choose what another job reserves.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        sock.close()
        raise
    return sock
