"""Which attributes a call looks at, and what objects hold."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from shardwright.pipeline.contents import buffers_of, changed, contents_of, depths_of
from shardwright.pipeline.watch import Watch, can_be_watched


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.total: Any = torch.zeros(2)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return self.linear(x) + self.total


class Peeks(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (0 if getattr(self, "missing", None) is None else 1)


def test_reads_are_seen_and_writes_are_not() -> None:
    module, other = Module(), Module()
    with Watch(module.modules()) as watch:
        module(torch.ones(2))
    names = {name for which, name in watch.seen if which == id(module)}
    assert "total" in names
    assert "last" not in names
    assert not any(which == id(other) for which, _ in watch.seen)


def test_a_look_for_something_that_is_not_there_is_seen() -> None:
    module = Peeks()
    with Watch([module, Module()]) as watch:
        module(torch.ones(2))
    assert {(id(module), "missing"), (id(module), "total")} <= watch.seen


def test_classes_are_left_as_they_were() -> None:
    class Own(Module):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    module, own = Module(), Own()
    before = Own.__dict__["__getattribute__"]
    with Watch([module]):
        with Watch([module, own]) as inner:
            own(torch.ones(2))
        assert "__getattribute__" in Module.__dict__
        assert Own.__dict__["__getattribute__"] is before
    assert (id(own), "total") in inner.seen
    assert "__getattribute__" not in Module.__dict__


def test_other_threads_are_not_watched() -> None:
    module = Module()
    with Watch([module]) as watch:
        thread = threading.Thread(target=module, args=(torch.ones(2),))
        thread.start()
        thread.join()
    assert (id(module), "total") not in watch.seen


def test_what_is_compiled_can_not_be_watched() -> None:
    module = Module()
    assert can_be_watched(module)
    module.compile(backend="eager")
    assert not can_be_watched(module)


class Box:
    def __init__(self) -> None:
        self.parts: dict[str, Any] = {"list": [torch.zeros(2)]}


def test_changes_of_attributes_are_seen() -> None:
    module = Module()
    module.items = []
    before = contents_of(module)
    assert changed(before, contents_of(module)) == []
    module.total += 1
    module.items.append(1)
    module.last = torch.ones(2)
    assert changed(before, contents_of(module)) == ["total", "last", "items"]


def test_changes_inside_objects_are_seen() -> None:
    module = Module()
    module.box = Box()
    before = depths_of(module, set())
    assert changed(before, depths_of(module, set())) == []
    module.box.parts["list"][0].add_(1)
    assert changed(before, depths_of(module, set())) == ["box"]


def test_statistics_of_batch_norms_are_nobodys_state() -> None:
    norm, own = nn.BatchNorm1d(2), nn.Module()
    own.register_buffer("count", torch.zeros(()))
    before = buffers_of(norm), buffers_of(own)
    norm(torch.randn(3, 2))
    own.count += 1  # type: ignore[operator]
    assert changed(before[0], buffers_of(norm)) == []
    assert changed(before[1], buffers_of(own)) == ["count"]
