"""Random programs of views and in-place changes: placed tensors end with the values and gradients of plain ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from one_frame import KeptWire, glue, make_frame, placed_leaf, real
from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.aliasing import resolve

Op = Callable[[Any, Any], Any]


def _setitem(t: Tensor, key: Any, value: Any) -> None:
    t[key] = value


def _iadd(t: Tensor, o: Tensor) -> Tensor:
    t += o
    return t


VIEWS: list[Op] = [
    lambda t, o: t[1:],
    lambda t, o: t[..., ::2],
    lambda t, o: t.view(-1),
    lambda t, o: t.reshape(-1),
    lambda t, o: t.t(),
    lambda t, o: t.unsqueeze(0),
    lambda t, o: t.squeeze(),
    lambda t, o: t.select(0, 0),
    lambda t, o: t.narrow(-1, 1, 2),
    lambda t, o: t.detach(),
    lambda t, o: t.data,
    lambda t, o: t.transpose(0, -1),
    lambda t, o: t.chunk(2)[0],
    lambda t, o: t.contiguous(),
    lambda t, o: t.expand(2, *t.shape),
    lambda t, o: t.flatten()[:4],
    lambda t, o: t.view_as(t),
    lambda t, o: t[None, ..., 1],
]
FRESH: list[Op] = [
    lambda t, o: t * 2,
    lambda t, o: t + o,
    lambda t, o: t - o.sum(),
    lambda t, o: t.relu(),
    lambda t, o: t.clone(),
    lambda t, o: t.sum(0),
    lambda t, o: t.flip(0),
    lambda t, o: torch.cat([t, t]),
    lambda t, o: torch.where(t > 0, t, o),
]
CHANGES: list[Op] = [
    lambda t, o: t.mul_(2),
    lambda t, o: t.add_(1),
    lambda t, o: t.add_(o.clone()),  # reading from the memory that is written has no defined result
    lambda t, o: t.sub_(o.sum()),
    lambda t, o: t.copy_(o.clone()),
    lambda t, o: t.zero_(),
    lambda t, o: t.relu_(),
    lambda t, o: _iadd(t, o.clone()),
    lambda t, o: _setitem(t, 0, 3.0),
    lambda t, o: _setitem(t, (..., 0), o.sum()),
    lambda t, o: _setitem(t, slice(1, None), o[1:].clone()),
    lambda t, o: t.masked_fill_(t.detach() > 1, 0.5),
    lambda t, o: t.unsqueeze_(0),
    lambda t, o: t.squeeze_(),
    lambda t, o: t.t_(),
    lambda t, o: t.transpose_(0, -1),
    lambda t, o: t.detach_(),
    lambda t, o: t.clamp_(-1, 1),
    lambda t, o: _add_out(t, o),
    lambda t, o: _set_data(t, o),
]
KINDS = [VIEWS, VIEWS, FRESH, CHANGES, CHANGES]


def _set_data(t: Tensor, o: Tensor) -> None:
    if t.shape == o.shape:
        t.data = o.data * 3


def _add_out(t: Tensor, o: Tensor) -> None:
    if t.shape == o.shape:
        torch.add(t.detach(), 1, out=o)


class Refused(Exception):
    """What plain torch does was refused by name; that may be."""


Step = tuple[Op, int, int, bool]


def _start(leaf: Any) -> list[Any]:
    return [leaf * 1, (leaf.detach() * 0 + 1), leaf[:2] + 1]


def _apply(tensors: list[Any], step: Step) -> None:
    op, i, j, tracked = step
    with torch.set_grad_enabled(tracked):
        made = op(tensors[i], tensors[j])
    if isinstance(made, Tensor) and all(made is not t for t in tensors):
        tensors.append(made)


def random_program(seed: int) -> tuple[list[Step], list[Any], Tensor]:
    """A program that plain torch runs; its tensors at the end, and the leaf that they come from."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    leaf = torch.randn(4, 6).requires_grad_()
    tensors = _start(leaf)
    program: list[Step] = []
    for _ in range(chance.randint(3, 12)):
        op, i, j = chance.choice(chance.choice(KINDS)), chance.randrange(len(tensors)), chance.randrange(len(tensors))
        step = (op, i, j, chance.random() < 0.8)
        try:
            _apply(tensors, step)
        except Exception:
            continue  # plain torch refuses it: nothing has happened
        program.append(step)
        try:
            _ = [t.grad_fn for t in tensors]
        except RuntimeError:  # a view has become unusable
            return program, [], leaf
    return program, tensors, leaf


def _loss(tensors: list[Any], leaf: Any) -> Any:
    torch.manual_seed(0)
    weights = [torch.randn(t.shape) for t in tensors]
    return sum(((t * w).sum() for t, w in zip(tensors, weights, strict=True)), leaf.sum())


def differences(seed: int) -> list[str]:
    """Run one random program on plain and on placed tensors, on both ranks of a pipeline; what differs."""
    program, plain, leaf = random_program(seed)
    wire = KeptWire()
    twin = leaf.detach().clone().requires_grad_()
    frame, other = make_frame(0, wire), make_frame(1, wire)
    with glue(frame):
        start = placed_leaf(frame, twin)
        placed = _start(start)
        for step in program:
            try:
                _apply(placed, step)
            except UnsupportedOperationError:
                raise Refused from None
        if not plain:
            return []
        found = [
            f"value {n}: {real(frame, p)}, expected {t.detach()}"
            for n, (t, p) in enumerate(zip(plain, placed, strict=True))
            if not torch.equal(real(frame, p), t.detach())
        ]
        loss = _loss(placed, start)
    with glue(other):
        start = placed_leaf(other, twin)
        placed = _start(start)
        for step in program:
            _apply(placed, step)
        for p in placed:
            resolve(other, p)
        _loss(placed, start)
    if frame.calls != other.calls or wire.messages:
        found.append(f"rank 0 made {frame.calls}, rank 1 {other.calls}")
    try:
        _loss(plain, leaf).backward()
    except RuntimeError:
        return found  # a saved tensor was changed: plain torch has no gradient
    with glue(frame):
        frame.backward([loss], None)
    assert leaf.grad is not None
    if twin.grad is None or not torch.allclose(leaf.grad, twin.grad, rtol=1e-4, atol=1e-5):
        found.append(f"gradient: {twin.grad}, expected {leaf.grad}")
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(3))
def test_random_programs_end_as_in_plain_torch(block: int) -> None:
    num_refused = 0
    for seed in range(block * 30, block * 30 + 30):
        try:
            found = differences(seed)
        except Refused:
            num_refused += 1
            continue
        assert not found, f"seed {seed}: " + "\n".join(found)
    assert num_refused < 10
