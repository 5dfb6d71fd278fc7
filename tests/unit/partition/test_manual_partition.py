"""Stages by hand: contexts, set_partition, defaults, and the errors."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from partition_models import LM, Block
from torch import nn

from shardwright.errors import PartitionError
from shardwright.partition.manual import assign_by_hand, assigned_stage, partition, set_partition
from shardwright.partition.plan import PartitionPlan
from shardwright.topology import context


def test_innermost_context_wins_and_the_rest_goes_to_the_default() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with partition(1):
                self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
                with partition(2):
                    self.b = nn.Linear(2, 2)
                self.c = nn.Linear(2, 2)
            self.d = nn.Linear(2, 2)

    stage_of = assign_by_hand(Model(), 4, 3)
    assert stage_of == {"": 0, "a": 1, "a.0": 1, "a.1": 1, "b": 2, "c": 1, "d": 3}


def test_ff06_module_without_assignment_goes_to_the_default() -> None:
    model = LM(2)
    set_partition(model.layers[0], 0)
    set_partition(model.layers[1], 1)
    stage_of = assign_by_hand(model, 2, 1)
    assert {stage_of[name] for name in ("embed", "norm", "head")} == {1}
    assert stage_of["layers.0.mlp.2"] == 0
    assert list(stage_of) == [name for name, _ in model.named_modules()]


def test_set_partition_reaches_descendants_without_their_own() -> None:
    model = LM(2)
    set_partition(model.layers, 1)
    set_partition(model.layers[1].mlp, 2)
    stage_of = assign_by_hand(model, 3, 0)
    assert stage_of["layers.0.attn"] == stage_of["layers.1.attn"] == 1
    assert stage_of["layers.1.mlp.0"] == stage_of["layers.1.mlp"] == 2
    set_partition(model, 2)  # later and further up: what has its own keeps it
    assert assign_by_hand(model, 3, 0)["layers.0.attn"] == 1
    assert assign_by_hand(model, 3, 0)["head"] == 2


def test_set_partition_beats_the_context_of_that_module_only() -> None:
    with partition(1):
        block = Block(4)
    set_partition(block, 0)
    stage_of = assign_by_hand(nn.ModuleList([block]), 2, 0)
    assert (stage_of["0"], stage_of["0.mlp"]) == (0, 1)
    assert (assigned_stage(block), assigned_stage(block.mlp), assigned_stage(nn.ReLU())) == (0, 1, None)


def test_contents_made_outside_do_not_follow_a_container_made_inside() -> None:
    outside = nn.Linear(2, 2)
    with partition(1):
        holder = nn.Sequential(outside, nn.Linear(2, 2))
    assert assign_by_hand(nn.ModuleList([holder]), 2, 0) == {"": 0, "0": 1, "0.0": 0, "0.1": 1}


def test_copies_made_inside_count_as_created_inside() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    with partition(1):
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        again = pickle.loads(pickle.dumps(layer))
    assert set(assign_by_hand(encoder, 2, 0).values()) == {1}
    assert assigned_stage(again) == 1
    assert assigned_stage(copy.deepcopy(encoder).layers[0]) == 1


def test_module_without_parameters_follows_its_parent() -> None:
    with partition(1):
        inside = nn.Sequential(nn.Linear(2, 2))
    inside.append(nn.ReLU())
    assert assign_by_hand(nn.ModuleList([inside]), 2, 0)["0.1"] == 1


def test_root_with_parameters_goes_where_the_rest_goes() -> None:
    assert assign_by_hand(nn.Linear(2, 2), 2, 1) == {"": 1}
    assert assign_by_hand(nn.Sequential(nn.Linear(2, 2)), 2, 1) == {"": 0, "0": 1}


def test_contexts_are_left_after_an_error_and_belong_to_their_thread() -> None:
    with pytest.raises(RuntimeError), partition(1):
        raise RuntimeError
    made: list[nn.Module] = []
    with partition(1):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert assigned_stage(nn.Linear(1, 1)) is None
    assert assigned_stage(made[0]) is None


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None])
def test_what_is_no_stage_is_refused_at_once(value: Any) -> None:
    with pytest.raises(PartitionError, match=f"{value!r}".replace(".", r"\.") + ", expected"):
        with partition(value):
            pass
    with pytest.raises(PartitionError, match=r"set_partition\(Linear, \.\.\.\)"):
        set_partition(nn.Linear(1, 1), value)


def test_set_partition_takes_modules() -> None:
    with pytest.raises(TypeError, match="not str"):
        set_partition("h.0", 0)  # type: ignore[arg-type]


def test_too_large_a_stage_is_named_with_its_module() -> None:
    model = LM(1)
    set_partition(model.norm, 2)
    with pytest.raises(
        PartitionError, match=r"'norm' \(LayerNorm\) is assigned to partition 2, expected 0 to 1"
    ):
        assign_by_hand(model, 2, 0)


def test_known_degree_refuses_at_once_only_if_assignments_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(auto_partition=False, pipeline_parallel_degree=2)
    monkeypatch.setattr(context, "is_initialized", lambda: True)
    monkeypatch.setattr(context, "world", lambda: SimpleNamespace(config=config))
    with pytest.raises(PartitionError, match="partition is 2, expected 0 to 1"):
        set_partition(nn.Linear(1, 1), 2)
    config.auto_partition = True
    set_partition(nn.Linear(1, 1), 2)


class Solid(nn.Sequential):
    """Its class says that its forward must run on one stage."""

    indivisible = True


def test_what_is_below_an_indivisible_module_follows_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("shardwright"), "propagate", True)
    model = nn.Sequential(nn.Linear(2, 2), Solid(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    set_partition(model[1], 1)
    set_partition(model[1][1], 2)
    set_partition(model[1][0], 1)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        stage_of = assign_by_hand(model, 3, 0)
    assert stage_of == {"": 0, "0": 0, "1": 1, "1.0": 1, "1.1": 1, "1.1.0": 1}
    lines = {record.getMessage() for record in caplog.records}
    assert lines == {"module '1.1' stays on partition 1: it is part of '1', which can't be divided"}


def test_a_plan_that_cuts_an_indivisible_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Solid(nn.Linear(2, 2)))
    plan = PartitionPlan(2, {"": 0, "0": 0, "1": 1, "1.0": 0}, (), "manual", "none")
    with pytest.raises(PartitionError, match="'1', which can't be divided, is on stage 1"):
        plan.check(model)
