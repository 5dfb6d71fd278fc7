"""What a wrap says about replaced modules, and how whole state dicts are translated."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import shardwright.torch as smp
from shardwright.engine import substitution
from shardwright.partition.manual import assigned_stage
from shardwright.tensor_parallel import registry
from shardwright.tensor_parallel.substitute import Replaced
from tp_modules import Dense, FakeLinear, Net


class Upper:
    """A renaming: names in capitals when distributed."""

    def to_distributed(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.upper(): state.pop(name) for name in list(state)}

    def to_huggingface(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.lower(): state.pop(name) for name in list(state)}


def test_table_joins_modules_of_one_kind() -> None:
    done = [
        *(Replaced(f"h.{i}", "GPT2Block", "DistributedTransformerLayer", "gpt2") for i in range(12)),
        Replaced("head", "Linear", "DistributedLinear", fresh="no names"),
    ]
    lines = substitution.table(done).splitlines()
    assert lines[0].split() == ["module", "class", "distributed", "as", "weights"]
    assert lines[2].split() == ["h.0-11", "GPT2Block", "DistributedTransformerLayer", "carried", "over"]
    assert lines[3].endswith("fresh: no names")


def test_translations_rename_below_each_replaced_module() -> None:
    upper = Upper()
    done = [
        Replaced("a.0", "X", "Y", "f", renaming=upper),
        Replaced("a.1", "X", "Y", "f", renaming=upper),
        Replaced("b", "X", "Y", "f"),
    ]
    ((to_plain, to_distributed),) = substitution.translations(done)
    content = {"a.0.w": 1, "a.1.w": 2, "b.w": 3, "a.10.w": 4, "_smp_is_partial": False}
    found = to_distributed(content)
    assert found == {"a.0.W": 1, "a.1.W": 2, "b.w": 3, "a.10.w": 4, "_smp_is_partial": False}
    assert to_plain(found) == content
    assert len(content) == 5


@pytest.mark.usefixtures("world_of_one")
def test_a_wrap_with_degree_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    smp.tp_register_with_module(Dense, FakeLinear)
    net = Net()
    smp.set_tensor_parallelism(net)
    smp.set_partition(net.head, 0)
    smp.dynamic_shapes(net.head)
    model = smp.DistributedModel(net)
    assert [type(m) for m in model.distributed_modules()] == [FakeLinear] * 3
    assert assigned_stage(net.head) == 0
    assert "_shardwright_dynamic_shapes" in vars(net.head)
    assert not any(model.is_distributed_parameter(p) for p in model.parameters())
    assert all(smp.utils.get_distribution_axis(p) is None for p in model.parameters())
    scaled = {name for name, _ in model.scaled_batch_reducer_named_parameters()}
    assert scaled == {name for name, _ in model.local_named_parameters() if not name.startswith("norm")}
    assert smp.state.module_manager.translate_functions == []


@pytest.mark.usefixtures("world_of_one")
def test_nothing_marked_nothing_replaced() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    model = smp.DistributedModel(net)
    assert list(model.distributed_modules()) == []
    assert type(net[0]) is nn.Linear
