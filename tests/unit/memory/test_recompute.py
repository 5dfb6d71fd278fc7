"""Recomputed calls compute what plain ones do, keep less, and leave no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UsageError
from shardwright.memory.activation_checkpointing import Border, Chain, GroupedForward, Recompute
from shardwright.memory.activation_offload import Offloader

Calls = Callable[[nn.Module], Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.dropout(functional.gelu(self.up(x)), 0.5))


class EveryStream(nn.Module):
    """Draws from Python's, NumPy's and torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.sigmoid(torch.sigmoid(x * self.weight * scale) * torch.randn(5))


class Norm(nn.Module):
    """Running statistics and a counter, in place and assigned anew, that the forward also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5, momentum=None)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().mean())
        self.anew = self.anew + 1
        return torch.tanh(self.norm(x) * (self.total + self.anew))


class Keeper(nn.Module):
    """Attributes of several kinds, read and changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.calls, self.seen, self.by_call, self.sum = 0, [], {}, torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.by_call[self.calls] = len(self.seen)
        self.sum.add_(self.calls)
        self.last = x.detach()
        return torch.tanh(self.linear(x) * (self.calls + len(self.seen) + self.by_call[self.calls]) + self.sum)


class InPlace(nn.Module):
    """Changes its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x.mul_(2))).mul(3)


@dataclass
class Pair:
    left: Tensor
    right: Tensor | None


class Nested(nn.Module):
    """Nested arguments, keywords and results, None among them; writes into an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, pair: Pair, extras: dict[str, Any], *, scale: Tensor, bias: Tensor | None = None) -> dict[str, Any]:
        assert bias is None
        extras["cache"].append(pair.left)
        y = torch.tanh(self.linear(torch.stack(extras["cache"]).sum(0)) * scale + extras["pair"][0])
        return {"out": Pair(y, None), "aux": [y.sum(), None]}


def call_nested(module: nn.Module, x: Tensor) -> Tensor:
    cache: list[Tensor] = []
    total = x.sum() * 0
    for _ in range(2):
        made = module(Pair(x * 1, None), {"cache": cache, "pair": (x * 2, None)}, scale=x * 3, bias=None)
        total = total + made["out"].left.square().sum() + made["aux"][0]
    assert len(cache) == 2
    return total


def call_plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(module(x * 1.5)).square().sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "dropout": (Mlp, call_plainly),
    "every stream": (EveryStream, call_plainly),
    "norm": (Norm, call_plainly),
    "attributes": (Keeper, call_plainly),
    "in place": (InPlace, call_plainly),
    "nested": (Nested, call_nested),
}


