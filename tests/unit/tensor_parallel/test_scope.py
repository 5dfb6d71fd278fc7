"""Marks: contexts, `set_tensor_parallelism`, and which of them holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardwright.torch as smp
from shardwright.tensor_parallel import scope
from shardwright.tensor_parallel.scope import UNMARKED, initialisation_is_blank, own_mark
from tp_modules import Dense, Net


@pytest.fixture
def alone() -> Iterator[None]:
    smp.init({})
    yield
    smp.shutdown()


def marks(root: nn.Module) -> dict[str, bool]:
    found = {"": UNMARKED}
    for name, module in root.named_modules():
        found[name] = own_mark(module, found[name.rpartition(".")[0]] if name else UNMARKED)
    return {name: mark.enabled for name, mark in found.items()}


def test_what_is_built_inside_is_marked_and_the_innermost_context_wins() -> None:
    with smp.tensor_parallelism(power=3):
        a = Dense(2)
        with smp.tensor_parallelism(enabled=False):
            b = Dense(2)
        c = copy.deepcopy(b)
    d = Dense(2)
    assert [own_mark(m, UNMARKED).enabled for m in (a, b, c, d)] == [True, False, True, False]
    assert own_mark(a, UNMARKED).options == {"power": 3}
    assert own_mark(copy.deepcopy(a), UNMARKED).options == {"power": 3}


def test_a_context_ends_when_its_body_raises() -> None:
    with pytest.raises(KeyError), smp.tensor_parallelism():
        raise KeyError
    assert not own_mark(Dense(2), UNMARKED).enabled


def test_marks_cover_what_is_below_when_the_model_is_wrapped() -> None:
    net = Net()
    smp.set_tensor_parallelism(net)
    net.head = Dense(6, 9)  # as resize_token_embeddings does
    assert all(marks(net).values())


def test_a_script_mark_beats_the_creation_marks_below_and_a_nearer_script_mark_beats_it() -> None:
    with smp.tensor_parallelism(power=1):
        net = Net()
    smp.set_tensor_parallelism(net, False)
    assert not any(marks(net).values())
    smp.set_tensor_parallelism(net.layers, True, power=2)
    found = marks(net)
    assert found["layers.0"]
    assert not found["head"]
    smp.set_tensor_parallelism(net, True)
    smp.set_tensor_parallelism(net.head, False)
    found = marks(net)
    assert found[""]
    assert found["layers.1"]
    assert not found["head"]


def test_set_tensor_parallelism_wants_a_module() -> None:
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not int"):
        smp.set_tensor_parallelism(3)  # type: ignore[arg-type]


def test_model_creation_sets_marks_and_default_dtype() -> None:
    before = torch.get_default_dtype()
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64, distribute_embedding=True):
        inside = nn.Linear(2, 2)
        with smp.model_creation(dtype=torch.float16):
            off = nn.Linear(2, 2)
    assert torch.get_default_dtype() == before
    assert inside.weight.dtype == torch.float64
    assert off.weight.dtype == torch.float16
    assert own_mark(inside, UNMARKED).options == {"distribute_embedding": True}
    assert not own_mark(off, UNMARKED).enabled
    with smp.model_creation(use_alibi=True):
        assert own_mark(nn.Linear(1, 1), UNMARKED).options == {}
    with pytest.raises(KeyError), smp.model_creation(dtype=torch.float64):
        raise KeyError
    assert torch.get_default_dtype() == before


@pytest.mark.parametrize("delayed", [True, False])
def test_model_creation_delays_parameters_if_asked_to(delayed: bool) -> None:
    smp.init({"delayed_parameter_initialization": delayed})
    try:
        with smp.model_creation(dtype=torch.float64):
            layer = nn.Linear(2, 2)
        assert layer.weight.is_meta == delayed
        assert layer.weight.dtype == torch.float64
        wrapped = smp.DistributedModel(layer)
        assert not wrapped.get_module().weight.is_meta
    finally:
        smp.shutdown()


def test_model_creation_after_init(alone: None) -> None:
    with smp.model_creation(tensor_parallelism=True, zero_init=True):
        assert own_mark(Dense(2), UNMARKED).enabled


def test_switched_off_initialisation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.modeling_utils")
    assert not initialisation_is_blank()
    original = modeling.PreTrainedModel.init_weights
    monkeypatch.setattr(modeling.PreTrainedModel, "init_weights", lambda self: original(self))
    assert not initialisation_is_blank()
    monkeypatch.setattr(modeling.PreTrainedModel, "init_weights", lambda self: None)
    assert initialisation_is_blank()
    with smp.tensor_parallelism():
        assert own_mark(Dense(2), UNMARKED).blank
    assert not own_mark(Dense(2), UNMARKED).blank


def test_nothing_is_left_on_modules_outside_of_contexts() -> None:
    assert not any(key.startswith("_shardwright_tp") for key in vars(Dense(2)))
    assert not scope._contexts.marks
