"""Objects that a unit changes: arguments, attributes of its own modules, and what each rank has itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from step_cases import Case, Verdict
from unit_models import PLACE, WIDTH, one_tensor, train, vectors

# ------------------------------------------------------------------ objects that a unit changes


class BoxList:
    """Tensors and a size, in the style of detection models; the class has its own __eq__ and __getattr__."""

    def __init__(self, boxes: Tensor) -> None:
        self.boxes = boxes
        self.size = (3, 4)
        self.fields: dict[str, Tensor] = {}

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody may compare these")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("field_"):
            return self.fields[name.removeprefix("field_")]
        raise AttributeError(name)


class Changes(nn.Module):
    """Appends to a list, fills a dict, sets attributes of an object, and returns one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, seen: list[Any], table: dict[str, Any], boxes: BoxList, log: list[list[Any]]) -> Any:
        h = self.linear(h)
        seen.append(h.relu())
        table["mean"] = h.mean()
        table.setdefault("calls", []).append("one")
        boxes.boxes = boxes.boxes + h
        boxes.fields["score"] = h.sigmoid()
        log[0].append(seen)
        return h, boxes


class GivesObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Changes()
        self.back = Changes()

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        seen: list[Any] = [h]
        table: dict[str, Any] = {}
        boxes = BoxList(h * 2)
        log: list[list[Any]] = [[]]
        boxes_before, fields_before = boxes, boxes.fields
        for module in (self.inner, self.back):
            h, returned = module(h, seen, table, boxes, log)
            assert returned is boxes_before
        assert boxes.fields is fields_before
        assert log[0][0] is seen
        assert log[0][1] is seen
        assert len(seen) == 3
        assert table["calls"] == ["one", "one"]
        return h, seen, table, boxes


def use_objects(model: Any, x: Tensor) -> Any:
    h, seen, table, boxes = model(x)
    loss = h.mean() + sum(s.square().mean() for s in seen) + table["mean"] + boxes.boxes.mean()
    loss = loss + boxes.field_score.sum()
    model.backward(loss)
    return loss, seen, table["mean"], boxes.boxes


class Clears(nn.Module):
    """Empties containers, deletes an attribute, replaces one tensor by another that came in with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, state: Any) -> Tensor:
        state.past.clear()
        state.keep, state.other = state.other, state.keep
        del state.gone
        state.count += 1
        state.members.add("new")
        return self.linear(h) + state.keep


class State:
    def __init__(self, h: Tensor) -> None:
        self.past = [h, h]
        self.keep = h * 2
        self.other = h * 3
        self.gone = h
        self.count = 0
        self.members = {"old"}


class GivesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Clears()

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        state = State(h)
        keep = state.keep
        out = self.inner(h, state)
        assert state.past == []
        assert state.other is keep
        assert not hasattr(state, "gone")
        assert state.count == 1
        assert state.members == {"old", "new"}
        return out * state.keep + state.other


# ------------------------------------------------------------------ what modules keep, and what each rank has itself


class Auxiliary(nn.Module):
    """Leaves a loss, a list and a running total in attributes, in the style of mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.losses: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        self.losses.append(h.square().mean())
        return self.linear(h) * self.gate(h)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux: Tensor | float = 0.0
        self.table: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, WIDTH)
        gate = torch.sigmoid(self.linear(h)) * self.table
        self.aux = gate.mean(0).square().sum()
        return gate


class Totals(nn.Module):
    """Takes up what the microbatch before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.total = torch.zeros(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        self.total = self.total + h.detach().mean(0)
        return self.linear(h) + self.total


class GivesAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Auxiliary()
        self.last = Totals()

    def forward(self, x: Tensor) -> Any:
        self.inner.losses.clear()
        h = self.inner(self.first(x))
        aux = self.inner.gate.aux
        h = self.last(self.inner(h))
        return h, aux + self.inner.gate.aux * 2 + sum(self.inner.losses), self.last.total


def use_auxiliary(model: Any, x: Tensor) -> Any:
    out, aux, total = model(x)
    loss = out.square().mean() + aux + model.module.inner.gate.aux * total.mean()
    model.backward(loss)
    return loss, out, aux, total


def reset_total(model: Any, step: int) -> None:
    if step == 2:
        model.last.total = torch.ones(WIDTH)


class ChangesOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, trainer: Trainer) -> Tensor:
        trainer.seen.append(h.mean())
        return self.linear(h)


class Trainer:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.data = list(range(1000))


class GivesTrainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = ChangesOwn()

    def forward(self, x: Tensor, trainer: Trainer) -> Tensor:
        return self.inner(self.first(x), trainer)


def with_trainer(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (vectors(step), Trainer()), {}


def use_trainer(model: Any, x: Tensor, trainer: Trainer) -> Any:
    return model(x, trainer)


CASES = [
    Case("changed_objects", GivesObjects, use_objects, one_tensor, PLACE, reordered="uses on two stages"),
    Case("cleared_objects", GivesState, train, one_tensor, PLACE, reordered="uses on two stages"),
    Case(
        "kept_attributes",
        GivesAuxiliary,
        use_auxiliary,
        one_tensor,
        {"inner": 1, "last": 1},
        steps=4,
        before_step=reset_total,
        reordered="uses on two stages",
    ),
    Case(
        "kept_attributes_4",
        GivesAuxiliary,
        use_auxiliary,
        one_tensor,
        {"inner": 1, "last": 1},
        steps=4,
        microbatches=4,
        reordered="uses on two stages",
    ),
    Case(
        "changed_own_object",
        GivesTrainer,
        use_trainer,
        with_trainer,
        PLACE,
        error="'inner' changed an object of type .*Trainer that each rank has for itself",
    ),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_objects(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
