"""The executor with made-up microbatches: ranks as executors in one process, messages by queues."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import programs, strays_of
from torch.overrides import TorchFunctionMode
from torch.utils._device import CURRENT_DEVICE  # noqa: F401 - it must exist

from shardwright.pipeline import executor as module
from shardwright.pipeline.executor import Executor
from shardwright.pipeline.schedule import Event, Kind, Order, cautious_limit, rehearse, strays, waits
from shardwright.pipeline.streams import Streams
from shardwright.pipeline.timetable import make_timetable


class Board:
    """A failure board; `failure` is what another rank did."""

    failure: Exception | None = None

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board()
    monkeypatch.setattr(module, "context", SimpleNamespace(world=lambda: SimpleNamespace(board=made)))
    monkeypatch.setattr(module, "_GLANCE_S", 0.05)
    return made


def make_frame(index: int, executor: Executor) -> Any:
    return SimpleNamespace(index=index, streams=Streams(index), strayed=False, finished=False, executor=executor)


def simple_run(body: Callable[[Any], Any], num_microbatches: int, limit: int | None = None) -> list[Any]:
    order = Order(num_microbatches, limit=limit)
    return Executor(body, make_frame, order, num_microbatches, gated=False).run()


# ------------------------------------------------------------------ order


class Ranks:
    """Several executors that run programs; like the real ones they block in a wait with the baton in hand."""

    def __init__(self, run: list[list[Event]], orders: list[Order], gated: bool, expected: Any) -> None:
        self._run = run
        self._gated = gated
        self._expected = expected
        self._arrived: dict[tuple[int, int, int], threading.Event] = {}
        self._lock = threading.Lock()
        self.executors = [
            Executor(lambda frame, rank=rank: self._body(frame, rank), make_frame, order, len(run), gated=gated)
            for rank, order in enumerate(orders)
        ]

    def go(self) -> list[tuple[int, ...]]:
        threads = [threading.Thread(target=e.run) for e in self.executors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive(), "a rank hangs"
        return [tuple(e.turns) for e in self.executors]

    def _message(self, rank: int, index: int, at: int) -> threading.Event:
        with self._lock:
            return self._arrived.setdefault((rank, index, at), threading.Event())

    def _body(self, frame: Any, rank: int) -> None:
        for at, event in enumerate(self._run[frame.index]):
            if not frame.strayed and strays(event, at, self._expected):
                frame.strayed = True
                frame.executor.wait_turn(frame)
            if event.kind == "gate":
                frame.executor.forward_done(frame)
            elif event.kind == "order":
                frame.executor.in_order(frame)
            elif waits(event, rank, self._gated):
                frame.executor.wait_turn(frame)
                assert self._message(rank, frame.index, at).wait(10)
            elif event.kind == "move" and event.rank == rank:
                self._message(event.to, frame.index, at).set()
            elif event.kind == "tell" and event.rank == rank:
                for other in range(len(self.executors)):
                    self._message(other, frame.index, at).set()


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(["interleaved", "simple"]), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_the_executor_takes_the_turns_of_the_rehearsal(
    data: st.DataObject, kind: Kind, num_ranks: int, num_microbatches: int, planned: bool
) -> None:
    program = data.draw(programs(num_ranks))
    run = [data.draw(st.one_of(st.just(program), strays_of(program, num_ranks))) for _ in range(num_microbatches)]
    gated = kind == "simple"
    table = make_timetable(kind, program, num_microbatches, 4, num_ranks)

    def orders() -> list[Order]:
        if planned:
            return [Order(num_microbatches, turns=turns, gated=gated) for turns in table.turns]
        limits = [cautious_limit(kind, num_microbatches, 4, rank, num_ranks) for rank in range(num_ranks)]
        return [Order(num_microbatches, limit=limit, gated=gated) for limit in limits]

    expected = table.program if planned else None
    on_paper = rehearse(orders(), run, gated=gated, expected=expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "context", SimpleNamespace(world=lambda: SimpleNamespace(board=Board())))
        real = Ranks(run, orders(), gated, expected).go()
    assert real == list(on_paper.turns)


def test_results_are_in_the_order_of_the_microbatches(board: Board) -> None:
    def body(frame: Any) -> int:
        if frame.index == 0:
            for _ in range(3):
                frame.executor.wait_turn(frame)
        return 10 * frame.index

    assert simple_run(body, 4, limit=4) == [0, 10, 20, 30]


def test_only_one_runs_at_a_time(board: Board) -> None:
    inside: list[int] = []

    def body(frame: Any) -> None:
        for _ in range(5):
            inside.append(frame.index)
            time.sleep(0.001)
            assert inside == [frame.index]
            inside.clear()
            frame.executor.wait_turn(frame)

    simple_run(body, 4, limit=4)


def test_threads_are_used_again(board: Board) -> None:
    def body(frame: Any) -> None:
        frame.executor.wait_turn(frame)

    def count() -> int:
        return sum(t.name.startswith("shardwright-microbatch") for t in threading.enumerate())

    simple_run(body, 6, limit=3)
    before = count()
    for _ in range(20):
        simple_run(body, 6, limit=3)
    assert count() == before
    assert before <= 6 + len(module._workers._idle)


# ------------------------------------------------------------------ failures


class Trouble(Exception):
    """What goes wrong in these tests."""


def test_the_first_error_is_raised_and_the_others_unwind_one_by_one(board: Board) -> None:
    unwound: list[int] = []
    together: list[int] = []

    def body(frame: Any) -> None:
        try:
            frame.executor.wait_turn(frame)
            if frame.index == 0:
                raise Trouble("of microbatch 0")
        finally:
            together.append(frame.index)
            time.sleep(0.01)
            assert together == [frame.index]
            together.clear()
            unwound.append(frame.index)

    with pytest.raises(Trouble, match="of microbatch 0") as caught:
        simple_run(body, 3, limit=3)
    assert sorted(unwound) == [0, 1, 2]
    assert caught.value.shardwright_microbatch == 0  # type: ignore[attr-defined]


def test_a_microbatch_that_unwinds_can_not_wait_again(board: Board) -> None:
    def body(frame: Any) -> None:
        try:
            frame.executor.wait_turn(frame)
            raise Trouble
        finally:
            frame.executor.wait_turn(frame)

    with pytest.raises(Trouble):
        simple_run(body, 3, limit=3)


@pytest.mark.parametrize("where", ["computing", "waiting"])
def test_a_failure_elsewhere_ends_the_step(board: Board, where: str) -> None:
    freed = threading.Event()
    ended: list[str] = []

    def body(frame: Any) -> None:
        board.failure = Trouble("elsewhere")
        try:
            if where == "waiting":
                freed.wait(5)  # as a wait for a message does that ends when connections are cut
            while True:
                time.sleep(0.001)
        finally:
            ended.append("ended")

    order = Order(2, limit=2)
    executor = Executor(body, make_frame, order, 2, gated=False)
    start = time.monotonic()
    with pytest.raises(Trouble, match="elsewhere"):
        executor.run()
    freed.set()
    executor.settle(3.0)
    assert ended == ["ended"]
    assert time.monotonic() - start < 3


def test_workers_survive_failures(board: Board) -> None:
    def bad(frame: Any) -> None:
        raise Trouble

    for _ in range(10):
        with pytest.raises(Trouble):
            simple_run(bad, 3, limit=3)
    assert simple_run(lambda frame: frame.index, 3) == [0, 1, 2]


# ------------------------------------------------------------------ state of threads (design rule 9)


class Marked(TorchFunctionMode):
    """A function mode that counts how often it is entered."""

    entered = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def observed() -> dict[str, Any]:
    """Everything that code in a step can find out about its surroundings."""
    saved = torch.ones(2, requires_grad=True).exp().grad_fn
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": torch.ones(1).device.type,
        "default device": torch.get_default_device().type,
        "current device": str(torch.utils._device.CURRENT_DEVICE),
        "saved tensors": None if saved is None else type(saved._raw_saved_result.data).__name__,
        "modes": len(torch.overrides._get_current_function_mode_stack()),
        "variable": VARIABLE.get(),
        "dtype": torch.get_default_dtype(),
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@contextlib.contextmanager
def variable(value: str) -> Iterator[None]:
    token = VARIABLE.set(value)
    yield
    VARIABLE.reset(token)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def flag(setter: Callable[[Any], Any], getter: Callable[[], Any], value: Any) -> Iterator[None]:
    before = getter()
    setter(value)
    yield
    setter(before)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
    "function mode": Marked,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda p: p[0]),
    "context variable": lambda: variable("set"),
    "default dtype": lambda: default_dtype(torch.float64),
    "sdpa": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "precision": lambda: flag(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"),
    "deterministic": lambda: flag(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_callers_surroundings_are_those_of_every_microbatch(name: str, board: Board) -> None:
    def body(frame: Any) -> list[dict[str, Any]]:
        first = observed()
        frame.executor.wait_turn(frame)
        return [first, observed()]

    outside = observed()
    with SURROUNDINGS[name]() as mode:
        here = observed()
        assert here != outside
        for seen in simple_run(body, 3, limit=3):
            assert seen == [here, here]
        assert observed() == here
        if isinstance(mode, Marked):
            assert mode.entered == 1
    assert observed() == outside


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_a_microbatch_changes_is_its_own(name: str, board: Board) -> None:
    """The even ones wait inside of the block, the odd ones outside; each always finds what it left."""
    outside = observed()
    with SURROUNDINGS[name]():
        inside = observed()

    def body(frame: Any) -> None:
        if frame.index % 2:
            for _ in range(4):
                assert observed() == outside
                frame.executor.wait_turn(frame)
            return
        with SURROUNDINGS[name]():
            for _ in range(2):
                assert observed() == inside
                frame.executor.wait_turn(frame)
            assert observed() == inside
        assert observed() == outside

    order = [0, 1, 2, 1, 3, 0, 2, 3, 1, 0, 2, 1, 3, 3, 1, 3]
    Executor(body, make_frame, Order(4, turns=order), 4, gated=False).run()
    assert observed() == outside


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["default dtype", "sdpa", "precision", "deterministic", "device", "no_grad"])
def test_what_a_microbatch_leaves_behind_does_not_reach_the_caller(name: str, fails: bool, board: Board) -> None:
    def body(frame: Any) -> None:
        assert observed() == outside
        SURROUNDINGS[name]().__enter__()
        frame.executor.wait_turn(frame)
        if fails:
            raise Trouble

    outside = observed()
    generator = torch.get_rng_state()
    with pytest.raises(Trouble) if fails else contextlib.nullcontext():
        simple_run(body, 3, limit=3)
    assert observed() == outside
    assert torch.equal(torch.get_rng_state(), generator)


def test_each_microbatch_has_random_streams_of_its_own(board: Board) -> None:
    def body(frame: Any) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(()).item())
            frame.executor.wait_turn(frame)
        return drawn

    together = simple_run(body, 3, limit=3)
    one_by_one = simple_run(body, 3, limit=1)
    assert together == one_by_one
    assert len({x for drawn in together for x in drawn}) == 9
