"""Plans: made by config, explained, saved, loaded, checked."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from partition_models import LM, Hostile, bert, gpt2, ids, lm, t5, vit
from torch import nn

from shardwright.config.schema import Config
from shardwright.errors import PartitionError
from shardwright.partition import PartitionPlan, make_plan, set_partition
from shardwright.partition.picture import draw_svg
from shardwright.partition.plan import compress_names


def plan_for(case: tuple[nn.Module, dict[str, object]], pp: int, **settings: object) -> PartitionPlan:
    model, inputs = case
    config = Config(pipeline_parallel_degree=pp, microbatches=8, **settings)  # type: ignore[arg-type]
    return make_plan(model, (), inputs, config=config, pp=pp)


def test_every_parameter_is_on_one_stage() -> None:
    model, inputs = gpt2()
    plan = plan_for((model, inputs), 3)
    assert sum(stage.num_parameters for stage in plan.stages) == sum(p.numel() for p in model.parameters())
    assert sum(stage.parameter_bytes for stage in plan.stages) == 4 * sum(
        p.numel() for p in model.parameters()
    )
    assert (plan.num_stages, plan.origin, plan.how, plan.note) == (3, "auto", "fake", "")
    assert all(stage.flops > 0 for stage in plan.stages)
    plan.check(model)


def test_same_model_same_plan() -> None:
    assert plan_for(t5(), 3) == plan_for(t5(), 3)


def test_json_round_trip() -> None:
    for plan in (plan_for(bert(), 2), plan_for(t5(), 3, tied_weights="replicate")):
        assert PartitionPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', "null", '{"version": 1, "stages": 3}'])
def test_broken_json_is_named(text: str) -> None:
    with pytest.raises(PartitionError, match="not a partition in JSON"):
        PartitionPlan.from_json(text)


def test_json_of_a_later_version_is_refused() -> None:
    data = json.loads(plan_for(lm(2), 2).to_json())
    data["version"] = 99
    with pytest.raises(PartitionError, match="version 99"):
        PartitionPlan.from_json(json.dumps(data))


def test_check_names_what_differs() -> None:
    plan = plan_for(lm(3), 2)
    plan.check(LM(3))
    with pytest.raises(PartitionError, match=r"another model: \d+ modules lack a stage \(layers\.3"):
        plan.check(LM(4))
    with pytest.raises(PartitionError, match=r"don't exist \(layers\.2"):
        plan.check(LM(2))
    tied = LM(3, tied=True)
    with pytest.raises(PartitionError, match=r"'embed\.weight' is shared"):
        plan.check(tied)


def test_replicated_ties_name_owner_and_copies() -> None:
    model, inputs = t5()
    plan = plan_for((model, inputs), 3, tied_weights="replicate")
    (tied,) = plan.replicas
    assert tied.name == "shared.weight"
    assert set(tied.holders) == {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}
    assert tied.owner == plan.stage_of["shared"]
    assert {tied.owner, *tied.copies} == {plan.stage_of[name] for name in tied.holders}
    assert "tied: shared.weight owned by stage 0" in plan.explain()
    held = sum(stage.num_parameters for stage in plan.stages)
    assert held == sum(p.numel() for p in model.parameters()) + len(tied.copies) * model.shared.weight.numel()
    plan.check(model)
    assert plan_for((model, inputs), 3).replicas == ()


def test_ff07_ties_torn_by_hand_are_an_error_unless_replicated() -> None:
    model, inputs = lm(2, tied=True)
    set_partition(model.head, 1)
    message = (
        r"'embed\.weight' is shared by modules on different stages: 'embed' on stage 0, 'head' on stage 1"
    )
    with pytest.raises(PartitionError, match=message):
        plan_for((model, inputs), 2, auto_partition=False)
    plan = plan_for((model, inputs), 2, auto_partition=False, tied_weights="replicate")
    assert (plan.replicas[0].owner, plan.replicas[0].copies) == (0, (1,))
    assert plan.stage_of["head"] == 1


def test_stages_by_hand_are_obeyed_measured_and_ignored_in_auto_mode() -> None:
    model, inputs = lm(4)
    set_partition(model.layers[0], 1)
    plan = plan_for((model, inputs), 2, auto_partition=False, default_partition=0)
    assert {name for name, stage in plan.stage_of.items() if stage == 1 and name.count(".") == 1} == {
        "layers.0"
    }
    assert (plan.origin, plan.how) == ("manual", "fake")
    assert plan.imbalance > 1.3
    assert plan_for((model, inputs), 2).stage_of["layers.0"] == 0


def test_skip_tracing_uses_order_and_sizes() -> None:
    plan = plan_for(lm(8), 2, skip_tracing=True)
    assert plan.how == "none"
    assert "module order and parameter sizes" in plan.explain()
    assert set(plan.stage_of.values()) == {0, 1}


def test_one_stage_is_not_traced() -> None:
    plan = plan_for(lm(2), 1)
    assert set(plan.stage_of.values()) == {0}
    assert plan.bubble(8) == 0


def test_untraceable_model_warns_and_still_gets_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        plan = plan_for((LM(4), {"tokens": "nonsense"}), 2)
    assert plan.how == "none"
    assert "could not be traced" in caplog.text
    assert set(plan.stage_of.values()) == {0, 1}


def test_fallback_to_a_real_forward_is_said() -> None:
    class Branches(LM):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) if tokens.sum().item() >= 0 else tokens

    plan = plan_for((Branches(4), {"tokens": ids(32)}), 2)
    assert plan.how == "real"
    assert "a forward on real tensors (fake: DataDependentOutputException" in plan.explain()


def test_explain_is_a_table_a_person_can_read() -> None:
    text = plan_for(gpt2(n_layer=8), 2).explain(8)
    assert "transformer.h.0-" in text
    assert "lm_head" in text
    assert "bubble 11.1%" in text
    assert "100.0%" not in text
    assert "(nothing)" in plan_for((nn.Sequential(nn.Linear(2, 2)), {"input": torch.ones(1, 2)}), 2).explain()
    split = plan_for(bert(), 3).explain()
    assert "cls.predictions*" in split
    assert "* split over stages" in split


def test_bubble_imbalance_and_efficiency() -> None:
    plan = plan_for(vit(), 4)
    assert plan.bubble(8) == pytest.approx(3 / 11)
    assert plan.efficiency(8) < plan.efficiency(64) < 1
    alike = replace(plan, stages=(plan.stages[0],) * 4)
    assert alike.efficiency(8) == pytest.approx(8 / 11)
    falling = zip(alike.stages, (6.0, 5.0, 4.0, 3.0), strict=True)
    front_heavy = replace(plan, stages=tuple(replace(stage, work=work) for stage, work in falling))
    assert front_heavy.efficiency(8) == pytest.approx(8 * 18 / (4 * 8 * 6))  # the first stage never waits
    assert replace(front_heavy, stages=front_heavy.stages[::-1]).efficiency(8) == pytest.approx(
        8 * 18 / (4 * (3 + 4 + 5 + 8 * 6))
    )


def test_split_modules_are_those_with_parts_elsewhere() -> None:
    plan = plan_for(gpt2(n_layer=8), 2)
    assert plan.split_modules() == ("", "transformer", "transformer.h")


def test_names_of_numbered_siblings_are_joined() -> None:
    assert compress_names(["e", "h.0", "h.1", "h.2", "h.4", "n", "0", "1"]) == [
        "e",
        "h.0-2",
        "h.4",
        "n",
        "0-1",
    ]
    assert compress_names(["a.1.x", "a.2.x"]) == ["a.1.x", "a.2.x"]


def test_picture_is_well_formed_and_names_every_stage() -> None:
    plan = plan_for(bert(), 4)
    root = ElementTree.fromstring(draw_svg(plan, title="a <model> & more", microbatches=8))
    text = " ".join(node.text or "" for node in root.iter() if node.tag.endswith("text"))
    for stage in range(4):
        assert f"stage {stage}" in text
    assert "a <model> & more" in text


def test_hostile_model_is_left_alone() -> None:
    model = Hostile()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan_for((model, {"x": torch.ones(4, 4)}), 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.history == []
