"""Units that return their arguments, views of them, or change them in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from step_cases import Case, Verdict
from unit_models import WIDTH, one_tensor, train

# ------------------------------------------------------------------ results that are arguments, changes in place


class PassOn(nn.Module):
    """Identity and Dropout (in eval mode) behind a border; what they return is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.same = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH))
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        same = self.same[0](h)
        assert same is h
        same += 1
        dropped = self.drop(h)
        dropped *= 2
        h[:, 0] = 0.5
        return self.last(self.same[1](h) + dropped)


def evaluate_mode(model: Any, step: int) -> None:
    model.eval()


class InPlace(nn.Module):
    """Activations in place as units of their own, right behind a border; the input is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.more = AddsOne()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * 3
        view = h.view(-1)
        self.more(view)  # a view: h sees it
        middle = view.sum()
        out = self.act(h)  # the view sees it
        assert out is h
        return self.last(out) + h + view.view_as(h) + middle


class AddsOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class ChangesInput(nn.Module):
    """Adds to its first argument in place, and returns another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, count: Tensor) -> Tensor:
        out = self.linear(h.clone())
        h += out.detach() + 1
        count += 1
        return out


class GivesAway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = ChangesInput()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() * 2
        out = self.inner(h, self.count)
        return self.last(h) + out * self.count


class Flat(nn.Module):
    """Flatten and friends as units: results are views; then one or the other is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.flatten = nn.Flatten(0)
        self.halves = Halves()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        flat = self.flatten(h)
        flat += 0.5
        a, rest = self.halves(h)
        rest[0].mul_(2)
        self.act(a)
        return h + flat.view_as(h).sigmoid()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x[:1], (x[1:],)


class Overlap(nn.Module):
    """Returns a new tensor and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x) * 1
        return h, h[:, :4], h.t()


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Overlap()

    def forward(self, x: Tensor) -> Tensor:
        h, part, turned = self.inner(self.first(x))
        part *= 3
        h[0] = 1.0
        return h + turned.t().sigmoid() + part.sum()


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x) * 1
        return h[:, 2:], h[:, :4]


class ChangesChunk(nn.Module):
    """Two results that overlap and of which neither holds the other: refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Chunks()

    def forward(self, x: Tensor) -> Tensor:
        right, left = self.inner(self.first(x))
        left.mul_(2)
        return right.sum() + left.sum()


CASES = [
    Case("pass_on", PassOn, train, one_tensor, {"same": 1, "drop": 1}, before_step=evaluate_mode),
    Case(
        "in_place_units", InPlace, train, one_tensor, {"act": 1, "more": 1, "last": 1}, reordered="uses on two stages"
    ),
    Case(
        "changed_arguments", GivesAway, train, one_tensor, {"inner": 1}, microbatches=1, reordered="uses on two stages"
    ),
    Case("views", Flat, train, one_tensor, {"flatten": 1, "halves": 1, "act": 1}),
    Case("overlapping_results", Overlapping, train, one_tensor, {"inner": 1}),
    Case(
        "changed_chunk",
        ChangesChunk,
        train,
        one_tensor,
        {"inner": 1},
        error="in-place 'mul_' on a tensor whose memory is shared",
    ),
    Case("changed_arguments_mixed", GivesAway, train, one_tensor, {"inner": 1}, timeout_s=6),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_place(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
