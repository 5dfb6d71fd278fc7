"""The gradient reducer on threads: order, missing and late gradients, memory, hooks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopback import Loopback, install
from shardwright.data_parallel import reducer as reducer_module
from shardwright.data_parallel.comm_hook import CommHook, HookBucket
from shardwright.data_parallel.reducer import GradientReducer
from shardwright.errors import CommunicationTimeout, UsageError

SHAPES = [(3,), (5, 7), (), (2, 3, 4), (11,), (0,), (1,)]
Names = list[tuple[str, nn.Parameter]]


def parameters() -> Names:
    return [(f"p{i}", nn.Parameter(torch.zeros(s))) for i, s in enumerate(SHAPES)]


def gradient_of(rank: int, position: int, shape: Any, step: int = 0) -> Tensor:
    return torch.rand(
        tuple(shape), generator=torch.Generator().manual_seed(100 * step + 10 * rank + position)
    )


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Loopback:
    return install(monkeypatch, request.param, [reducer_module])


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Loopback:
    return install(monkeypatch, 2, [reducer_module])


def make(named: Names, world: Loopback, **options: Any) -> GradientReducer:
    options = {"axis": "dp", "average_over": world.size, "bucket_cap_mb": 30 * 4 / 2**20} | options
    return GradientReducer(named, **options)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_mean_whatever_the_order_of_ready(world: Loopback, as_view: bool, overlap: bool) -> None:
    def body(rank: int) -> list[list[Tensor]]:
        named = parameters()
        reducer = make(named, world, overlap=overlap, gradient_as_bucket_view=as_view)
        order = random.Random(rank)
        steps = []
        for step in range(3):
            shuffled = list(enumerate(named))
            order.shuffle(shuffled)
            for position, (_, p) in shuffled:
                p.grad = gradient_of(rank, position, p.shape, step)
                if order.random() < 0.8:
                    reducer.ready(p)
            reducer.finish()
            steps.append([p.grad.clone() for _, p in named if p.grad is not None])
        return steps

    results = world.run(body)
    for step in range(3):
        for position, shape in enumerate(SHAPES):
            total = torch.stack([gradient_of(r, position, shape, step) for r in range(world.size)]).sum(0)
            for rank in range(world.size):
                assert torch.equal(results[rank][step][position], total / world.size)
    assert all(log == world.log[0] for log in world.log.values())
    assert len(world.log[0]) > 2 * 3


@pytest.mark.parametrize("as_view", [False, True])
def test_missing_gradients(two: Loopback, as_view: bool) -> None:
    """Nowhere: None stays. On one rank only: the other counts as zero."""

    def body(rank: int) -> list[Tensor | None]:
        named = parameters()
        reducer = make(named, two, gradient_as_bucket_view=as_view)
        for _ in range(2):
            for position, (_, p) in enumerate(named):
                p.grad = None
                if position in (0, 3) or (position == 1 and rank == 1):
                    p.grad = gradient_of(rank, position, p.shape)
                    reducer.ready(p)
            reducer.finish()
        return [p.grad for _, p in named]

    for grads in two.run(body):
        assert [g is not None for g in grads] == [True, True, False, True, False, False, False]
        assert grads[1] is not None
        assert torch.equal(grads[1], gradient_of(1, 1, SHAPES[1]) / 2)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("average_over", [3, 6])
def test_late_gradient_is_exact(
    monkeypatch: pytest.MonkeyPatch, as_view: bool, announced: bool, average_over: int
) -> None:
    """A gradient that grows, or first appears, after its bucket was started, on one rank only."""
    world = install(monkeypatch, 3, [reducer_module])

    def body(rank: int) -> list[Tensor | None]:
        named = [("a", nn.Parameter(torch.zeros(4))), ("b", nn.Parameter(torch.zeros(5)))]
        reducer = make(named, world, gradient_as_bucket_view=as_view, average_over=average_over)
        for step in range(2):
            for name, p in named:
                p.grad = None
                p.register_hook(lambda g: g)
                if not (name == "b" and rank == 0):
                    (p * 2.0).sum().backward()
            for _, p in named:
                reducer.ready(p)
            if rank == step:
                for _, p in named:
                    (p * 5.0).sum().backward()
                    if announced:
                        reducer.late(p)
            reducer.finish()
        return [p.grad for _, p in named]

    for a, b in world.run(body):
        assert a is not None
        assert b is not None
        assert a.tolist() == [pytest.approx((3 * 2 + 5) / average_over)] * 4
        assert b.tolist() == [pytest.approx((2 * 2 + 5) / average_over)] * 5


def test_dtypes_do_not_mix_and_strides_are_kept(two: Loopback) -> None:
    def body(rank: int) -> list[Tensor | None]:
        image = nn.Parameter(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
        named = [
            ("h", nn.Parameter(torch.rand(3).half())),
            ("i", image),
            ("b", nn.Parameter(torch.rand(3).bfloat16())),
        ]
        reducer = make(named, two, gradient_as_bucket_view=True)
        for _, p in named:
            p.grad = torch.full_like(p, rank + 1)
        reducer.finish()
        return [p.grad for _, p in named]

    for h, i, b in two.run(body):
        assert h is not None
        assert i is not None
        assert b is not None
        assert (h.dtype, i.dtype, b.dtype) == (torch.float16, torch.float32, torch.bfloat16)
        assert i.is_contiguous(memory_format=torch.channels_last)
        assert all((g == 1.5).all() for g in (h, i, b))
    assert sorted(two.log[0])[-1] == ("sum", 96)


def test_accumulation_over_steps_without_zeroing(two: Loopback) -> None:
    """Two reduced steps without zero_grad give the sum of the two means."""

    def body(rank: int) -> Tensor | None:
        named = [("w", nn.Parameter(torch.zeros(3)))]
        reducer = make(named, two)
        for step in range(2):
            (named[0][1] * float(1 + rank + 10 * step)).sum().backward()
            reducer.ready(named[0][1])
            reducer.finish()
        return named[0][1].grad

    for grad in two.run(body):
        assert grad is not None
        assert grad.tolist() == [1.5 + 11.5] * 3


def test_memory_is_reused_and_views_are_the_gradient(two: Loopback) -> None:
    def body(rank: int) -> tuple[set[int], bool]:
        named = parameters()
        reducer = make(named, two, gradient_as_bucket_view=True)
        addresses = set()
        zeroed_in_place = True
        for step in range(3):
            for position, (_, p) in enumerate(named):
                if p.grad is None:
                    p.grad = gradient_of(rank, position, p.shape, step)
                else:
                    p.grad.zero_()
                    before = p.grad
                    (p * 1.0).sum().backward()
                    zeroed_in_place &= p.grad is before
            reducer.finish()
            addresses |= {p.grad.data_ptr() for _, p in named if p.grad is not None and p.numel()}
        return addresses, zeroed_in_place

    for addresses, zeroed_in_place in two.run(body):
        assert len(addresses) == len([s for s in SHAPES if s != (0,)])
        assert zeroed_in_place


def test_copied_gradient_keeps_its_tensor(two: Loopback) -> None:
    def body(rank: int) -> bool:
        named = parameters()
        reducer = make(named, two)
        grads = []
        for _, p in named:
            p.grad = torch.ones_like(p)
            grads.append(p.grad)
        reducer.finish()
        return all(p.grad is g for (_, p), g in zip(named, grads, strict=True))

    assert two.run(body) == [True, True]


def test_frozen_and_unfrozen_parameters(two: Loopback) -> None:
    def body(rank: int) -> list[Any]:
        named = parameters()
        named[1][1].requires_grad_(False)
        reducer = make(named, two)
        seen = []
        for step in range(3):
            named[1][1].requires_grad_(step == 1)
            for _, p in named:
                p.grad = torch.full_like(p, rank + 1.0) if p.requires_grad else None
            reducer.finish()
            grad = named[1][1].grad
            seen.append(None if grad is None else grad.flatten()[0].item())
        with pytest.raises(UsageError, match=r"shape \[5, 7\] is not reduced over dp"):
            reducer.ready(named[1][1])
        return seen

    assert two.run(body) == [[None, 1.5, None]] * 2


def test_cast_parameters_get_new_buckets(two: Loopback) -> None:
    def body(rank: int) -> Tensor | None:
        model = nn.Linear(3, 1)
        reducer = make(list(model.named_parameters()), two, gradient_as_bucket_view=True)
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            model.zero_grad()
            model.weight.grad = torch.full_like(model.weight, rank + 1.0)
            reducer.finish()
        return model.weight.grad

    for grad in two.run(body):
        assert grad.dtype == torch.float64
        assert grad.tolist() == [[1.5] * 3]


def test_shared_parameter_is_reduced_once(two: Loopback) -> None:
    def body(rank: int) -> float:
        w = nn.Parameter(torch.zeros(3))
        reducer = make([("a.w", w), ("b.w", w)], two)
        w.grad = torch.full_like(w, rank + 1.0)
        reducer.ready(w)
        reducer.finish()
        return float(w.grad[0])

    assert two.run(body) == [1.5, 1.5]
    assert two.log[0] == [("sum", 3), ("sum", 2)]


def test_sparse_gradient_is_reduced_densely(two: Loopback) -> None:
    def body(rank: int) -> Tensor | None:
        table = nn.Embedding(4, 2, sparse=True)
        reducer = make([("table", table.weight)], two)
        table(torch.tensor([rank, 3])).sum().backward()
        reducer.finish()
        return table.weight.grad

    for grad in two.run(body):
        assert grad is not None
        assert grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0], [1, 1]]


def test_one_rank_alone_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = install(monkeypatch, 1, [reducer_module])

    def body(rank: int) -> Tensor | None:
        w = nn.Parameter(torch.zeros(3))
        reducer = make([("w", w)], world)
        w.grad = torch.ones(3)
        reducer.ready(w)
        reducer.finish()
        return w.grad

    assert world.run(body)[0].tolist() == [1, 1, 1]
    assert world.log[0] == []


@pytest.mark.parametrize("as_view", [False, True])
def test_one_rank_alone_still_divides(monkeypatch: pytest.MonkeyPatch, as_view: bool) -> None:
    """A gradient that holds the sum over tp ranks, with one replica: an axis of one rank, a mean over two."""
    world = install(monkeypatch, 1, [reducer_module])

    def body(rank: int) -> Tensor | None:
        w = nn.Parameter(torch.zeros(3))
        reducer = make([("w", w)], world, axis="rdp", average_over=2, gradient_as_bucket_view=as_view)
        w.grad = torch.ones(3)
        reducer.ready(w)
        reducer.finish()
        return w.grad

    assert world.run(body)[0].tolist() == [0.5, 0.5, 0.5]


def test_nothing_trainable_is_no_collective(two: Loopback) -> None:
    def body(rank: int) -> None:
        make([("w", nn.Parameter(torch.zeros(3), requires_grad=False))], two).finish()
        make([], two).finish()

    two.run(body)
    assert two.log[0] == []


@pytest.mark.parametrize("as_view", [False, True])
def test_rank_without_data_takes_part_with_zeros(two: Loopback, as_view: bool) -> None:
    def body(rank: int) -> Tensor | None:
        w = nn.Parameter(torch.zeros(3))
        reducer = make([("w", w)], two, gradient_as_bucket_view=as_view)
        for step in range(2):
            w.grad = torch.full((3,), 4.0)
            if rank == 0 or step == 0:
                reducer.ready(w)
                reducer.finish(average_over=1 if step else None)
            else:
                reducer.finish(contribute=False)
        return w.grad

    mine, other = two.run(body)
    assert mine.tolist() == [4, 4, 4]
    assert other is None or other.tolist() == [4, 4, 4]


@pytest.mark.parametrize("as_view", [False, True])
def test_after_an_abandoned_step_the_next_one_is_right(two: Loopback, as_view: bool) -> None:
    def body(rank: int) -> Tensor | None:
        w, v = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(50))
        reducer = make([("v", v), ("w", w)], two, gradient_as_bucket_view=as_view)
        w.grad = torch.ones(3)
        reducer.ready(w)
        reducer.abandon()
        w.grad = torch.full((3,), rank + 1.0)
        v.grad = torch.zeros(50)
        reducer.ready(v)
        reducer.ready(w)
        reducer.finish()
        return w.grad

    assert [g.tolist() for g in two.run(body)] == [[1.5] * 3] * 2


def test_comm_hook_reduces_and_owns_averaging(two: Loopback) -> None:
    def body(rank: int) -> Any:
        named = parameters()
        seen: list[Any] = []

        def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            seen.append((state, bucket.index(), bucket.is_last(), bucket.buffer().numel()))
            assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            two.all_reduce(bucket.buffer(), "dp")
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() * 10)
            return future

        reducer = make(named, two)
        reducer.register_comm_hook("state", hook)
        for _, p in named:
            p.grad = torch.ones_like(p)
            reducer.ready(p)
        reducer.finish()
        assert all((p.grad == 20).all() for _, p in named if p.grad is not None)
        with pytest.raises(UsageError, match="registered already"):
            reducer.register_comm_hook(None, hook)
        return seen

    seen, _ = two.run(body)
    assert [s[1] for s in seen] == list(range(len(seen)))
    assert [s[2] for s in seen] == [False] * (len(seen) - 1) + [True]


@pytest.mark.parametrize(
    ("result", "message"),
    [(torch.zeros(1), r"returned \[1\] for bucket 0, expected a tensor of 3"), (7, "int")],
)
def test_comm_hook_with_a_bad_result(two: Loopback, result: Any, message: str) -> None:
    def hook(state: Any, bucket: Any) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return future

    def body(rank: int) -> None:
        w = nn.Parameter(torch.zeros(3))
        reducer = make([("w", w)], two, comm_hook=CommHook(None, hook))
        w.grad = torch.ones(3)
        with pytest.raises(UsageError, match=message):
            reducer.finish()

    two.run(body)


def test_comm_hook_that_never_finishes() -> None:
    bucket = HookBucket(4, torch.zeros(3), [], [], True)
    pending = CommHook(None, lambda state, bucket: torch.futures.Future()).start(bucket, timeout_s=0.05)
    with pytest.raises(CommunicationTimeout, match=r"did not finish bucket 4 within 0\.05 s"):
        pending.wait()


def test_comm_hook_needs_overlap_and_a_future(two: Loopback) -> None:
    with pytest.raises(UsageError, match="overlapping_allreduce=True"):
        make(parameters(), two, overlap=False, comm_hook=CommHook(None, lambda s, b: None))

    def body(rank: int) -> None:
        w = nn.Parameter(torch.zeros(3))
        reducer = make([("w", w)], two, comm_hook=CommHook(None, lambda s, b: b.buffer()))
        w.grad = torch.ones(3)
        with pytest.raises(UsageError, match=r"returned Tensor, expected a torch\.futures\.Future"):
            reducer.ready(w)

    two.run(body)
