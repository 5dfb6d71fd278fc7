"""What crosses the border of a unit: nested values, every dtype, Python values, what has no description.

Loss, gradients, weights and whatever else a case returns are compared with one process, bit for bit.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import step_cases
from step_cases import Case, Verdict
from unit_models import BATCH, PLACE, WIDTH, Body, one_tensor, train, vectors

# ------------------------------------------------------------------ structured values


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Result:
    hidden: Tensor
    note: str
    empty: Tensor | None = None


class Slotted:
    __slots__ = ("__secret", "value")

    def __init__(self, value: Tensor, secret: Tensor) -> None:
        self.value = value
        self.__secret = secret

    def secret(self) -> Tensor:
        return self.__secret


class Nested(nn.Module):
    """Returns every kind of container around tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair, *, extra: dict[str, Any]) -> Any:
        h = self.linear(pair.left) + pair.right[0]
        both = collections.OrderedDict(twice=h * 2, same=extra["given"])
        return (
            Pair(h, [None, (h.sum(), {"deep": h.mean(0)})]),
            Result(h + 1, "note"),
            both,
            Slotted(h, h * 3),
            slice(1, None),
        )


class CallsNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Nested()

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.inner(Pair(h, [h.tanh()]), extra={"given": h, "flag": True, "name": "n", "number": 3})


def use_nested(model: Any, x: Tensor) -> Any:
    pair, result, both, slotted, part = model(x)
    assert isinstance(pair, Pair)
    assert type(result) is Result
    assert result.note == "note"
    assert result.empty is None
    assert type(both) is collections.OrderedDict
    assert pair.right[0] is None
    total = pair.left[part].sum() + pair.right[1][0] + pair.right[1][1]["deep"].sum() + result.hidden.mean()
    total = total + (both["twice"] * both["same"]).sum() + slotted.value.sum() + slotted.secret().mean()
    model.backward(total)
    return total, pair, result, both


class Options(nn.Module):
    """FF-04: a module called by keyword with a mask that may be None, flags and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h: Tensor, mask: Tensor | None = None, *, scale: float, flag: bool, meta: dict[str, Any]
    ) -> Tensor:
        h = self.linear(h) * scale
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        if flag:
            h = h + len(meta["names"]) + meta["shift"].unsqueeze(-1)
        return h


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    attentions: Tensor | None = None


class TakesOptions(nn.Module):
    """Calls `Options` without and with a mask; labels are used on stage 1 only; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Options()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, *, labels: Tensor, mask: Tensor, shift: Tensor, flag: bool) -> Output:
        h = self.first(x)
        meta = {"names": ["a", "b"], "shift": shift}
        h = self.inner(h=h, scale=0.5, flag=flag, meta=meta)
        h = self.inner(h, mask, scale=2.0, flag=not flag, meta=meta)
        return Output(self.loss(h, labels), h)


