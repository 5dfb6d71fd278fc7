"""Ranks as threads of one process: collectives that match calls by order, for tests of reduction logic.

A reduction under way fills the caller's buffer with NaN until all ranks have called, as a real one leaves
partial sums there: whoever reads or writes the buffer too early is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

TIMEOUT_S = 20.0


class _Match:
    """One collective: the calls of all ranks with the same number."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[Tensor, Tensor, str]] = {}
        self.done = threading.Event()


class Loopback:
    """A world of `size` threads; stands in for `topology.context` and `transport.collectives`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.log: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(size)}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._matches: dict[int, _Match] = {}

    def world(self) -> Any:
        return SimpleNamespace(
            rank=getattr(self._local, "rank", 0),
            size=self.size,
            device=torch.device("cpu"),
            config=SimpleNamespace(timeout_s=TIMEOUT_S),
            groups=SimpleNamespace(ranks=lambda axis: tuple(range(self.size))),
            table=SimpleNamespace(degrees=SimpleNamespace(pp=1, tp=1, rdp=self.size)),
            describe=lambda: f"world rank {self._local.rank}",
        )

    def all_reduce(self, tensor: Tensor, axis: str, op: str = "sum", async_op: bool = False) -> Any:
        rank = self._local.rank
        if self.size == 1:
            return None
        with self._lock:
            number = len(self.log[rank])
            self.log[rank].append((op, tensor.numel()))
            match = self._matches.setdefault(number, _Match())
            match.calls[rank] = (tensor, tensor.clone(), op)
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            if len(match.calls) == self.size:
                self._complete(match)
        pending = SimpleNamespace(wait=lambda: self._wait(match, number))
        return pending if async_op else pending.wait()

    def all_reduce_in_order(self, flat: Tensor, axis: str, async_op: bool = False) -> Any:
        return self.all_reduce(flat, axis, async_op=async_op)

    def _complete(self, match: _Match) -> None:
        assert len({(t.numel(), t.dtype, op) for t, _, op in match.calls.values()}) == 1, "calls do not match"
        values = torch.stack([match.calls[rank][1] for rank in range(self.size)])
        op = match.calls[0][2]
        result = values.sum(0, dtype=values.dtype) if op == "sum" else values.amax(0)
        for tensor, _, _ in match.calls.values():
            tensor.copy_(result)
        match.done.set()

    def _wait(self, match: _Match, number: int) -> None:
        assert match.done.wait(TIMEOUT_S), f"ranks {sorted(match.calls)} alone made collective {number}"

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(rank, *args) on every rank; return the results in rank order, or raise the first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = fn(rank, *args)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def install(monkeypatch: pytest.MonkeyPatch, size: int, modules: Sequence[Any]) -> Loopback:
    """Make `modules` use a new loopback world in place of the real one."""
    loopback = Loopback(size)
    for module in modules:
        for name in ("context", "collectives"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, loopback)
    return loopback
