"""Finding the first call that differs, and naming where an error arose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardwright.errors import RemoteRankError
from shardwright.pipeline import agreement, blame
from shardwright.pipeline.agreement import Record, first_difference
from shardwright.pipeline.frame import Call
from shardwright.pipeline.schedule import Event
from shardwright.pipeline.spec import Spec

SPEC = Spec((2, 3), (3, 1), torch.float32, True)


def frame(index: int, *labels: str, finished: bool = False, events: tuple[Event, ...] = ()) -> Any:
    calls = [Call(label, 0, (SPEC,)) for label in labels]
    return SimpleNamespace(index=index, calls=calls, program=list(events), finished=finished)


def record(*frames: Any, finished: bool = False) -> Record:
    return Record.of(frames, finished=finished)


def test_the_first_difference_in_the_lowest_microbatch() -> None:
    here = record(frame(0, "a", "b"), frame(1, "a", "c", "x"))
    there = record(frame(0, "a", "b"), frame(1, "a", "d", "y"))
    assert first_difference({0: here, 1: there, 2: here}) == (
        "ranks of a pipeline group ran different programs; the first difference is in microbatch 1, call 1:"
        "\n  pipeline rank 0: 'c' on stage 0 -> float32[2, 3], grad"
        "\n  pipeline rank 1: 'd' on stage 0 -> float32[2, 3], grad"
        "\n  pipeline rank 2: 'c' on stage 0 -> float32[2, 3], grad"
    )


def test_a_rank_that_is_not_as_far_does_not_differ() -> None:
    assert first_difference({0: record(frame(0, "a", "b")), 1: record(frame(0, "a"))}) is None
    assert first_difference({0: record(frame(0, "a"), frame(1, "a")), 1: record(frame(0, "a"))}) is None
    assert first_difference({0: record(frame(0, "a", "b")), 1: record()}) is None


def test_a_rank_that_is_at_its_end_does() -> None:
    ended = record(frame(0, "a", finished=True))
    assert "pipeline rank 1: nothing (it was at the end)" in str(
        first_difference({0: record(frame(0, "a", "b")), 1: ended})
    )
    assert first_difference({0: record(frame(0, "a", "b")), 1: record(frame(0, "a"), finished=True)}) is not None


def test_a_record_travels_as_text() -> None:
    made = record(frame(0, "a", "b", finished=True), frame(3, "ä"))
    assert Record.from_text(made.to_text()) == made


def test_the_digest_sees_calls_messages_and_their_microbatch() -> None:
    base = [frame(0, "a", "b"), frame(1, "a")]
    move = frame(0, "a", "b", events=(Event("move", 0, 1),))
    others = [
        [frame(0, "b", "a"), frame(1, "a")],
        [frame(0, "a", "b"), frame(1, "b")],
        [frame(0, "a"), frame(1, "b", "a")],
        [frame(0, "a", "b")],
        [frame(0, "a", "b"), frame(2, "a")],
        [move, frame(1, "a")],
    ]
    assert agreement.digest(base) == agreement.digest([frame(0, "a", "b"), frame(1, "a")])
    assert len({agreement.digest(frames) for frames in [base, *others]}) == 7
    assert 0 <= agreement.digest(base) < 1 << 63


# ------------------------------------------------------------------ blame


class Inner(nn.Module):
    def forward(self, x: Any) -> Any:
        raise ZeroDivisionError("inside")


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Inner()])

    def forward(self, x: Any, glue: bool) -> Any:
        if glue:
            raise ZeroDivisionError("in glue")
        return self.h[0](x)


def blamed(call: Any, error_type: type[BaseException] = ZeroDivisionError) -> Any:
    model = Outer()
    runtime: Any = SimpleNamespace(rank=1, module_names={id(m): n for n, m in model.named_modules()})
    try:
        call(model)
    except error_type as error:
        blame.name_place(error, runtime, 3)
        return error
    raise AssertionError("nothing was raised")


def test_the_innermost_module_is_named() -> None:
    error = blamed(lambda model: model(1, False))
    assert error.shardwright_place == "h.0"
    assert error.__notes__ == ["on pipeline rank 1, microbatch 3, module 'h.0'"]


def test_glue_of_the_model_itself_is_named_by_its_class() -> None:
    assert blamed(lambda model: model(1, True)).shardwright_place == "Outer"


def test_an_error_of_the_step_function_has_no_module() -> None:
    def body(model: Any) -> None:
        raise ZeroDivisionError

    error = blamed(body)
    assert not hasattr(error, "shardwright_place")
    assert error.__notes__ == ["on pipeline rank 1, microbatch 3"]


def test_a_place_that_is_known_already_stays() -> None:
    def body(model: Any) -> None:
        error = ZeroDivisionError()
        blame.set_place(error, "backward of h.0")
        raise error

    assert blamed(body).shardwright_place == "backward of h.0"


def test_errors_from_elsewhere_say_where_they_were() -> None:
    def body(model: Any) -> None:
        raise RemoteRankError("rank 2 failed")

    assert not hasattr(blamed(body, RemoteRankError), "__notes__")
