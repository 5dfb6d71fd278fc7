"""Replicas on real processes: gradients, parameters and norms against one process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import RankFailure, RankPool
from shardwright.data_parallel import sync
from shardwright.data_parallel.grad_norm import clip_grad_norm_, gradients_of
from shardwright.data_parallel.join import Join
from shardwright.data_parallel.reducer import GradientReducer
from shardwright.errors import ShapeError
from shardwright.topology import context

DDP = {"ddp": True, "timeout_s": 20}
NUM_STEPS = 4
PER_RANK = 3


class Net(nn.Module):
    """Odd sizes, a layer never used, one used on even steps, one used by one replica's samples only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.never = nn.Linear(3, 3)
        self.even = nn.Linear(7, 7)
        self.one_replica = nn.Linear(7, 7)
        self.last = nn.Linear(7, 1)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, step: int, replica: int | None) -> Tensor:
        h = torch.tanh(self.frozen(self.first(x)))
        if step % 2 == 0:
            h = h + self.even(h)
        if replica is None:  # one process: replica 1's rows take the branch
            rows = h[PER_RANK : 2 * PER_RANK]
            h = torch.cat([h[:PER_RANK], rows + self.one_replica(rows), h[2 * PER_RANK :]])
        elif replica == 1:
            h = h + self.one_replica(h)
        return self.last(h).square().mean()


def batch(step: int, num_replicas: int) -> Tensor:
    return torch.rand(PER_RANK * num_replicas, 5, generator=torch.Generator().manual_seed(step))


def train_one_process(num_replicas: int, set_to_none: bool) -> list[dict[str, Tensor | None]]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    history = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(step, num_replicas), step, None).backward()
        history.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return history


def train_replica(options: dict[str, Any], set_to_none: bool) -> list[dict[str, Tensor | None]]:
    here = context.world()
    replica, num_replicas = here.coordinates.dp, len(here.groups.ranks("dp"))
    model = Net()
    if replica:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    sync.broadcast_parameters(model.named_parameters(), "dp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    reducer = GradientReducer(
        model.named_parameters(), axis="dp", average_over=num_replicas, bucket_cap_mb=150 / 2**20, **options
    )
    delays = random.Random(replica)

    def ready(p: nn.Parameter) -> None:
        time.sleep(delays.random() * 0.004)
        reducer.ready(p)

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(ready)
    history = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        rows = batch(step, num_replicas)[PER_RANK * replica : PER_RANK * (replica + 1)]
        model(rows, step, replica).backward()
        reducer.finish()
        history.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        sync.check_equal(model.named_parameters(), "dp")
        sync.check_equal([(n, g) for n, g in history[-1].items() if g is not None], "dp", what="gradient")
    return history


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_two_replicas_train_like_one_process(
    pool2: RankPool, as_view: bool, overlap: bool, set_to_none: bool
) -> None:
    options = {"overlap": overlap, "gradient_as_bucket_view": as_view}
    compare(pool2.run(train_replica, options, set_to_none, config=DDP), 2, set_to_none)


@pytest.mark.parametrize("as_view", [False, True])
def test_four_replicas_train_like_one_process(pool4: RankPool, as_view: bool) -> None:
    options = {"overlap": True, "gradient_as_bucket_view": as_view}
    compare(pool4.run(train_replica, options, True, config=DDP), 4, True)


def compare(histories: list[list[dict[str, Tensor | None]]], num_replicas: int, set_to_none: bool) -> None:
    reference = train_one_process(num_replicas, set_to_none)
    for history in histories:
        for step, (got, want) in enumerate(zip(history, reference, strict=True)):
            assert got["never.weight"] is None
            assert got["frozen.weight"] is None
            if set_to_none:
                assert (got["even.weight"] is None) == (step % 2 == 1)
            for name, gradient in want.items():
                assert (got[name] is None) == (gradient is None)
                # Sums run in another order over rows; the tolerance is that of four AdamW steps in fp32.
                torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def accumulate_twice(as_view: bool) -> Tensor | None:
    here = context.world()
    w = nn.Parameter(torch.zeros(5))
    reducer = GradientReducer([("w", w)], axis="dp", average_over=here.size, gradient_as_bucket_view=as_view)
    for step in range(2):
        (w * float(1 + here.rank + 10 * step)).sum().backward()
        reducer.ready(w)
        reducer.finish()
    for step in range(2):  # two passes per reduction: the first is only accumulated
        (w * float(here.rank + step)).sum().backward()
    reducer.finish()
    return w.grad


