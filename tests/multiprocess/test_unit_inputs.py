"""Step inputs come from pipeline rank 0, outputs go to every rank: dummies, wrong batches, kinds of values."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

import step_cases
from harness import RankPool
from step_cases import Case, Verdict

WIDTH = 8
BATCH = 8


class Net(nn.Module):
    """Two linear layers, one per stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


PLACE = {"last": 1}


def vectors(step: int, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(step))


def step_on(model: Any, out: Tensor) -> Tensor:
    loss = out.square().mean()
    model.backward(loss)
    return loss


# ------------------------------------------------------------------ bodies and their inputs


def plain(model: Any, x: Tensor) -> Any:
    return step_on(model, model(x))


def one(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (vectors(step),), {}


def dummy(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(BATCH, 0),), {}


def keywords_only(model: Any, *, x: Tensor, scale: float = 1.0) -> Any:
    return step_on(model, model(x=x) * scale)


def gives_keywords(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"x": vectors(step), "scale": 0.5 + step}


def dummy_keywords(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"scale": -1.0, "x": torch.zeros(BATCH, 0)}


class Boxes:
    """Is cut by its own method; the parts are of another type."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows

    def smp_slice(self, num: int, index: int, axis: int) -> list[Tensor]:
        size = len(self.rows) // num
        return self.rows[index * size : (index + 1) * size]


class Box:
    """A plain object of the batch, with a device as such objects have it."""

    def __init__(self, row: Tensor) -> None:
        self.row = row
        self.device = row.device


class Targets:
    """Holds objects that can't slice themselves; a microbatch gets a list of them."""

    def __init__(self, boxes: list[Box]) -> None:
        self.boxes = boxes
        self.device = torch.device("cpu")

    def smp_slice(self, total: int, which: int, dim: int) -> list[Box]:
        size = len(self.boxes) // total
        return [Box(box.row.to(self.device)) for box in self.boxes[which * size : (which + 1) * size]]


def objects(model: Any, x: Tensor, targets: Any) -> Any:
    """The result is a list of objects: each comes back as a list with one entry per microbatch."""
    out = model(x)
    step_on(model, out + torch.stack([box.row.to(box.device) for box in targets]))
    return [box.row.sum().item() for box in targets]


def gives_objects(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (vectors(step), Targets([Box(row) for row in vectors(step + 50)])), {}


def dummy_objects(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(BATCH, 0), None), {}


class Where(NamedTuple):
    start: Tensor
    name: str


@dataclass
class Bag:
    """Passed as it is: api.md 3.3."""

    weight: Tensor
    factor: float
    parts: list[Any] = field(default_factory=list)


def many_kinds(
    model: Any, x: Tensor, pair: Where, table: dict[str, Any], boxes: Boxes, bag: Bag, array: Any, number: int,
    across: Tensor, whole: Tensor, zero: Tensor, args: Any,
) -> Any:  # fmt: skip
    out = model(x) + pair.start + table["deep"][0] * bag.weight * bag.factor + bag.parts[0]
    out = out + torch.stack(boxes).mean(0) + torch.from_numpy(array).float().sum() + number  # type: ignore[arg-type]
    out = out * across.t().mean(1, keepdim=True) + whole.sum() + zero + args.shift
    assert pair.name == "here"
    assert table["none"] is None
    loss = step_on(model, out)
    return {"loss": loss, "out": out, "name": pair.name, "number": number, "none": None, "shape": tuple(out.shape)}


def gives_many(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = vectors(step)
    table = OrderedDict(deep=[x * 2, "text"], none=None, flag=True)
    args = (x, Where(x + 1, "here"), table, Boxes([*x]), Bag(x[0], 0.5, [x[1]]), numpy.arange(3) + step, step)
    rest = {"across": torch.arange(16.0).view(2, BATCH) + step, "whole": torch.ones(3), "zero": torch.tensor(2.0)}
    return args, {**rest, "args": argparse.Namespace(shift=0.25)}


def dummy_many(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    empty = torch.zeros(BATCH, 0)
    args = (empty, Where(empty, "there"), {}, Boxes([]), Bag(empty, 0.0), numpy.zeros(1), -1)
    rest = {"across": empty, "whole": empty, "zero": empty}
    return args, {**rest, "args": argparse.Namespace(shift=0.25)}


MANY_OPTIONS = {"non_split_inputs": ["whole"], "input_split_axes": {"across": 1}}


def encoding(model: Any, batch: Any) -> Any:
    from transformers import BatchEncoding

    assert isinstance(batch, BatchEncoding)
    return step_on(model, model(batch["x"]) * batch.mask.unsqueeze(-1))


def gives_encoding(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from transformers import BatchEncoding

    x = vectors(step)
    return (BatchEncoding({"x": x, "mask": x[:, 0].contiguous()}),), {}


def dummy_encoding(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from transformers import BatchEncoding

    return (BatchEncoding({"x": torch.zeros(BATCH, 0), "mask": torch.zeros(BATCH, 0)}),), {}


def strided(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same shape with other strides in each step: gaps, no gaps, transposed, repeated."""
    big = torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    kinds = [big[::2], big[:BATCH], big[:BATCH].t().contiguous().t(), big[:1].expand(BATCH, WIDTH)]
    return (kinds[step % 4],), {}


GIVEN: list[Tensor] = []


def wants_grad(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    GIVEN.append(vectors(step).requires_grad_())
    return (GIVEN[-1],), {}


def input_gradient(model: Any, x: Tensor) -> Any:
    return step_on(model, model(x * 2) + x)


def see_gradients(model: Any, step: int) -> None:
    """The gradient of the last step's input shows in the weights."""
    import shardwright.torch as smp

    has_inputs = not smp.is_initialized() or smp.pp_rank() == 0
    if has_inputs and GIVEN and GIVEN[-1].grad is not None:
        with torch.no_grad():
            model.first.bias += GIVEN[-1].grad.sum(0)
        GIVEN.clear()


def lengths(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Batches of other shapes after the schedule is settled, and back again."""
    length = [5, 5, 5, 3, 5, 7, 7, 3][step]
    return (torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(step)),), {}


def dummy_lengths(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(BATCH, 0),), {}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def outputs_of_all_kinds(model: Any, x: Tensor) -> Any:
    out = model(x)
    loss = step_on(model, out)
    return loss, [out, None, "text", 3], {"deep": (x, 2.5)}, loss.item() > 0, numpy.float32(1.5)


def number_only(model: Any, x: Tensor) -> Any:
    step_on(model, model(x))
    return 7


def forward_only(model: Any, x: Tensor) -> Any:
    return model(x), len(x)


def nine(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """FF-03 (b): nine samples in batches of four."""
    return (vectors(0, 9)[4 * step : 4 * step + 4],), {}


def to_eval(model: Any, step: int) -> None:
    model.eval()


def no_grad_inside(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = model(x)
    out = model(x * 0.5)
    loss = (out - target).square().mean()
    model.backward(loss)
    return loss, target


class Wrapped:
    """An object that each rank has itself, and that the step body changes."""

    def __init__(self) -> None:
        self.seen = 0


class Trainer:
    """Its class holds a step function: that is no method, and takes exactly what it is given."""

    train_step: Any = None


def own_object(model: Any, x: Tensor, trainer: Wrapped) -> Any:
    trainer.seen += 1
    return step_on(model, model(x)), trainer.seen


TRAINERS: list[Wrapped] = []


def gives_trainer(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if step == 0:
        TRAINERS[:] = [Wrapped()]
    return (vectors(step), TRAINERS[0]), {}


CASES = [
    Case("dummies", Net, plain, one, PLACE, dummies=dummy),
    Case("keywords_only", Net, keywords_only, gives_keywords, PLACE, dummies=dummy_keywords),
    Case("many_kinds", Net, many_kinds, gives_many, PLACE, dummies=dummy_many, options=MANY_OPTIONS),
    Case("objects_of_the_batch", Net, objects, gives_objects, PLACE, dummies=dummy_objects),
    Case("batch_encoding", Net, encoding, gives_encoding, PLACE, dummies=dummy_encoding),
    Case("strides", Net, plain, strided, PLACE, dummies=dummy, steps=8),
    Case(
        "input_requires_grad",
        Net,
        input_gradient,
        wants_grad,
        PLACE,
        before_step=see_gradients,
        steps=3,
        microbatches=1,
        reordered="uses on two stages",
    ),
    Case(
        "new_lengths",
        Deep,
        plain,
        lengths,
        {f"blocks.{i}": i // 4 for i in range(8)},
        dummies=dummy_lengths,
        steps=8,
        microbatches=8,
        timeout_s=20,
    ),
    Case(
        "new_lengths_4",
        Deep,
        plain,
        lengths,
        {f"blocks.{i}": i // 2 for i in range(8)},
        dummies=dummy_lengths,
        steps=8,
        microbatches=8,
        pp=4,
        timeout_s=20,
    ),
    Case(
        "new_lengths_virtual",
        Deep,
        plain,
        lengths,
        {f"blocks.{i}": i // 2 % 2 for i in range(8)},
        dummies=dummy_lengths,
        steps=8,
        microbatches=4,
        timeout_s=20,
    ),
    Case("outputs", Net, outputs_of_all_kinds, one, PLACE, dummies=dummy),
    Case("number_only", Net, number_only, one, PLACE, dummies=dummy),
    Case("ff03_forward_only", Net, forward_only, nine, PLACE, grad=False, before_step=to_eval, steps=3),
    Case("no_grad_inside", Net, no_grad_inside, one, PLACE, dummies=dummy),
    Case("own_objects", Net, own_object, gives_trainer, PLACE, microbatches=1),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    GIVEN.clear()
    step_cases.check(case, verdicts[case.name])


# ------------------------------------------------------------------ errors that leave no trace


def wrong_batch_then_good_one() -> list[Any]:
    """FF-03 (a): batch 8 in 3 microbatches, then good ones, on each rank."""
    import shardwright.torch as smp
    from shardwright.errors import ShapeError

    torch.manual_seed(0)
    net = Net()
    smp.set_partition(net.last, 1)
    model = smp.DistributedModel(net)
    step = smp.step(plain)
    good = vectors(1, 9) if smp.pp_rank() == 0 else torch.zeros(9, 0)
    seen: list[Any] = []
    for batch in (8, 9, 8, 9):
        if batch == 9:
            model.zero_grad(set_to_none=True)
            seen.append(step(model, good).stack())
            seen.append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
            continue
        with pytest.raises(ShapeError) as raised:
            step(model, vectors(0) if smp.pp_rank() == 0 else torch.zeros(8, 0))
        assert isinstance(raised.value, ValueError)
        seen.append(str(raised.value))
    unpicklable(model, step)
    return seen


def steps_in_a_class() -> Any:
    """The step function as an attribute of a class, called through an instance."""
    import shardwright.torch as smp

    torch.manual_seed(0)
    net = Net()
    smp.set_partition(net.last, 1)
    model = smp.DistributedModel(net)
    Trainer.train_step = smp.step(plain)
    assert Trainer.train_step.__name__ == "plain"
    assert Trainer.train_step.__wrapped__ is plain
    return Trainer().train_step(model, vectors(1)).stack()


def test_step_in_a_class(pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False}
    torch.manual_seed(0)
    net = Net()
    expected = torch.stack([net(part).square().mean().detach() for part in vectors(1).chunk(2)])
    for losses in pool2.run(steps_in_a_class, config=config, timeout_s=60):
        assert torch.equal(losses, expected)


def unpicklable(model: Any, step: Any) -> None:
    """An input that can't be sent is an error on every rank as well, and the next step works."""
    import shardwright.torch as smp

    class Local(NamedTuple):
        x: Tensor

    with pytest.raises(Exception, match="Local"):
        step(model, Local(vectors(1, 9)) if smp.pp_rank() == 0 else torch.zeros(9, 0))
    step(model, vectors(1, 9))


def test_wrong_batch(pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 3, "auto_partition": False}
    ranks = pool2.run(wrong_batch_then_good_one, config=config, timeout_s=60)
    torch.manual_seed(0)
    net = Net()
    losses = []
    for part in vectors(1, 9).chunk(3):
        loss = net(part).square().mean()
        (loss / 3).backward()
        losses.append(loss.detach())
    for seen in ranks:
        first, loss, gradients, second, again, _ = seen
        for text in (first, second):
            assert "size 8" in text
            assert "3 microbatches" in text
        assert torch.equal(loss, torch.stack(losses))
        assert torch.equal(loss, again)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, net.get_parameter(name).grad, rtol=1e-6, atol=1e-8)
