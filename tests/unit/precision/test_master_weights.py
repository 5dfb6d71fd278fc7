"""fp32 masters of half precision tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.precision.master_weights import MasterWeights


def test_what_gets_a_master() -> None:
    half, brain = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(2).bfloat16())
    full, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5).half(), requires_grad=False)
    weights = MasterWeights([[half, full, frozen], [], [brain]])
    held = [weights.held(group, i) for i, group in enumerate([[half, full, frozen], [], [brain]])]
    assert [[t.dtype for t in group] for group in held] == [
        [torch.float32, torch.float32, torch.float16],
        [],
        [torch.float32],
    ]
    assert held[0][1] is full
    assert held[0][2] is frozen
    assert [len(g) for g in weights.halves] == [len(g) for g in weights.masters] == [1, 0, 1]
    assert weights.others[0][0] is full
    assert weights.half_of(held[0][0]) is half
    assert weights.half_of(full) is full
    assert weights.held(held[0], 0) == held[0]  # masters stand for themselves
    frozen.requires_grad_(True)
    again = weights.held(held[0], 0)
    assert again[0] is held[0][0]
    assert weights.half_of(again[2]) is frozen
    assert again[2].dtype is torch.float32


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_gradients_come_unscaled(scale: float) -> None:
    half, full, none = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1).half())
    weights = MasterWeights([[half, full, none]])
    half.grad, full.grad = torch.tensor([1.0, 0.5, -3.0]).half(), torch.tensor([2.0, 4.0])
    for _ in range(2):
        full.grad = torch.tensor([2.0, 4.0])
        assert weights.take_gradients(scale, check=True) is False
        expected = torch.tensor([1.0, 0.5, -3.0]) * torch.tensor(1 / scale)
        assert torch.equal(weights.masters[0][0].grad, expected)
        assert torch.equal(full.grad, torch.tensor([2.0, 4.0]) * torch.tensor(1 / scale))
        assert weights.masters[0][1].grad is None
    weights.clear_gradients()
    assert weights.masters[0][0].grad is None


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["half", "full", "sparse"])
def test_overflow_is_seen(bad: float, where: str) -> None:
    half, full, rows = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4, 2))
    weights = MasterWeights([[half], [full, rows]])
    half.grad, full.grad, rows.grad = torch.ones(3).half(), torch.ones(2), torch.ones(4, 2).to_sparse(1)
    assert weights.take_gradients(2.0, check=True) is False
    target = {"half": half.grad, "full": full.grad, "sparse": rows.grad._values()}[where]
    target.view(-1)[1] = bad
    assert weights.take_gradients(2.0, check=True) is True
    assert weights.take_gradients(1.0, check=True) is True
    assert weights.take_gradients(1.0, check=False) is False


def test_sparse_gradients_are_unscaled() -> None:
    half = nn.Parameter(torch.ones(4, 2).half())
    weights = MasterWeights([[half]])
    half.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2).half(), (4, 2), check_invariants=True)
    for _ in range(2):
        assert not weights.take_gradients(4.0, check=True)
        expected = torch.zeros(4, 2)
        expected[1] = 0.5
        assert torch.equal(weights.masters[0][0].grad.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_masters_rounded(dtype: torch.dtype) -> None:
    half = nn.Parameter(torch.linspace(0, 1, 7).to(dtype))
    weights = MasterWeights([[half]])
    master = weights.masters[0][0]
    with torch.no_grad():
        master.add_(1e-5)
    weights.write_back()
    assert torch.equal(half, master.to(dtype))
    kept = master.detach().clone()
    weights.follow()  # nothing has changed
    assert torch.equal(master, kept)
    with torch.no_grad():
        half[2] = 5.0
        half[3] = float("nan")
    weights.follow()
    assert master[2] == 5.0
    assert master[3].isnan()
    assert torch.equal(master[4:], kept[4:])
    weights.reload()
    assert torch.equal(master[4:], half[4:].float())


def test_memory_is_shared_with_views() -> None:
    """A target may be a view of what the model computes with."""
    whole = nn.Parameter(torch.zeros(6).half())
    piece = nn.Parameter(whole.detach()[2:5])
    weights = MasterWeights([[piece]])
    with torch.no_grad():
        weights.masters[0][0].fill_(0.1)
    weights.write_back()
    assert torch.equal(whole, torch.tensor([0, 0, 0.1, 0.1, 0.1, 0]).half())
