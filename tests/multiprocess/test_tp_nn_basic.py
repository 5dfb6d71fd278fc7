"""Linear layers, embeddings and norms on tp ranks, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_reference as ref
from harness import RankPool
from shardwright.errors import ShapeError
from shardwright.tensor_parallel.batch import EnterScaledBatch, LeaveScaledBatch
from shardwright.tensor_parallel.module import DistributedModule, gather_full, keeps_hidden_sliced
from shardwright.tensor_parallel.nn.embedding import DistributedEmbedding
from shardwright.tensor_parallel.nn.linear import DistributedLinear
from shardwright.tensor_parallel.nn.norm import make_norm
from shardwright.transport import differentiable as comm


class Nested(DistributedModule):
    """Nested modules between the exchange of the batch."""

    def __init__(self, *inner: nn.Module, enters: bool = True) -> None:
        super().__init__()
        self.enter = EnterScaledBatch() if enters else None
        self.inner = nn.Sequential(*inner)
        self.leave = LeaveScaledBatch()

    def forward(self, x: Tensor) -> Tensor:
        if self.enter is not None:
            (x,) = self.enter(x)
        return self.leave(self.inner(x))


def _build(name: str) -> nn.Module:
    sliced = keeps_hidden_sliced()
    builders: dict[str, Any] = {
        "linear": lambda: DistributedLinear(12, 7),
        "linear without bias": lambda: DistributedLinear(12, 7, bias=False),
        "nested linear": lambda: Nested(DistributedLinear(12, 8, nested=True)),
        "layer norm": lambda: Nested(make_norm("layernorm", 12, 1e-3, sliced=sliced)),
        "rms norm": lambda: Nested(make_norm("rmsnorm", 12, 1e-3, sliced=sliced)),
        "embedding": lambda: DistributedEmbedding(11, 12),
        "padded embedding": lambda: DistributedEmbedding(11, 12, padding_idx=-1),
        "vocabulary": lambda: DistributedEmbedding(11, 5, split="vocabulary"),
        "padded vocabulary": lambda: DistributedEmbedding(11, 5, padding_idx=7, split="vocabulary"),
        "nested embedding": lambda: Nested(DistributedEmbedding(11, 12, nested=True), enters=False),
        "nested vocabulary": lambda: Nested(
            DistributedEmbedding(11, 12, split="vocabulary", nested=True), enters=False
        ),
        "nested whole": lambda: Nested(DistributedEmbedding(11, 12, split=None, nested=True), enters=False),
    }
    return builders[name]()


LINEAR = ["linear", "linear without bias", "nested linear", "layer norm", "rms norm"]
TABLES = [
    "embedding", "padded embedding", "vocabulary", "padded vocabulary", "nested embedding", "nested vocabulary", "nested whole",
]  # fmt: skip


def _inputs(name: str, samples: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(100 + samples)
    if name in LINEAR:
        return [3 + torch.randn(3, 5, 12, generator=generator)]
    ids = torch.randint(0, 11, (3, 5), generator=generator)
    ids[0, 0] = 10
    return [ids]


def _loss(output: Tensor) -> Tensor:
    weights = torch.arange(1.0, output.numel() + 1).view(output.shape).cos()
    return (output * weights).sum()


def _call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def run_case(name: str) -> ref.Result:
    return ref.on_ranks(lambda: _build(name), _call, lambda s: _inputs(name, s), _loss)


@pytest.mark.parametrize(("optimize", "prescaled"), ref.MODES)
@pytest.mark.parametrize("tp", [2, 4])
def test_like_one_process(request: pytest.FixtureRequest, tp: int, optimize: str, prescaled: bool) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{tp}")
    got = pool.run(run_cases, [*LINEAR, *TABLES], config=ref.config(tp, optimize, prescaled))
    for name in [*LINEAR, *TABLES]:
        want = ref.alone(
            lambda n=name: _build(n), _call, lambda s, n=name: _inputs(n, s), _loss, 1 if prescaled else tp
        )
        ref.compare([results[name] for results in got], want)


def run_cases(names: list[str]) -> dict[str, ref.Result]:
    return {name: run_case(name) for name in names}


def run_linear_like_torch() -> Tensor:
    torch.manual_seed(3)
    weights = gather_full(DistributedLinear(12, 7))
    return weights["weight"]


def test_initial_weights_do_not_depend_on_the_degree(pool2: RankPool) -> None:
    first, second = pool2.run(run_linear_like_torch, config=ref.config(2))
    assert torch.equal(first, second)
    assert torch.equal(first, run_linear_like_torch())
    assert first.abs().max() <= 12**-0.5
    assert first.unique().numel() == first.numel()


def run_uneven_pieces() -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    rank = comm.position()
    lengths = (3, 2)
    start = 3 * rank
    full = torch.arange(2 * 2 * 5.0).view(4, 5)
    mine = full[:, start : start + lengths[rank]].clone().requires_grad_()
    own = comm.pieces_to_batch(mine, lengths)
    (own * (1 + rank)).sum().backward()
    other = full[:, start : start + lengths[rank]].clone().requires_grad_()
    whole = comm.gather_pieces(other, lengths)
    (whole * full.sin()).sum().backward()
    return own.detach(), mine.grad, whole.detach(), other.grad


def test_uneven_slices_of_a_dim_are_exchanged(pool2: RankPool) -> None:
    full = torch.arange(20.0).view(4, 5)
    for rank, (own, grad, whole, other) in enumerate(pool2.run(run_uneven_pieces, config=ref.config(2))):
        assert torch.equal(own, full[2 * rank : 2 * rank + 2])
        width = 3 - rank
        assert torch.equal(grad, torch.tensor([[1.0], [1.0], [2.0], [2.0]]).expand(4, width))
        assert torch.equal(whole, full)
        assert torch.equal(other, full.sin()[:, 3 * rank : 3 * rank + width])


def run_shared_slice() -> Tensor | None:
    rank = comm.position()
    weight = torch.ones(2, 3, requires_grad=True)  # rows 0-1 and 1-2 of three
    (comm.shared_slice(weight, 0, 3, rank) * (10**rank)).sum().backward()
    return weight.grad


def test_gradients_of_overlapping_slices_are_summed(pool2: RankPool) -> None:
    first, second = pool2.run(run_shared_slice, config=ref.config(2))
    assert torch.equal(first[:, 0], torch.tensor([1.0, 11.0]))
    assert torch.equal(second[:, 0], torch.tensor([11.0, 10.0]))


def run_silent() -> list[tuple[int, ...]]:
    """Only rank 0 runs: anything sent would hang."""
    if comm.position():
        return []
    with comm.shapes_only():
        x = torch.randn(2, 3, 4, requires_grad=True)
        results = [
            comm.copy_to_ranks(x), comm.sum_over_ranks(x), comm.gather_batch(x), comm.own_batch(x),
            comm.scatter_batch(x), comm.own_hidden(x), comm.gather_hidden(x), comm.gather_hidden_for_partial(x),
            comm.scatter_hidden(x), comm.batch_to_hidden(x), comm.hidden_to_batch(x),
            comm.pieces_to_batch(x, (4, 3)), comm.gather_pieces(x, (4, 3)),
        ]  # fmt: skip
    assert all(result.requires_grad for result in results)
    return [tuple(result.shape) for result in results]


def test_one_rank_alone_gets_the_right_shapes(pool2: RankPool) -> None:
    shapes, _ = pool2.run(run_silent, config=ref.config(2))
    assert shapes == [
        (2, 3, 4), (2, 3, 4), (4, 3, 4), (1, 3, 4), (1, 3, 4), (2, 3, 2), (2, 3, 8), (2, 3, 8), (2, 3, 2), (4, 3, 2), (1, 3, 8),
        (1, 3, 7), (2, 3, 7),
    ]  # fmt: skip


def run_different_batches() -> list[str]:
    """The last batch is shorter on tp rank 1, or longer in the sequence; then both bring the same again."""
    messages = []
    layer, embedding = DistributedLinear(12, 7), DistributedEmbedding(11, 12)
    for shape in ((4 - comm.position(), 5), (4, 5 + comm.position())):
        for module, batch in ((layer, torch.randn(*shape, 12)), (embedding, torch.zeros(shape, dtype=torch.long))):
            with pytest.raises(ShapeError) as caught:
                module(batch)
            messages.append(str(caught.value))
    assert layer(torch.randn(4, 5, 12)).shape == (4, 5, 7)
    return messages


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_batches_of_different_shapes_are_refused_on_all_ranks(optimize: str, pool2: RankPool) -> None:
    first, second = pool2.run(run_different_batches, config={**ref.config(2), "optimize": optimize})
    assert first == second
    assert "[4, 5, 12] on tp rank 0, [3, 5, 12] on tp rank 1" in first[0]
    assert "[4, 5] on tp rank 0, [4, 6] on tp rank 1" in first[3]
    assert all("drop_last" in message for message in first)