@pytest.mark.parametrize("as_view", [False, True])
def test_accumulated_gradients_are_sums_of_means(pool2: RankPool, as_view: bool) -> None:
    for grad in pool2.run(accumulate_twice, as_view, config=DDP):
        assert grad.tolist() == [1.5 + 11.5 + 0.5 + 1.5] * 5


def late_gradients(as_view: bool) -> list[Any]:
    here = context.world()
    named = [(f"w{i}", nn.Parameter(torch.zeros(3 + i))) for i in range(3)]
    reducer = GradientReducer(
        named, axis="dp", average_over=here.size, bucket_cap_mb=16 / 2**20, gradient_as_bucket_view=as_view
    )
    results = []
    for step in range(8):
        for _, p in named:
            p.grad = None
            (p * 2.0).sum().backward()
            reducer.ready(p)
        if here.rank == step % here.size:
            time.sleep(0.005 * (step % 3))
            (named[step % 3][1] * 6.0).sum().backward()
            reducer.late(named[step % 3][1])
        reducer.finish()
        results.append([p.grad.tolist() for _, p in named if p.grad is not None])
    return results


@pytest.mark.parametrize("as_view", [False, True])
def test_late_gradients_on_one_rank(pool4: RankPool, as_view: bool) -> None:
    wanted = [[[3.5 if i == step % 3 else 2.0] * (3 + i) for i in range(3)] for step in range(8)]
    assert pool4.run(late_gradients, as_view, config=DDP) == [wanted] * 4


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def every_dtype() -> list[Tensor | None]:
    here = context.world()
    named = [(str(d), nn.Parameter(torch.zeros(3, dtype=d))) for d in DTYPES]
    named += [("empty", nn.Parameter(torch.zeros(0))), ("number", nn.Parameter(torch.zeros(())))]
    reducer = GradientReducer(named, axis="dp", average_over=here.size)
    for _, p in named:
        p.grad = torch.full_like(p, here.rank + 1)
    reducer.finish()
    return [p.grad for _, p in named]


def test_every_dtype_and_empty_parameters(pool2: RankPool) -> None:
    for grads in pool2.run(every_dtype, config=DDP):
        assert [g.dtype for g in grads[:5]] == DTYPES
        assert all((g == 1.5).all() for g in grads)


def with_torch_hook() -> Tensor | None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    here = context.world()
    w = nn.Parameter(torch.zeros(5))
    reducer = GradientReducer([("w", w)], axis="dp", average_over=here.size)
    reducer.register_comm_hook(here.groups.process_group("dp"), default_hooks.bf16_compress_hook)
    for _ in range(2):
        w.grad = torch.full((5,), here.rank + 1.0)
        reducer.ready(w)
        reducer.finish()
    return w.grad


def test_hooks_of_torch_work_unchanged(pool2: RankPool) -> None:
    assert [g.tolist() for g in pool2.run(with_torch_hook, config=DDP)] == [[1.5] * 5] * 2


