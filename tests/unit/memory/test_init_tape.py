"""Parameters built without storage get what their modules' own initialisation gives, in any order, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.memory import delayed_init
from shardwright.memory.delayed_init import delay_param_initialization


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    delayed_init.forget()
    yield
    delayed_init.forget()


class Everything(nn.Module):
    """Parameters that come to be in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 40)
        self.norm = nn.BatchNorm1d(4)
        self.embedding = nn.Embedding(50, 30, padding_idx=1)
        self.computed = nn.Parameter(torch.randn(200, 3) * 0.02 + 1)
        self.constant = nn.Parameter(torch.full((2, 3), 7.0))
        self.scalar = nn.Parameter(torch.ones(()))
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.plain = torch.zeros(3)
        self.orthogonal = nn.Parameter(torch.empty(8, 8))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(torch.empty(1000))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.02, b=0.02)
        self.rows = nn.Parameter(torch.zeros(6, 2))
        with torch.no_grad():
            self.rows[2].fill_(3)
            self.rows.data[4:] = torch.tensor([5.0, 6.0])
            self.rows.T[1].mul_(2)
            self.linear.bias.copy_(torch.arange(40.0))
        self.generated = nn.Parameter(torch.empty(5).uniform_(generator=torch.Generator().manual_seed(3)))
        self.beside = nn.Parameter(torch.zeros(3, device=self.linear.weight.device, dtype=self.linear.weight.dtype))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)  # copies one
        self.recurrent = nn.LSTM(2, 3)  # has weak references to its weights
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.cast = nn.Linear(2, 2).double()
        self.tied = self.linear.weight
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)] + torch.zeros(2).tolist()
        self.register_buffer("mask", torch.full((3, 3), -9.0).triu(1))
        self.set = nn.Linear(2, 2)
        self.set.bias.data = torch.tensor([3.0, 4.0])
        self.on_cpu = self.linear.weight.device.type == "cpu" and not self.linear.weight.is_meta


def built(seed: int) -> Everything:
    torch.manual_seed(seed)
    with delay_param_initialization():
        return Everything()


def filled(model: nn.Module, *, reverse: bool = False) -> dict[str, Tensor]:
    delayed_init.settle_others(model)
    for parameter in sorted(model.parameters(), key=lambda p: p.numel(), reverse=reverse):
        if delayed_init.is_delayed(parameter):
            delayed_init.fill(parameter, delayed_init.value_of(parameter))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_only_parameters_wait() -> None:
    model = built(0)
    assert {n for n, p in model.named_parameters() if not p.is_meta} == {"given", "set.bias"}
    assert not any(b.is_meta for b in model.buffers())
    assert model.rates == [0.0, 0.5, 1.0, 0.0, 0.0]
    assert model.on_cpu
    assert torch.equal(model.mask, torch.full((3, 3), -9.0).triu(1))
    delayed_init.settle_others(model)
    assert torch.equal(model.plain, torch.zeros(3))


