"""The global gradient norm on threads: equal to one process, whatever lies where."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from loopback import Loopback, install
from shardwright.data_parallel import grad_norm
from shardwright.data_parallel.grad_norm import (
    HeldGradient,
    NonFiniteGradientError,
    clip_grad_norm_,
    global_grad_norm,
    gradients_of,
)
from shardwright.errors import UsageError

SIZES = [5, 2049, 1024, 300_000, 0, 77]


def named(scale: float = 1.0) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)  # of its own: the ranks are threads
    result = []
    for i, size in enumerate(SIZES):
        p = nn.Parameter(torch.zeros(size))
        p.grad = torch.randn(size, generator=generator) * scale
        result.append((f"p{i}", p))
    return result


def part(rank: int, scale: float = 1.0) -> list[tuple[str, nn.Parameter]]:
    """Rank 0 holds three of the parameters, rank 1 three, rank 2 nothing."""
    return [n for i, n in enumerate(named(scale)) if i % 2 == rank]


def held(pairs: list[tuple[str, nn.Parameter]]) -> list[HeldGradient]:
    return gradients_of(p for _, p in pairs)


def truth(norm_type: float) -> float:
    flat = torch.cat([p.grad.double() for _, p in named() if p.grad is not None])
    return float(flat.norm(norm_type))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Loopback:
    return install(monkeypatch, 3, [grad_norm])


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0, 3.0])
def test_norm_equals_that_of_one_process(three: Loopback, norm_type: float) -> None:
    norms = three.run(lambda rank: global_grad_norm(held(part(rank)), norm_type=norm_type))
    assert all(torch.equal(n, norms[0]) for n in norms)
    assert norms[0].dtype == torch.float32
    assert norms[0].item() == pytest.approx(truth(norm_type), rel=1e-6)
    assert [len(log) for log in three.log.values()] == [1, 1, 1]


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_clipping_scales_all_by_one_factor(three: Loopback, max_norm: float) -> None:
    def body(rank: int) -> tuple[Tensor, list[Tensor | None]]:
        mine = part(rank)
        return clip_grad_norm_(held(mine), max_norm), [p.grad for _, p in mine]

    results = three.run(body)
    reference = named()
    norm = torch.nn.utils.clip_grad_norm_([p for _, p in reference], max_norm)
    for rank, (mine, grads) in enumerate(results):
        torch.testing.assert_close(mine, norm, rtol=2e-5, atol=0)  # torch's own fp32 sum is the loose one
        wanted = [p.grad for i, (_, p) in enumerate(reference) if i % 2 == rank]
        for got, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=0)


def test_counted_elsewhere_and_listed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    world = install(monkeypatch, 2, [grad_norm])

    def body(rank: int) -> tuple[float, float]:
        w = nn.Parameter(torch.zeros(4))
        w.grad = torch.full((4,), 3.0)
        pairs = [("tied", w), ("again", w)]
        norm = clip_grad_norm_(held(pairs), 3.0, counted_here=lambda h: h.gradient if rank == 0 else None)
        return norm.item(), float(w.grad[0])

    assert world.run(body) == [(6.0, pytest.approx(1.5))] * 2


def test_dtypes_layouts_and_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    world = install(monkeypatch, 1, [grad_norm])
    image = nn.Parameter(torch.zeros(2, 3, 40, 40).to(memory_format=torch.channels_last))
    image.grad = torch.ones_like(image)
    half = nn.Parameter(torch.zeros(3000, dtype=torch.float16))
    half.grad = torch.full_like(half, 100.0)  # its square overflows fp16
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    pairs = [("i", image), ("h", half), ("d", double), ("t", table.weight)]
    wanted = math.sqrt(9600 + 3000 * 1e4 + 2 + 2 * 4)
    (norm,) = world.run(lambda rank: clip_grad_norm_(held(pairs), wanted / 2))
    assert norm.item() == pytest.approx(wanted, rel=1e-6)
    assert image.grad.flatten()[0].item() == pytest.approx(0.5)
    assert table.weight.grad.to_dense()[1].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_on_one_rank_is_known_to_all(three: Loopback, norm_type: float, bad: float) -> None:
    def body(rank: int) -> float:
        mine = part(rank)
        if rank == 1:
            assert mine[0][1].grad is not None
            mine[0][1].grad[3] = bad
        with pytest.raises(NonFiniteGradientError, match="gradient norm of order"):
            clip_grad_norm_(held(mine), 1.0, norm_type=norm_type, error_if_nonfinite=True)
        return clip_grad_norm_(held(mine), 1.0, norm_type=norm_type).item()

    for norm in three.run(body):
        assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def test_no_gradient_anywhere(three: Loopback) -> None:
    assert [n.item() for n in three.run(lambda rank: clip_grad_norm_([], 1.0))] == [0.0] * 3


def test_norm_type_is_checked() -> None:
    with pytest.raises(UsageError, match="norm_type is -1, expected a positive number or inf"):
        global_grad_norm([], norm_type=-1)
