"""Models cut by the plan that they carry: what is read, what is replaced, what is refused, in a world of one."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_models
import plan_models
import shardwright.torch as smp
from shardwright.errors import ConfigError
from shardwright.integrations.huggingface import plan as reader
from shardwright.tensor_parallel import plan
from shardwright.tensor_parallel.nn.planned import ColumnLinear, RowLinear, SummedGradients
from shardwright.tensor_parallel.registry import NotReplaced

pytestmark = pytest.mark.usefixtures("world_of_one")

SERVED = [case for case in plan_models.CASES if case not in ("cohere_norms", "olmoe")]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `resolve` would see on two tp ranks with the same samples."""
    from shardwright.tensor_parallel import module

    for place in (plan, module):
        monkeypatch.setattr(place, "tp_size", lambda: 2)
    monkeypatch.setattr(plan, "prescaled_batch", lambda: True)
    return


def resolved(model: nn.Module) -> plan.Resolved:
    found = reader.find(model)
    assert found is not None
    return plan.resolve(model, found, {})


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**plan_models.batch_of(0)).logits
    return found


@pytest.mark.parametrize("case", SERVED)
def test_wrapped_models_compute_what_they_did(case: str) -> None:
    plan_models.skip_unless_served(case)
    model = plan_models.make(case)
    want, names = logits(model), set(model.state_dict())
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model)
    root = wrapped.get_module()
    assert root is model
    classes = [type(module) for module in wrapped.distributed_modules()]
    assert ColumnLinear in classes
    assert RowLinear in classes
    assert not any(type(module) is nn.Linear for name, module in root.named_modules() if name != "lm_head")
    assert set(wrapped.state_dict()) == names
    torch.testing.assert_close(logits(wrapped), want, rtol=1e-5, atol=1e-5)


def test_all_that_stays_whole_acts_on_the_scaled_batch() -> None:
    plan_models.skip_unless_served("exaone4")
    model = plan_models.make("exaone4")
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model)
    assert [name for name, _ in wrapped.default_reducer_named_parameters()] == []
    norms = [module for module in model.modules() if isinstance(module, SummedGradients)]
    assert len(norms) == 4
    assert type(norms[0]).__name__ == "Exaone4RMSNorm"


def test_summing_modules_are_copied_and_pickled() -> None:
    plan_models.skip_unless_served("exaone4")
    model = plan_models.make("exaone4")
    smp.set_tensor_parallelism(model)
    norm = smp.DistributedModel(model).get_module().model.layers[0].self_attn.q_norm
    x = torch.randn(2, 8)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert isinstance(other, SummedGradients)
        assert torch.equal(other(x), norm(x))
    assert set(norm.state_dict()) == {"weight"}
    assert "weight" not in vars(norm)


def test_tied_tables_and_heads_are_cut_together() -> None:
    assert resolved(plan_models.make("cohere")).ties == [("model.embed_tokens", "lm_head")]
    gemma = resolved(plan_models.make("gemma"))
    if gemma.ties:  # before transformers 5 the table is a plain embedding
        return
    assert gemma.kept == {"lm_head": "its weight is shared with 'model.embed_tokens'"}
    assert "lm_head" not in gemma.recipes
    assert "model.embed_tokens" not in gemma.recipes


def test_weights_shared_with_the_outside_stay_whole() -> None:
    model = plan_models.make("cohere").model
    found = plan.resolve(model, reader.find(model) or {}, {id(model.embed_tokens.weight): "head"})
    assert "embed_tokens" not in found.recipes
    assert "layers.0.mlp.up_proj" in found.recipes


def test_frozen_weights_stay_frozen() -> None:
    model = plan_models.make("olmo")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    smp.set_tensor_parallelism(model)
    smp.DistributedModel(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.layers.0.mlp.up_proj.weight"]


def test_both_spellings_of_styles_are_read() -> None:
    model = plan_models.make("olmo")
    new = reader.find(model)
    model._tp_plan = {
        name: {"colwise_gather_output": "colwise_rep"}.get(style, style) for name, style in model._tp_plan.items()
    }
    assert reader.find(model) == new
    assert new is not None
    assert new["lm_head"] == "column_whole"
    assert new["model.layers.1.mlp.down_proj"] == "row"


def test_models_without_a_plan_and_families_keep_their_ways() -> None:
    assert reader.find(nn.Linear(2, 2)) is None
    model = hf_models.make("llama_classifier")
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model)
    assert isinstance(wrapped.get_module().model, smp.nn.DistributedTransformerLMHead)


def test_a_module_switched_off_refuses_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = plan_models.make("olmo")
    smp.set_tensor_parallelism(model)
    smp.set_tensor_parallelism(model.model.layers[0], False)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        smp.DistributedModel(model)
    assert "the script switched off 'model.layers.0' inside it" in caplog.text
    assert not any(isinstance(module, ColumnLinear) for module in model.modules())


@pytest.mark.usefixtures("two_ranks")
def test_degrees_that_dont_divide_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"q_proj' has 3 heads.*\(2\)"):
        resolved(plan_models.make("olmo", num_attention_heads=3, num_key_value_heads=3, hidden_size=24))
    with pytest.raises(ConfigError, match=r"k_proj' has 1 heads.*\(2\)"):
        resolved(plan_models.make("olmo", num_key_value_heads=1))
    resolved(plan_models.make("olmo"))


def test_samples_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "tp_size", lambda: 2)
    with pytest.raises(NotReplaced, match="'prescaled_batch' to be True, but it is False: set it"):
        resolved(plan_models.make("olmo"))


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("cohere_norms", {}, "how 'model.layers.0.self_attn.q_norm.weight' acts on split features"),
        ("phi", {"qk_layernorm": True}, "how 'model.layers.0.self_attn.q_layernorm.weight' acts"),
        ("starcoder2", {"residual_dropout": 0.1}, "'residual_dropout' of 'model.layers.0.self_attn' is 0.1"),
    ],
)
def test_what_cant_be_served_is_named(case: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotReplaced, match=reason):
        resolved(plan_models.make(case, **changes))


def test_unknown_styles_are_named() -> None:
    model = plan_models.make("olmo")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.act_fn": "sequence_parallel"}
    with pytest.raises(NotImplementedError, match=r"'sequence_parallel' .* 'model.layers.0.mlp.act_fn'"):
        reader.find(model)
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.act_fn": "replicate", "model.norm": "rowwise"}
    with pytest.raises(NotReplaced, match="'model.norm', a OlmoLayerNorm, as 'row'"):
        resolved(model)


def test_a_column_without_a_row_is_refused() -> None:
    model = plan_models.make("olmo")
    cuts = {path: cut for path, cut in (reader.find(model) or {}).items() if not path.endswith("1.mlp.down_proj")}
    with pytest.raises(NotReplaced, match=r"in 'model.layers.1.mlp' without a row linear"):
        plan.resolve(model, cuts, {})
