"""Modules that meet again what they kept, called once and several times in a microbatch: in the order of one process."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from harness import RankPool
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


class InBuffer(Keeper):
    """A buffer that is no statistic: the output depends on it."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.total.mul_(0.5).add_(h.detach().mean(0))
        return self.mix(h, self.total)


class Memory:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # nothing that could be told to other ranks
        self.parts: dict[str, list[Tensor]] = {"seen": []}

    def add(self, tensor: Tensor) -> Tensor:
        with self.lock:
            self.parts["seen"] = [*self.parts["seen"], tensor][-3:]
        return torch.stack(self.parts["seen"]).mean(0)


class InObject(Keeper):
    """Out of sight of glue."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(h, self.memory.add(h.detach().mean(0)))


class WriteOnly(Keeper):
    """Leaves an auxiliary loss that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        self.aux = h.square().mean()
        return self.mix(h, h.mean(0))


class Lazy(Keeper):
    """Makes a table when it is first called, which is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, WIDTH)
        return self.mix(h, self.table)


class Normed(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(self.norm(h), h.mean(0))


class Visits(nn.Module):
    """The keeper and a block on the other stage in turn; with `detour`, some microbatches come to the block first."""

    def __init__(self, keeper: type[nn.Module], calls: int, *, detour: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.keeper = keeper()
        self.block = Block()
        self.calls = calls
        self.detour = detour

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.detour and x[0, 0] > 0:
            h = self.block(h)
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


def reset_at_the_end(model: Any, x: Tensor) -> Any:
    loss = model(x).square().mean() + model.module.keeper.aux
    model.backward(loss)
    model.module.keeper.aux = 0.0
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
KEEPERS = (RunningTotal, InPlace, History, Late, Carry, Added, InBuffer, InObject, WriteOnly)


def build(keeper: type[nn.Module], calls: int, *, detour: bool = False) -> Any:
    return lambda: Visits(keeper, calls, detour=detour)


def one_takes_a_detour(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """From step 2 on one microbatch leaves the path of the others."""
    x = vectors(step, batch=2 * MICROBATCHES)
    x[:, 0] = -x[:, 0].abs()
    if step >= 2:
        x[2, 0] = 1.0
    return (x,), {}


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
                        reordered="a value that several stages read" if keeper is Added else "",
                    )
                )
    found += [replace(c, name=f"{c.name}-simple", schedule="simple") for c in found if "-2-" in c.name]
    for home in (0, 1):
        place = {"keeper": home, "block": 1 - home}
        for calls in (1, 2):
            found.append(
                Case(
                    f"detours-{calls}-stage{home}",
                    build(RunningTotal, calls, detour=True),
                    train,
                    batch,
                    place,
                    steps=4,
                    microbatches=MICROBATCHES,
                    reordered="microbatches that leave the program add their gradients last",
                )
            )
        found.append(
            Case(
                f"late-detour-stage{home}",
                build(RunningTotal, 1, detour=True),
                train,
                one_takes_a_detour,
                place,
                steps=4,
                microbatches=MICROBATCHES,
                reordered="microbatches that leave the program add their gradients last",
            )
        )
    found.append(
        Case(
            "in-between",
            build(RunningTotal, 1),
            in_between,
            batch,
            {"keeper": 0, "block": 1},
            steps=4,
            microbatches=MICROBATCHES,
            error="module 'keeper' looks at tensors that it keeps from call to call, and was called by microbatch 0",
        )
    )
    found.append(
        Case(
            "reset-at-the-end",
            build(Added, 1),
            reset_at_the_end,
            batch,
            {"keeper": 0, "block": 1},
            steps=4,
            microbatches=MICROBATCHES,
            error="microbatch 0 assigns 'aux' of Added, which microbatch 1 has used already",
        )
    )
    for home in (1, 2):
        for calls in (1, 3):
            found.append(
                Case(
                    f"four-stages-{calls}-stage{home}",
                    build(RunningTotal, calls),
                    train,
                    batch,
                    {"keeper": home, "block": 3},
                    steps=4,
                    microbatches=MICROBATCHES,
                    pp=4,
                )
            )
        late = next(c for c in found if c.name == "late-detour-stage0")
        for schedule in ("interleaved", "simple"):
            place = {"keeper": home, "block": 3}
            found.append(replace(late, name=f"late-{schedule}-stage{home}", place=place, pp=4, schedule=schedule))
    return found


CASES = cases()


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kept(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])


# ------------------------------------------------------------------ who must wait for whom


def is_in_order(name: str, calls: int) -> bool:
    """Are microbatches held back after two steps?"""
    import shardwright.torch as smp
    from shardwright.pipeline import step as steps

    plain = build(globals()[name], calls)()
    smp.set_partition(plain.block, 1)
    model = smp.DistributedModel(plain)
    step = smp.step(BODIES.get(globals()[name], train))
    for number in range(2):
        step(model, *batch(number)[0])
    (kinds,) = steps._driver.pipeline._known.values()  # type: ignore[union-attr]
    (known,) = kinds.values()
    return bool(known.in_order)


CONFIG = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "auto_partition": False}


@pytest.mark.parametrize(
    ("keeper", "calls", "held_back"),
    [
        (RunningTotal, 1, False),
        (RunningTotal, 2, True),
        (InBuffer, 1, False),
        (InBuffer, 2, True),
        (InObject, 2, True),
        (History, 1, True),
        (WriteOnly, 2, False),
        (Lazy, 2, False),
        (Normed, 2, False),
    ],
)
def test_only_who_looks_at_what_it_keeps_holds_others_back(
    keeper: type[nn.Module], calls: int, held_back: bool, pool2: RankPool
) -> None:
    assert pool2.run(is_in_order, keeper.__name__, calls, config=CONFIG) == [held_back] * 2