def options_inputs(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = vectors(step)
    labels = torch.arange(BATCH) + step
    return (x,), {"labels": labels, "mask": x > 0.5, "shift": x[:, 0].contiguous(), "flag": step % 2 == 0}


def options_dummies(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    empty = torch.zeros(BATCH, 0)
    return (empty,), {"labels": empty, "mask": empty, "shift": empty, "flag": False}


def use_options(model: Any, x: Tensor, **rest: Any) -> Any:
    out = model(x, **rest)
    model.backward(out.loss)
    return out


class Sends(nn.Module):
    """FF-05: hidden, ids up to 50000, a bool mask, positions, a number; plus tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        return h, ids * 1, ids % 3 == 0, ids.float() / 7, h.sum(), h[:0], ids.new_zeros(0, 5), h.double().mean()


class Receives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(50001, WIDTH)

    def forward(self, h: Tensor, ids: Tensor, mask: Tensor, where: Tensor, number: Tensor, *rest: Tensor) -> Any:
        assert (ids.dtype, mask.dtype, where.dtype) == (torch.int64, torch.bool, torch.float32)
        assert number.dim() == 0
        assert rest[0].shape == (0, WIDTH)
        assert rest[1].shape == (0, 5)
        out = self.linear(h) + self.words(ids).masked_fill(mask.unsqueeze(-1), 0.0) + where.unsqueeze(-1)
        return out + number * rest[2].float(), ids, mask, where, number, rest[0], rest[1]


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sends = Sends()
        self.receives = Receives()

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.receives(*self.sends(x, ids))


def ids_inputs(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (vectors(step), torch.tensor([50000, 49999, 257 + step, 0])), {}


def use_mixed(model: Any, x: Tensor, ids: Tensor) -> Any:
    out, *others = model(x, ids)
    loss = out.square().mean()
    model.backward(loss)
    assert [t.requires_grad for t in others] == [False, False, False, True, True, False]
    return loss, others


# ------------------------------------------------------------------ Python values, opaque objects, shapes


class Measures(nn.Module):
    """Returns a Python number that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> tuple[Tensor, float, int]:
        h = self.linear(h)
        return h, float(h.detach().sum()), int(h.detach().argmax())


def use_measures(model: Any, x: Tensor) -> Any:
    h, total, index = model(x)
    loss = (h * total).mean() * index
    model.backward(loss)
    return loss, total, index


class ReturnsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Any:
        return self.linear(h), iter([1, 2])


def use_first(model: Any, x: Tensor) -> Any:
    return model(x)[0]


class Selects(nn.Module):
    """The number of rows it returns depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h)[h[:, 0].abs().argsort()[: 1 + int(h[0, 1] > 0)]]


def mark_inner(model: nn.Module) -> None:
    import shardwright.torch as smp

    smp.dynamic_shapes(model.get_submodule("inner"))


def rows_differ(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """In steps 0 and 1 the two microbatches agree on the number of rows, later not."""
    x = vectors(step)
    x[0, 1], x[2, 1] = (100.0, 100.0) if step < 2 else (-100.0, 100.0)
    return (x,), {}


class PassesOn(nn.Module):
    """A first layer whose output keeps the sign of the input's column 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.first(x) * 0.01 + x)


# ------------------------------------------------------------------ arguments that can't be described


class Calls(nn.Module):
    """Takes a function, a module, a NumPy array and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, act: Any, norm: nn.Module, table: Any, step: int) -> Tensor:
        return norm(act(self.linear(h))) * float(table.sum()) + step


class GivesFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Calls()
        self.norm = nn.LayerNorm(WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor, number: int) -> Any:
        import numpy

        act = torch.tanh if number % 2 else torch.relu
        return self.inner(self.first(x), act, self.norm, numpy.arange(3), step=number)


def count_inputs(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (vectors(step), step), {}


def count_dummies(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(BATCH, 0), -1), {}


def use_number(model: Any, x: Tensor, number: int) -> Any:
    out = model(x, number)
    loss = out.square().mean()
    model.backward(loss)
    return loss, number


CASES = [
    Case("nested", CallsNested, use_nested, one_tensor, PLACE),
    Case(
        "ff04_options",
        TakesOptions,
        use_options,
        options_inputs,
        {"inner": 1, "loss": 1},
        dummies=options_dummies,
        steps=3,
        reordered="a module called twice",
    ),
    Case("ff05_dtypes", MixedDtypes, use_mixed, ids_inputs, {"receives": 1}),
    Case("python_numbers", lambda: Body(Measures()), use_measures, one_tensor, PLACE, steps=3),
    Case(
        "opaque_result", lambda: Body(ReturnsGenerator()), use_first, one_tensor, PLACE, error=r"'inner'.*list_iterator"
    ),
    Case(
        "shapes_differ",
        lambda: PassesOn(Selects()),
        train,
        rows_differ,
        PLACE,
        steps=3,
        error=r"'inner'(.|\n)*smp\.dynamic_shapes\(module\)",
    ),
    Case("dynamic_shapes", lambda: PassesOn(Selects()), train, rows_differ, PLACE, steps=4, prepare=mark_inner),
    Case(
        "opaque_arguments",
        GivesFunction,
        use_number,
        count_inputs,
        {"inner": 1, "norm": 1},
        dummies=count_dummies,
        steps=4,
    ),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_border(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
