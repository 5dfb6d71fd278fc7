"""Modules that meet again what they kept, called once and several times in a microbatch: in the order of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from step_cases import Case, Verdict
from unit_models import WIDTH, Block, train, vectors

MICROBATCHES = 4


def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (vectors(step, batch=2 * MICROBATCHES),), {}


# ------------------------------------------------------------------ what a module may keep


class Keeper(nn.Module):
    """A layer whose output depends on what it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def mix(self, h: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.linear(h) * (1.0 + state))


class RunningTotal(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        self.total = self.total * 0.5 + h.detach().mean(0)
        return self.mix(h, self.total)


class InPlace(Keeper):
    """The same, written in place to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        self.total.mul_(0.5).add_(h.detach().mean(0))
        return self.mix(h, self.total)


class History(Keeper):
    """A list that grows over microbatches; the script never empties it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        self.seen.append(h.detach().mean(0))
        return self.mix(h, torch.stack(self.seen[-3:]).mean(0))


class Late(Keeper):
    """Finds nothing at first; the attribute is not there before."""

    def forward(self, h: Tensor) -> Tensor:
        before = getattr(self, "before", None)
        out = self.linear(h) if before is None else self.mix(h, before)
        self.before = out.detach().mean(0)
        return out


class Carry(Keeper):
    """Gradient flows from call to call; each microbatch starts with the numbers of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = torch.zeros(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        out = self.mix(h, self.carry)
        self.carry = out.mean(0)
        return out


class Added(Keeper):
    """An auxiliary loss that calls add to and read."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor | float = 0.0

    def forward(self, h: Tensor) -> Tensor:
        out = self.mix(h, torch.as_tensor(self.aux))
        self.aux = self.aux + out.square().mean()
        return out


class WriteOnly(Keeper):
    """Leaves an auxiliary loss that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        self.aux = h.square().mean()
        return self.mix(h, h.mean(0))


class Visits(nn.Module):
    """The keeper and a block on the other stage in turn."""

    def __init__(self, keeper: type[nn.Module], calls: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.keeper = keeper()
        self.block = Block()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.calls):
            h = self.block(self.keeper(h))
        return h


# ------------------------------------------------------------------ step bodies


def cut_first(model: Any, x: Tensor) -> Any:
    """Each microbatch takes up the numbers that were kept, and not their gradient."""
    model.module.keeper.carry = model.module.keeper.carry.detach()
    return train(model, x)


def reset_and_add(model: Any, x: Tensor) -> Any:
    model.module.keeper.aux = 0.0
    loss = model(x).square().mean() + model.module.keeper.aux
    model.backward(loss)
    return loss


def last_aux(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean() + model.module.keeper.aux
    model.backward(loss)
    return loss


def in_between(model: Any, x: Tensor) -> Any:
    """Calls before and after backward: another microbatch's may come in between."""
    out = model(x)
    loss = out.square().mean()
    model.backward(loss)
    return loss, model(x)


BODIES: dict[type[nn.Module], Any] = {Carry: cut_first, Added: reset_and_add, WriteOnly: last_aux}
KEEPERS = (RunningTotal, InPlace, History, Late, Carry, Added, WriteOnly)


def build(keeper: type[nn.Module], calls: int) -> Any:
    return lambda: Visits(keeper, calls)


def cases() -> list[Case]:
    found = []
    for keeper in KEEPERS:
        for calls in (1, 2, 3):
            for home in (0, 1):
                found.append(
                    Case(
                        f"{keeper.__name__}-{calls}-stage{home}",
                        build(keeper, calls),
                        BODIES.get(keeper, train),
                        batch,
                        {"keeper": home, "block": 1 - home},
                        steps=4,
                        microbatches=MICROBATCHES,
                        schedule="interleaved",
                        reordered="a value that several stages read" if keeper in (Added,) else "",
                    )
                )
    simple = [dataclasses.replace(c, name=f"{c.name}-simple", schedule="simple") for c in found if "-2-" in c.name]
    return found + simple


CASES = cases()


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kept(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