def test_values_are_those_of_the_modules() -> None:
    model = built(0)
    before = dict(model.named_parameters())
    state = filled(model)
    assert all(before[n] is p and not p.is_meta and p.requires_grad for n, p in model.named_parameters())
    assert model.tied is model.linear.weight
    plain = Everything()
    want = plain.state_dict()
    assert [(n, t.shape, t.dtype, t.stride()) for n, t in state.items()] == [(n, t.shape, t.dtype, t.stride()) for n, t in want.items()]
    for name in ("constant", "scalar", "given", "rows", "linear.bias", "generated", "beside", "set.bias", "norm.weight", "mask"):
        assert torch.equal(state[name], want[name]), name
    assert torch.allclose(state["orthogonal"] @ state["orthogonal"].T, torch.eye(8), atol=1e-5)
    assert 0.009 < float(state["truncated"].std()) < 0.013
    assert float(state["truncated"].abs().max()) <= 0.02
    assert 0.015 < float(state["computed"].std()) < 0.025
    assert float(state["computed"].mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(state["embedding.weight"][1], torch.zeros(30))
    assert float(state["embedding.weight"].std()) == pytest.approx(1, abs=0.1)
    assert float(state["linear.weight"].abs().max()) == pytest.approx(30**-0.5, rel=0.05)
    assert torch.equal(state["layers.layers.0.linear1.weight"], state["layers.layers.1.linear1.weight"])  # as copies are
    out = model.normed(torch.ones(1, 2))
    out.sum().backward()
    y, _ = model.recurrent(torch.ones(1, 1, 2))
    y.sum().backward()
    assert model.recurrent.weight_ih_l0.grad is not None


def test_values_depend_on_the_seed_only() -> None:
    first = filled(built(0))
    delayed_init.forget()
    again = filled(built(0), reverse=True)
    delayed_init.forget()
    other = filled(built(1))
    assert [n for n in first if not torch.equal(first[n], again[n])] == []
    assert not torch.equal(first["linear.weight"], other["linear.weight"])
    assert not torch.equal(first["linear.weight"][:, :4], first["embedding.weight"][:40, :4])


def test_one_parameter_alone_has_the_same_value() -> None:
    want = filled(built(0))
    delayed_init.forget()
    model = built(0)
    assert torch.equal(delayed_init.value_of(model.layers.layers[1].linear1.weight), want["layers.layers.1.linear1.weight"])
    assert torch.equal(delayed_init.value_of(model.rows), want["rows"])


def test_equal_modules_differ_and_copies_are_of_their_time() -> None:
    with delay_param_initialization():
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        before = nn.Parameter(one.weight.detach().clone())
        nn.init.zeros_(one.weight)
        after = nn.Parameter(one.weight.detach() + before.detach() * 0)
    first, second = delayed_init.value_of(before), delayed_init.value_of(two.weight)
    assert not torch.equal(first, second)
    assert float(first.abs().max()) > 0
    assert torch.equal(delayed_init.value_of(after), torch.zeros(4, 4))
    assert torch.equal(delayed_init.value_of(before), first)


def test_streams_go_on_alike() -> None:
    torch.manual_seed(0)
    with delay_param_initialization():
        nn.Linear(3, 3)
    few = torch.rand(())
    torch.manual_seed(0)
    with delay_param_initialization():
        nn.Linear(300, 3)
        nn.Embedding(10, 3)
    assert torch.equal(torch.rand(()), few)


def test_switched_off_and_explicit_meta() -> None:
    with delay_param_initialization(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with delay_param_initialization():
        with torch.device("meta"):
            shell = nn.Linear(2, 2)
        assert not delayed_init.is_delayed(shell.weight)
        with delay_param_initialization():
            assert delayed_init.is_delayed(nn.Linear(2, 2).weight)
        assert delayed_init.is_delayed(nn.Linear(2, 2).weight)
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(UsageError, match=r"'1\.weight' is on the meta device"):
        delayed_init.settle_others(nn.Sequential(nn.Linear(2, 2), shell))


def test_errors_are_the_codes_own() -> None:
    with delay_param_initialization():
        weight = nn.Linear(2, 2).weight
        with pytest.raises(RuntimeError, match="leaf Variable"):
            weight.add_(1)
        with pytest.raises(RuntimeError, match="size"):
            weight.data.copy_(torch.ones(3, 5))


def test_what_nobody_noted_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), built(0))
    delayed_init.settle_others(model)
    with torch.no_grad():
        model[1].embedding.weight[0].fill_(1)
    with pytest.raises(UsageError, match=r"'1\.embedding\.weight' was changed outside"):
        delayed_init.settle_others(model)


def test_further_work_is_noted() -> None:
    with delay_param_initialization():
        layer = nn.Linear(2, 3)
        nn.init.constant_(layer.weight, 2.0)
    with delayed_init.go_on():
        layer.half()
    delayed_init.fill(layer.weight, delayed_init.value_of(layer.weight))
    assert torch.equal(layer.weight, torch.full((3, 2), 2.0, dtype=torch.float16))


def test_a_slice_holds_no_more_than_itself() -> None:
    with delay_param_initialization():
        whole = torch.empty(1000, 10).normal_()
        part = nn.Parameter(whole[:10])
    value: Any = delayed_init.value_of(part)
    assert value.untyped_storage().nbytes() == 10 * 10 * 4