def trained(module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Any]:
    """Everything that two steps leave: losses, gradients, buffers, attributes and where the generators are."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    x = torch.randn(4, 5, requires_grad=True)
    found: dict[str, Any] = {}
    for step in range(2):
        loss = call(module, x)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    found.update((f"grad {n}", p.grad) for n, p in module.named_parameters())
    found.update((f"buffer {n}", b) for n, b in module.named_buffers())
    found.update((f"attribute {n}", getattr(module, n)) for n in ("calls", "seen", "by_call", "sum", "last") if hasattr(module, n))
    found["x"] = x.grad
    found["streams"] = (random.random(), np.random.rand(), torch.rand(()))
    return found


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return all(map(equal, left, right))
    return bool(left == right)


def bordered(module: nn.Module, **kwargs: Any) -> nn.Module:
    Border(module, Recompute("it", [module], **kwargs)).install()
    return module


@pytest.mark.parametrize("case", CASES)
def test_recomputed_calls_change_nothing(case: str) -> None:
    make, call = CASES[case]
    torch.manual_seed(0)
    plain = make()
    want, got = trained(copy.deepcopy(plain), call), trained(bordered(copy.deepcopy(plain)), call)
    assert [name for name in want if not equal(got[name], want[name])] == []


def test_only_inputs_are_kept() -> None:
    def saved_bytes(module: nn.Module) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(torch.randn(4, 5, requires_grad=True))
        return sum(kept.values()) - sum(p.nbytes for p in module.parameters() if p.data_ptr() in kept)

    assert saved_bytes(Mlp()) > 4 * 20 * 4 * 2
    assert saved_bytes(bordered(Mlp())) == 0  # its input waits with the recomputation


def test_streams_may_be_left_alone() -> None:
    torch.manual_seed(0)
    module = Mlp()
    want = trained(copy.deepcopy(module), call_plainly)
    got = trained(bordered(copy.deepcopy(module), preserve_rng_state=False), call_plainly)
    assert torch.equal(got["loss 0"], want["loss 0"])
    assert not torch.equal(got["grad up.weight"], want["grad up.weight"])  # other masks in the second run


def test_outermost_wins() -> None:
    runs = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return self.linear(x).tanh()

    inner = bordered(Counting())
    outer = bordered(nn.Sequential(inner, nn.Linear(5, 5)))
    outer(torch.randn(2, 5)).sum().backward()
    assert len(runs) == 2


def test_own_hooks_run_once_and_those_inside_again() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    seen: list[str] = []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.register_forward_hook(lambda m, args, out: out * 2)
    module[1].register_forward_hook(lambda m, args, out: seen.append("inside"))
    x = torch.randn(2, 5)
    want = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    seen.clear()
    got = torch.autograd.grad(bordered(module)(x).sum(), list(module.parameters()))
    assert all(map(torch.equal, got, want))
    assert seen == ["before", "inside", "inside"]
    assert "forward" not in vars(module)


def test_autocast_is_as_it_was() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    x = torch.randn(2, 5)

    def gradients(module: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = module(module(x))
        assert y.dtype == torch.bfloat16
        return list(torch.autograd.grad(y.float().sum(), list(module.parameters())))

    assert all(map(torch.equal, gradients(bordered(copy.deepcopy(module))), gradients(module)))


def test_arguments_changed_after_the_call_are_an_error() -> None:
    module = bordered(Mlp())
    x = torch.randn(4, 5)
    y = module(x)
    x.add_(1)
    with pytest.raises(UsageError, match="changed in place after the call"):
        y.sum().backward()


def test_within_the_models_own_checkpointing() -> None:
    torch.manual_seed(0)
    module = Mlp()
    torch.manual_seed(1)
    want = torch.autograd.grad(module(torch.ones(2, 5)).sum(), list(module.parameters()))
    torch.manual_seed(1)
    y = torch.utils.checkpoint.checkpoint(bordered(module), torch.ones(2, 5), use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), list(module.parameters())), want))


def test_copies_of_grouped_layers_are_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    recompute = Recompute("both", list(model))
    model.__dict__["forward"] = GroupedForward([recompute(Chain(list(model)))])
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad is None
    assert copied[0].weight.grad is not None


def test_names_stay() -> None:
    module = nn.Sequential(Mlp(), Mlp())
    names = [n for n, _ in module.named_parameters()]
    bordered(module[0])
    assert [n for n, _ in module.named_parameters()] == names == list(module.state_dict())


# ------------------------------------------------------------------ offloading


class Log:
    """Transfers to nowhere that note what is asked."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._count = 0

    def wants(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def out(self, tensor: Tensor) -> tuple[int, Tensor]:
        self._count += 1
        self.events.append(f"out {self._count - 1}")
        return self._count - 1, tensor.clone()

    def back(self, copy: tuple[int, Tensor]) -> tuple[int, Tensor]:
        self.events.append(f"back {copy[0]}")
        return copy

    def arrived(self, coming: tuple[int, Tensor]) -> Tensor:
        self.events.append(f"use {coming[0]}")
        return coming[1]


def layers(hold: Any, count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Mlp() for _ in range(count)])
    for layer in model:
        Border(layer, Recompute("layer", [layer], hold=hold)).install()
    return model


@pytest.mark.parametrize("horizon", [1, 2, 9])
def test_offloaded_inputs_come_back_in_time(horizon: int) -> None:
    log = Log()
    offloader = Offloader(log, horizon)
    model, plain = layers(offloader.hold), layers(None, 5)
    for layer in plain:
        layer._compiled_call_impl = None
    losses = []
    for microbatch in range(2):
        offloader.begin(microbatch)
        torch.manual_seed(microbatch)
        losses.append(model(torch.ones(2, 5)).sum())
        torch.manual_seed(microbatch)
        plain(torch.ones(2, 5)).sum().backward()
    assert log.events == [f"out {n}" for n in range(10)]
    log.events.clear()
    for microbatch in range(2):  # first microbatch 0, as the pipeline does
        offloader._here.microbatch = microbatch
        offloader.backward_begins()
        losses[microbatch].backward()
    offloader.clear()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]))
    needed = [4, 3, 2, 1, 0, 9, 8, 7, 6, 5]
    assert [e for e in log.events if e[:3] == "use"] == [f"use {n}" for n in needed]
    backs = [int(e[5:]) for e in log.events if e[:4] == "back"]
    assert backs == needed  # each once
    for position, number in enumerate(needed):
        used = log.events.index(f"use {number}")
        ahead = needed[position + 1 : position + 1 + horizon]
        assert all(log.events.index(f"back {n}") < used for n in ahead)
        later = needed[position + 1 + horizon :]
        assert all(log.events.index(f"back {n}") > used for n in later)


def test_what_is_not_worth_it_stays() -> None:
    log = Log()
    log.wants = lambda tensor: False  # type: ignore[method-assign]
    model = layers(Offloader(log, 4).hold)
    model(torch.ones(2, 5)).sum().backward()
    assert log.events == []