def tensors_of(rank: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    yield "big", torch.rand(3000, generator=generator)
    yield "image", torch.rand(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    yield "gaps", torch.rand(4, 6, generator=generator)[:, ::2]
    yield "mask", torch.rand(9, generator=generator) > 0.5
    yield "half", torch.rand(7, generator=generator).half()
    yield "count", torch.tensor(rank)
    yield "complex", torch.rand(3, generator=generator).to(torch.complex64)
    yield "empty", torch.zeros(0)


def broadcast_from(source: int) -> list[Tensor]:
    named = list(tensors_of(context.world().rank))
    twice = [*named, ("again", named[0][1])]
    sync.broadcast_parameters(twice, "dp", source=source, chunk_bytes=256)
    sync.check_equal(named, "dp")
    return [t for _, t in named]


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_of_every_kind_of_tensor(pool2: RankPool, source: int) -> None:
    for tensors in pool2.run(broadcast_from, source, config=DDP):
        for got, (name, want) in zip(tensors, tensors_of(source), strict=True):
            assert torch.equal(got, want), name


def compare_unequal() -> str:
    here = context.world()
    named = [
        ("a", torch.zeros(3)),
        ("layer.b", torch.full((2,), float(here.rank // 2))),
        ("c", torch.zeros(1) - here.rank),
    ]
    with pytest.raises(sync.ReplicaMismatchError) as info:
        sync.check_equal(named, "dp")
    return str(info.value)


def test_difference_names_the_first_tensor_and_the_ranks(pool4: RankPool) -> None:
    for message in pool4.run(compare_unequal, config=DDP):
        assert "parameter 'layer.b' differs between replicas: ranks [0, 1] / ranks [2, 3]" in message
        assert "2 of 3 parameters differ" in message


def broadcast_other_models() -> str:
    here = context.world()
    named = [("a", torch.zeros(3)), ("b", torch.zeros(2 + here.rank))]
    if here.rank:
        named.append(("c", torch.zeros(1)))
    with pytest.raises(ShapeError) as info:
        sync.broadcast_parameters(named, "dp")
    return str(info.value)


def test_different_models_are_refused_before_anything_is_sent(pool2: RankPool) -> None:
    for message in pool2.run(broadcast_other_models, config=DDP):
        assert "tensor 1 in order is 'b' [2] strides [1] torch.float32 on rank 0, 'b' [3]" in message


def norms(max_norm: float, norm_type: float) -> tuple[float, dict[str, Tensor | None]]:
    """Stage 0 holds the even layers of a model, stage 1 the odd ones; the frozen layer has no gradient."""
    here = context.world()
    model = with_gradients()
    mine = [(n, p) for n, p in model.named_parameters() if int(n.split(".")[0]) % 2 == here.coordinates.pp]
    if max_norm == 2.0:  # one stage without any gradient
        mine = [] if here.coordinates.pp else list(model.named_parameters())
    norm = clip_grad_norm_(gradients_of(p for _, p in mine), max_norm, norm_type=norm_type, axis="pp")
    return norm.item(), {n: p.grad for n, p in mine}


def with_gradients() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 33), nn.Linear(33, 70), nn.Linear(70, 40), nn.Linear(40, 3))
    (model(torch.rand(4, 9)).square().sum() * 30).backward()
    return model


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1.0, 2.0, 1e6])
def test_clipping_over_stages_equals_one_process(pool2: RankPool, max_norm: float, norm_type: float) -> None:
    reference = with_gradients()
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type).item()
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    results = pool2.run(norms, max_norm, norm_type, config={"pipeline_parallel_degree": 2, "timeout_s": 20})
    assert results[0][0] == results[1][0] == pytest.approx(wanted, rel=1e-6)
    for _, clipped in results:
        for name, gradient in clipped.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=2e-6, atol=0)


def train_uneven(steps_of: list[int], full: bool) -> list[Tensor]:
    here = context.world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), axis="dp", average_over=here.size)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reducer.ready)

    def final_sync(source: int) -> None:
        sync.broadcast_parameters([*model.named_parameters(), *model.named_buffers()], "dp", source=source)
        sync.broadcast_optimizer_state(optimizer, "dp", source=source)

    join = Join(
        reducers=[reducer],
        final_sync=final_sync,
        shadow_buffers=lambda source: sync.sync_buffers(model.named_buffers(), "dp", source=source),
        divide_by_initial_world_size=full,
    )
    with join:
        for step in range(steps_of[here.rank]):
            time.sleep(0.003 * here.rank)
            join.on_step_start()
            sync.sync_buffers(model.named_buffers(), "dp", source=join.source)
            optimizer.zero_grad()
            model(batch(step, here.size)[PER_RANK * here.rank :][:PER_RANK, :3]).square().mean().backward()
            join.reduce(True)
            optimizer.step()
    state = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    everything = [*model.parameters(), *state]
    if len(set(steps_of)) > 1:  # buffers are made equal at the next step's start, or by the final sync
        everything += model.buffers()
    sync.check_equal([(str(i), t) for i, t in enumerate(everything)], "dp", what="state")
    assert reducer.overlap
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("steps_of", [[3, 1, 2, 5], [0, 2, 1, 1], [2, 2, 2, 2]])
def test_uneven_inputs_end_with_equal_replicas(pool4: RankPool, steps_of: list[int], full: bool) -> None:
    results = pool4.run(train_uneven, steps_of, full, config=DDP)
    for parameters in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))
    assert not torch.equal(results[0][0], nn_first_weight())


def nn_first_weight() -> Tensor:
    torch.manual_seed(0)
    return nn.Linear(3, 5).weight.detach()


def one_rank_does_not_reduce() -> None:
    here = context.world()
    w = nn.Parameter(torch.zeros(3))
    reducer = GradientReducer([("w", w)], axis="dp", average_over=here.size)
    w.grad = torch.ones(3)
    reducer.finish()
    if here.rank == 0:
        reducer.finish()
    else:
        time.sleep(6)


def test_a_missing_rank_is_named_in_time(pool2: RankPool) -> None:
    with pytest.raises(RankFailure) as info:
        pool2.run(one_rank_does_not_reduce, config={"ddp": True, "timeout_s": 2})
    text = info.value.tracebacks[0]
    assert "CommunicationTimeout" in text
    assert "rank 1" in text
