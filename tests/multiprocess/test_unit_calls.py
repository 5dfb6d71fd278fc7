"""Modules called twice, stages visited again, buffers and statistics, modes that change between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from step_cases import Case, Verdict
from unit_models import WIDTH, Block, Chain, one_tensor, stages, train

TWICE = "a module called twice"

# ------------------------------------------------------------------ called twice, stages visited again


class Twice(nn.Module):
    """FF-09: one block at depth 2 and 5."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 3, 4, 2):
            x = self.blocks[index](x)
        return self.head(x)


class TwoModelCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return x if scale is None else x * scale


def call_twice(model: Any, x: Tensor) -> Any:
    first = model(x)
    second = model(first, scale=first.mean())
    loss = second.square().mean()
    model.backward(loss)
    return loss, first, second


def backward_twice(model: Any, x: Tensor) -> Any:
    losses = [model(x).square().mean(), model(x * 2).mean()]
    model.backward(losses[0])
    model.backward(losses[1])
    return losses


# ------------------------------------------------------------------ buffers and statistics


class Norms(nn.Module):
    """FF-31: convolution and batch norm, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU(inplace=True)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], 2, -1)
        for block in self.blocks:
            x = block(x)
        return x


def last_step_in_eval(model: Any, step: int) -> None:
    model.train(step < 3)


class Counter(nn.Module):
    """FF-32: a counter changed in place, one assigned anew, and one buffer of another module."""

    shared: Tensor
    counts: Tensor
    total: Tensor

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shared", shared)
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        self.total = self.total + x.detach().mean(0)
        return self.linear(x) * self.shared + self.total / self.counts


class Counters(nn.Module):
    counts: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        shared = torch.linspace(0.5, 1.5, WIDTH)
        self.first = Counter(shared)
        self.second = Counter(shared)
        self.num_calls = 0
        self.register_buffer("counts", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        self.total = self.total + x.detach().mean(0)
        h = self.second(self.first(x))
        self.seen = h.detach()
        self.num_calls += 1
        return h + self.total / self.counts + self.num_calls


class CountsAtEnd(nn.Module):
    """A statistic that each call takes up from the call before, after it has waited for another stage."""

    total: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        if self.in_place:
            self.total += h.detach().mean(0)
        else:
            self.total = self.total + h.detach().mean(0)
        return h + self.total


def use_attributes(model: Any, x: Tensor) -> Any:
    """Attributes that glue assigned, read after the call."""
    out = model(x)
    loss = (out - model.module.seen).mean()
    model.backward(out.square().mean())
    return loss, out


# ------------------------------------------------------------------ modes that change between steps


def freeze_and_thaw(model: Any, step: int) -> None:
    """Parts of a unit are frozen, set to eval mode, and thawed again."""
    block = model.blocks[1]
    for p in block.parameters():
        p.requires_grad_(step != 1)
    for p in model.blocks[0].parameters():
        p.requires_grad_(step != 2)
    block.act.train(step != 3)


class BlockWithDropout(nn.Module):
    """Dropout that is inert, so that its results can be compared; in eval mode it returns its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Dropout(1e-12)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


def eval_inside(model: Any, step: int) -> None:
    model.blocks[1].act.train(step % 2 == 0)


class DropOnly(nn.Module):
    """A unit whose dropout alone is behind the border: what it returns is the argument, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Sequential(nn.Dropout(1e-12)), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        d = self.inner[0](h)
        d = d * 1 if d is h else d + 0
        return self.inner[1](d)


def eval_drop(model: Any, step: int) -> None:
    model.inner[0][0].train(step % 2 == 0)


class Unused(nn.Module):
    """A result that nobody uses, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        self.blocks[1](h)
        with torch.no_grad():
            extra = self.blocks[2](h)
        return h + extra


class ReturnsArguments(nn.Module):
    """A unit that picks one of its arguments by value: which one gets the gradient is seen, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a if a.detach().sum() > 0 else b)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = ReturnsArguments()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x).abs() * x[0, 0].sign(), self.other(x))


def signs_alike(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = one_tensor(step)
    x[0, 0] = x[2, 0] = 1.0 if step == 0 else -1.0
    return (x,), {}


CASES = [
    Case(
        "twice_on_two_stages",
        Twice,
        train,
        one_tensor,
        {"blocks.2": 1, "blocks.3": 0, "blocks.4": 1},
        steps=3,
        reordered=TWICE,
    ),
    Case(
        "twice_on_one_stage",
        Twice,
        train,
        one_tensor,
        {"blocks.2": 1, "blocks.3": 1, "blocks.4": 1, "head": 1},
        steps=3,
        reordered=TWICE,
    ),
    Case("two_model_calls", TwoModelCalls, call_twice, one_tensor, stages(0, 1), reordered=TWICE),
    Case("two_backwards", TwoModelCalls, backward_twice, one_tensor, stages(0, 1), reordered=TWICE),
    Case(
        "virtual_stages",
        lambda: Chain(*(Block() for _ in range(4))),
        train,
        one_tensor,
        stages(0, 1, 0, 1),
        microbatches=4,
        steps=3,
    ),
    Case(
        "virtual_stages_simple",
        lambda: Chain(*(Block() for _ in range(4))),
        train,
        one_tensor,
        stages(1, 0, 1, 0),
        microbatches=4,
        steps=3,
        schedule="simple",
    ),
    Case(
        "virtual_stages_4",
        lambda: Chain(*(Block() for _ in range(8))),
        train,
        one_tensor,
        stages(0, 1, 2, 3, 0, 1, 2, 3),
        pp=4,
        microbatches=4,
        steps=3,
    ),
    Case("ff31_batch_norm", Norms, train, one_tensor, stages(0, 0, 1, 1), steps=4, before_step=last_step_in_eval),
    Case("ff32_buffers", Counters, use_attributes, one_tensor, {"second": 1}, steps=3, microbatches=4),
    Case(
        "statistic_serial",
        lambda: CountsAtEnd(False),
        train,
        one_tensor,
        {"second": 1},
        steps=3,
        microbatches=4,
        config={"active_microbatches": 1},
    ),
    Case(
        "statistic_serial_in_place",
        lambda: CountsAtEnd(True),
        train,
        one_tensor,
        {"second": 1},
        steps=3,
        microbatches=4,
        config={"active_microbatches": 1},
    ),
    Case("statistic_mixed", lambda: CountsAtEnd(False), train, one_tensor, {"second": 1}, steps=3, microbatches=4),
    Case(
        "statistic_simple",
        lambda: CountsAtEnd(True),
        train,
        one_tensor,
        {"second": 1},
        steps=4,
        microbatches=4,
        schedule="simple",
    ),
    Case(
        "freeze_and_thaw",
        lambda: Chain(Block(), Block()),
        train,
        one_tensor,
        stages(0, 1),
        before_step=freeze_and_thaw,
        steps=5,
    ),
    Case(
        "eval_inside",
        lambda: Chain(BlockWithDropout(), BlockWithDropout()),
        train,
        one_tensor,
        stages(0, 1),
        before_step=eval_inside,
        steps=4,
    ),
    Case("eval_drop", DropOnly, train, one_tensor, {"inner": 1}, before_step=eval_drop, steps=4),
    Case("unused_results", Unused, train, one_tensor, stages(0, 1, 1)),
    Case(
        "picks_argument", Picks, train, signs_alike, {"inner": 1}, steps=2, error=r"'inner'(.|\n)*smp\.dynamic_shapes"
    ),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
