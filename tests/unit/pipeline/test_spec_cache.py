"""Who may take an outcome for known when, and which outcomes hold Python values that depend on data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from shardwright.pipeline import spec_cache
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.spec import Spec
from shardwright.pipeline.spec_cache import SpecCache, UnitOutcome, tells_data
from shardwright.transport.structure import Node, Walker

SPEC = Spec((2, 3), (3, 1), torch.float32, True)
NONE: Node = ("none",)
OUTCOME = UnitOutcome(
    root=("tuple", tuple, (("tensor", 0),)), kept=(), contents=(), num_cells=0, changed=(), specs=(SPEC,),
    views=(None,), depends=((0,),), mutated=(), unused=frozenset(), opaques=(), volatile=False,
)  # fmt: skip


@dataclass
class Frame:
    """A microbatch, as far as the cache looks at it."""

    told: dict[Any, Any] = field(default_factory=dict)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(0, 2, torch.device("cpu"), wire=None)  # type: ignore[arg-type]


def test_news_of_a_step_counts_for_its_own_microbatch_only(runtime: Runtime) -> None:
    cache, first, second = SpecCache(runtime), Frame(), Frame()
    cache.told("key", first, OUTCOME)  # type: ignore[arg-type]
    assert cache.known("key", first)[0] is OUTCOME  # type: ignore[arg-type]
    assert cache.known("key", second)[0] is None  # type: ignore[arg-type]
    assert cache.known("key", second)[1]  # type: ignore[arg-type]
    runtime.learn()
    assert cache.known("key", second) == (OUTCOME, False)  # type: ignore[arg-type]


def test_a_failed_step_teaches_nothing(runtime: Runtime) -> None:
    cache = SpecCache(runtime)
    cache.told("key", Frame(), OUTCOME)  # type: ignore[arg-type]
    runtime.forget()
    runtime.learn()
    assert cache.known("key", Frame())[0] is None  # type: ignore[arg-type]


def test_volatile_outcomes_are_never_known(runtime: Runtime) -> None:
    cache, frame = SpecCache(runtime), Frame()
    cache.told("key", frame, replace(OUTCOME, volatile=True))  # type: ignore[arg-type]
    runtime.learn()
    assert cache.known("key", frame) == (None, False)  # type: ignore[arg-type]


def test_what_is_kept_does_not_grow_without_bound(runtime: Runtime) -> None:
    """Whatever order the news comes in, ranks keep the same."""
    caches = SpecCache(runtime), SpecCache(runtime)
    for step in range(40):
        keys = [(step, i) for i in range(20)]
        for cache, order in zip(caches, (keys, reversed(keys)), strict=True):
            for key in order:
                cache.told(key, Frame(), OUTCOME)  # type: ignore[arg-type]
        runtime.learn()
        assert caches[0]._known.keys() == caches[1]._known.keys()
        assert set(keys) <= caches[0]._known.keys()
        assert len(caches[0]._known) <= spec_cache._MOST_KINDS


def test_strides_may_differ() -> None:
    other = replace(OUTCOME, specs=(Spec((2, 3), (1, 2), torch.float32, True),))
    assert other.agrees_with(OUTCOME)
    for spec in (Spec((3, 2), (2, 1), torch.float32, True), Spec((2, 3), (3, 1), torch.float64, True), replace_grad()):
        assert not replace(OUTCOME, specs=(spec,)).agrees_with(OUTCOME)
    assert not replace(OUTCOME, specs=()).agrees_with(OUTCOME)
    assert not replace(OUTCOME, root=("tuple", tuple, (NONE,))).agrees_with(OUTCOME)


def replace_grad() -> Spec:
    return replace(SPEC, requires_grad=False)


# ------------------------------------------------------------------ data among Python values


class Thing:
    pass


def told(result: Any, before: Any, after: Any) -> bool:
    """Does a call tell data that returns `result` and turns the contents of `before` into those of `after`?"""
    old, new = Walker(), Walker()
    old.describe(before)
    new.describe(after)
    return tells_data(new.describe(result), tuple(old.contents), tuple(new.contents))


TENSOR = torch.zeros(1)


@pytest.mark.parametrize(
    ("result", "before", "after", "expected"),
    [
        (TENSOR, None, None, False),
        ((TENSOR, None, torch.float16), None, None, False),
        ((TENSOR, 1.5), None, None, True),
        ([TENSOR], None, None, False),
        ([TENSOR, True], None, None, True),
        ({"logits": TENSOR}, None, None, False),
        ({3: TENSOR}, None, None, True),
        (None, ["name"], ["name", TENSOR], False),
        (None, ["name"], ["other", TENSOR], True),
        (None, {"a": 1}, {"a": 1, "b": TENSOR}, False),
        (None, {"a": 1}, {"a": 2}, True),
        (None, {"old"}, {"old", "new"}, True),
    ],
)
def test_python_values(result: Any, before: Any, after: Any, expected: bool) -> None:
    assert told(result, before, after) is expected


def test_attributes_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Thing(), Thing()
    before.__dict__.update(flag=False, name="n")
    after.__dict__.update(flag=True, name="n", value=TENSOR)
    assert told(None, before, after)
    monkeypatch.setattr(spec_cache, "structural", [lambda cls: cls is Thing])
    assert not told(None, before, after)
