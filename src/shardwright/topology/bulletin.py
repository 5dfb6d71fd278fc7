"""What ranks tell each other through the rendezvous store: failures, farewells, signs of life, connections.

All of it is small text under one prefix. A rank writes its own entries; anyone may read all of them. Nothing
here waits for a value that may never come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.distributed_c10d import Store

from shardwright.topology.sockets import Route


@dataclass(frozen=True)
class Event:
    """Something that ends a rank's part in the job.

    kind: "error" (an exception on `rank`, or a wait there that ran out), "lost" (`rank` went away without a
    word), "left" (`rank` ended in good order).
    rank: whom it is about, None for the launcher; reporter: who says so.
    reason: the error's message; details: the traceback where there is one.
    """

    kind: Literal["error", "lost", "left"]
    rank: int | None
    reporter: int
    reason: str = ""
    details: str = ""
    module: str | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Sign:
    """A rank's sign of life: what it does now or did last.

    count: grows with every sign.   waits_for: ranks without which it can't go on; empty while it computes.
    seconds: for how long that has been so.   seen: number of events it has read.
    """

    count: int
    doing: str
    waits_for: tuple[int, ...]
    seconds: float
    seen: int


class StoreGoneError(RuntimeError):
    """The store doesn't answer any more: who served it has ended."""


class Bulletin:
    """Read and write the entries. Every call may raise StoreGoneError; once one did, all do.

    store: reached by all ranks, and used by nothing else in this process.
    is_gone: says without a call whether the store's server is gone: torch prints pages when a call fails.
    """

    def __init__(self, store: Store, is_gone: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._is_gone = is_gone
        self._gone = False
        self._unread: set[int] = set()
        self.num_read = 0
        self._num_known = 0

    def post(self, event: Event) -> int:
        """Write an event; return how many events there are then."""
        with self._reach() as store:
            number = int(store.add("events", 1))
            store.set(f"event/{number}", json.dumps(asdict(event)))
        return number

    def new_events(self) -> list[Event]:
        """Return the events, own ones included, that were not returned before."""
        with self._reach() as store:
            known = int(store.add("events", 0))
        self._unread.update(range(self._num_known + 1, known + 1))
        self._num_known = known
        events = []
        for number in sorted(self._unread):
            text = self._get(f"event/{number}")
            if text is not None:  # else its writer is between counting and writing, or died there
                self._unread.discard(number)
                self.num_read += 1
                events.append(Event(**json.loads(text)))
        return events

    def sign(self, rank: int, sign: Sign) -> None:
        """Write this rank's sign of life."""
        with self._reach() as store:
            store.set(f"sign/{rank}", json.dumps(asdict(sign)))

    def signs(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """Return the last sign of each rank that has given one."""
        found = {rank: self._get(f"sign/{rank}") for rank in ranks}
        return {rank: _sign(json.loads(text)) for rank, text in found.items() if text is not None}

    def post_routes(self, rank: int, routes: list[Route]) -> None:
        """Write both ends of this rank's connections."""
        with self._reach() as store:
            store.set(f"routes/{rank}", json.dumps(routes))

    def routes(self, rank: int) -> list[Route]:
        """Return the connections a rank has written; none if it hasn't."""
        text = self._get(f"routes/{rank}")
        return [] if text is None else [(own, peer) for own, peer in json.loads(text)]

    def publish(self, topic: str, rank: int, text: str) -> None:
        """Write what others may want to know of this rank, under a topic."""
        with self._reach() as store:
            store.set(f"{topic}/{rank}", text)

    def published(self, topic: str, rank: int) -> str | None:
        """Return what a rank has published under a topic, if it has."""
        return self._get(f"{topic}/{rank}")

    def _get(self, key: str) -> str | None:
        with self._reach() as store:
            return store.get(key).decode() if store.check([key]) else None

    @contextmanager
    def _reach(self) -> Iterator[Store]:
        if self._gone or self._is_gone():
            self._gone = True
            raise StoreGoneError("the rendezvous store is gone")
        try:
            yield self._store
        except RuntimeError as error:
            self._gone = True
            raise StoreGoneError("the rendezvous store is gone") from error


def _sign(fields: dict[str, Any]) -> Sign:
    return Sign(**{**fields, "waits_for": tuple(fields["waits_for"])})
