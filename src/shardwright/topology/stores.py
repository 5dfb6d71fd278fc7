"""The rendezvous store: opening it, who serves it, and the failure board's own connection to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from shardwright.topology.bulletin import Bulletin
from shardwright.topology.sockets import ConnectionRecord

_served: dict[str, Store] = {}
"""Stores at a port, by address, kept so that a later `init` of this process can use them again."""

_num_opened = 0


@dataclass(frozen=True)
class OpenStore:
    """A store under a prefix of this `init`'s own, which is equal on all ranks.

    port: where its server listens, None if it needs none.
    served_by: the rank whose process is the server, None if no rank's is.
    """

    store: Store
    port: int | None
    served_by: int | None


def open_store(
    init_method: str | None, rank: int, size: int, timeout: timedelta, environ: Mapping[str, str]
) -> OpenStore:
    """Open the store at an address; None is a store in the memory of a world of one.

    Called by: every rank. Waits for rank 0, if that serves the store.
    """
    if init_method is None:
        return _described(dist.HashStore(), environ)
    base = _served.get(init_method)
    if base is None:
        base, _, _ = next(dist.rendezvous(init_method, rank, size, timeout=timeout))
    opened = _described(base, environ)
    if opened.port is not None:
        _served[init_method] = base
    return opened


def default_store(environ: Mapping[str, str]) -> OpenStore:
    """Return the store of the default group that the script has made."""
    return _described(_get_default_store(), environ)


def open_bulletin(opened: OpenStore) -> tuple[Bulletin, ConnectionRecord]:
    """Return a bulletin on a store, and its connection, to be closed at the end.

    It gets a connection of its own where torch can make one, so as not to wait behind others' blocking calls.
    """
    connection = ConnectionRecord()
    store = PrefixStore("board", opened.store)
    with connection.recording():
        try:
            store = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, NotImplementedError):
            pass  # an older torch: the board shares the connection
    server = f":{opened.port}"

    def is_gone() -> bool:
        return any(peer.endswith(server) for _, peer in connection.hung_up())

    return Bulletin(store, is_gone), connection


def _described(base: Store, environ: Mapping[str, str]) -> OpenStore:
    global _num_opened
    _num_opened += 1
    # torchrun's store outlives a restart of the workers, and with it what those before have written.
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"shardwright/{start}/{_num_opened}", base)
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        return OpenStore(store, None, None)
    by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return OpenStore(store, base.port, None if by_launcher else 0)
