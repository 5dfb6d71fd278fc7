"""The rule for glue on one frame: what runs where, what is kept of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from one_frame import KeptWire, glue, make_frame, placed_leaf, real
from shardwright.errors import PipelineError, UnsupportedOperationError
from shardwright.pipeline import glue as glue_module
from shardwright.pipeline import glue_rules
from shardwright.pipeline.operands import Keyed
from shardwright.pipeline.placed import PlacedTensor


def test_ordinary_tensors_run_everywhere_and_leave_no_call() -> None:
    frame = make_frame()
    with glue(frame):
        assert type(torch.ones(2) + 1) is Tensor
    assert frame.calls == []


def test_spec_questions_cost_no_call() -> None:
    frame = make_frame(rank=1)
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2, 3))
        assert (h.shape, h.size(1), h.dim(), len(h), h.dtype, h.device.type) == ((2, 3), 3, 2, 2, torch.float32, "cpu")
        assert (h.numel(), h.is_contiguous(), h.stride(), h.requires_grad) == (6, True, (3, 1), False)
        assert isinstance(h, Tensor)
        assert {h: 1}[h] == 1
    assert frame.calls == []


def test_the_shape_of_another_tensor_costs_no_message() -> None:
    frame = make_frame(rank=1)
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2, 3, dtype=torch.float64))
        x = torch.ones(6)
        assert type(x.view_as(h)) is Tensor
        assert type(torch.ones(3).expand_as(h)) is Tensor
        assert x.type_as(h).dtype == x.to(h).dtype == torch.float64
    assert frame.calls == []


def test_results_are_the_same_object_where_torch_hands_it_back() -> None:
    frame = make_frame()
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2))
        assert h.contiguous() is h
        assert h.to(torch.float32) is h
        assert h.cpu() is h
        assert h.mul_(2) is h


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ((1,), (1,), True),
        ((1,), (1.0,), False),
        ((1,), (True,), False),
        ((1,), (2,), False),
        ((slice(0, 1),), (slice(0, 2),), False),
        (([1, 2],), ((1, 2),), False),
        ((torch.float32,), (torch.float64,), False),
        ((torch.ones(2),), (torch.zeros(2),), True),
        ((torch.ones(2),), (torch.ones(3),), False),
        ((torch.ones(2),), (torch.ones(2, requires_grad=True),), False),
        (({"a": 1},), ({"b": 1},), False),
        ((None,), (0,), False),
    ],
)
def test_keys_tell_constants_apart(first: Any, second: Any, equal: bool) -> None:
    assert (Keyed(first).key == Keyed(second).key) is equal


def test_what_holds_unseen_state_is_not_cached() -> None:
    factor = 2
    assert not Keyed((lambda t: t * factor,)).cacheable
    assert not Keyed((torch.Generator(),)).cacheable
    assert not Keyed((torch.eye(2).to_sparse(),)).cacheable


def test_numbers_of_arithmetic_share_one_outcome() -> None:
    frame = make_frame()
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2))
        for step in range(50):
            h * (0.1 * step) + step
            h.masked_fill(torch.tensor([True, False]), float("nan"))
    assert len(frame.runtime.glue_cache) == 3


def test_the_cache_of_outcomes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue_module, "_MOST_CACHED", 10)
    frame = make_frame()
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2))
        for step in range(1, 50):
            h.repeat(step)
    assert len(frame.runtime.glue_cache) <= 10


def test_state_of_the_thread_is_part_of_the_key() -> None:
    frame = make_frame()
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2, 2, requires_grad=True))
        assert (h @ h).requires_grad
        with torch.no_grad():
            assert not (h @ h).requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (h @ h).dtype == torch.bfloat16
        assert (h.long() / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (h.long() / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_shapes_that_depend_on_ordinary_values_are_never_stale() -> None:
    frame = make_frame()
    with glue(frame):
        h = placed_leaf(frame, torch.arange(12.0).view(2, 6))
        for n in (1, 4):
            t = torch.tensor(n)
            assert h[:, :t].shape == (2, n)
            assert h.narrow(1, 0, t).shape == (2, n)
            assert h.new_zeros(t).shape == (n,)
            assert h.repeat_interleave(torch.full((2,), n), 0).shape == (2 * n, 6)
            assert h[h.new_ones(2, 6) > n].shape == (0,)
            assert h[torch.arange(6).expand(2, 6) < n].shape == (2 * n,)


def test_values_that_python_sees_are_told() -> None:
    wire = KeptWire()
    for rank in (0, 1):
        frame = make_frame(rank, wire)
        with glue(frame):
            h = placed_leaf(frame, torch.arange(3.0))
            assert h.sum().item() == 3
            assert bool(h[1] > 0)
            assert h.tolist() == [0, 1, 2]
            assert f"{h[2]:.1f}" == "2.0"
            assert repr(h) == "tensor([0., 1., 2.])"
            assert [int(v) for v in h] == [0, 1, 2]
            assert h[h > 0].shape == (2,)
            assert h.numpy().sum() == 3
    assert wire.messages == []


def test_an_op_that_writes_to_an_ordinary_tensor_is_refused() -> None:
    frame = make_frame()

    class Sneaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1)
            return x + y

    with glue(frame):
        h = placed_leaf(frame, torch.ones(2))
        with pytest.raises(UnsupportedOperationError, match=r"Sneaky.apply.*ordinary tensor"):
            Sneaky.apply(h, torch.ones(2))
        with pytest.raises(UnsupportedOperationError, match=r"Sneaky.apply.*operand"):
            Sneaky.apply(torch.ones(2), h)


def test_outside_a_step_a_placed_tensor_says_what_to_do() -> None:
    h = placed_leaf(make_frame(), torch.ones(2))
    with pytest.raises(PipelineError, match="outside the step function"):
        h + 1


def test_every_named_rule_names_something_that_exists() -> None:
    known = {glue_rules.name_of(f) for f in torch.overrides.get_testing_overrides()}
    for table in (glue_rules.METADATA_IN_PLACE, glue_rules.MOVES, glue_rules.INDEXING, glue_rules.DETACHING):
        assert table <= known, table - known


def test_functional_dropout_draws_alike_whoever_holds_the_value() -> None:
    masks = []
    for size in (1, 2):
        frame = make_frame(size=size)
        torch.manual_seed(size)
        with glue(frame):
            h = placed_leaf(frame, torch.ones(100))
            masks.append(real(frame, F.dropout(h, 0.5)))
            before = torch.get_rng_state()
            torch.rand_like(h)
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(masks[0], masks[1])
    assert 20 < int((masks[0] == 0).sum()) < 80


def test_a_converted_tensor_is_poison_for_what_does_not_see_it() -> None:
    frame = make_frame()
    with glue(frame):
        h = placed_leaf(frame, torch.ones(2))
        total = torch.zeros(2)
        total += h
        assert type(total) is PlacedTensor
        assert torch.equal(real(frame, total), torch.ones(2))
    with torch._C.DisableTorchFunction():
        assert torch.Tensor.isnan(total).all()
