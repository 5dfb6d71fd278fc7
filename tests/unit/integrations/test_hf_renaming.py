"""Weights of every family travel to the names of our modules and back without losing a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import hf_models
from shardwright.errors import UsageError
from shardwright.integrations.huggingface import families, gpt2, gptneox, mixtral, vit
from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.llama import lm_table
from shardwright.integrations.huggingface.renaming import Fused, Mask, Renaming, Stacked, Tie, conv1d, same


def replaceable(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """Every module in a model that has an adapter."""
    for name, module in model.named_modules():
        adapter = families.find(module)
        if adapter is not None:
            yield name, module, adapter


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("case", hf_models.CASES)
@pytest.mark.parametrize("copy", [True, False])
def test_round_trip_is_bitwise(case: str, copy: bool) -> None:
    model = hf_models.make(case)
    seen = 0
    for _, module, adapter in replaceable(model):
        table = adapter.renaming(module)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        given = dict(module.state_dict())
        ours = table.to_distributed(given, copy=copy)
        assert given == {}
        kept = {name: value.clone() for name, value in ours.items()}
        assert_same(table.to_huggingface(ours, copy=copy), before)
        assert ours == {}
        assert_same(table.to_distributed(dict(before)), kept)
        seen += 1
    assert seen > 0


@pytest.mark.parametrize("case", hf_models.CASES)
def test_copies_share_no_memory_with_what_came_in(case: str) -> None:
    for _, module, adapter in replaceable(hf_models.make(case)):
        state = {name: value.clone() for name, value in module.state_dict().items()}
        ours = adapter.renaming(module).to_distributed(dict(state))
        assert all(value.is_contiguous() for value in ours.values())
        for value in ours.values():
            shared = [s for s in state.values() if s.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()]
            assert all(value.shape == s.shape and torch.equal(value, s) for s in shared)


def test_gpt2_parts_are_rows_of_the_transposed_matrix() -> None:
    block = hf_models.make("gpt2").transformer.h[0]
    ours = gpt2.LAYER_TABLE.to_distributed(dict(block.state_dict()))
    fused = block.attn.c_attn.weight
    assert torch.equal(ours["attention.query.weight"], fused[:, :32].t())
    assert torch.equal(ours["attention.key.weight"], fused[:, 32:64].t())
    assert torch.equal(ours["attention.value.bias"], block.attn.c_attn.bias[64:])


def test_neox_parts_are_taken_head_by_head() -> None:
    layer = hf_models.make("gptneox").gpt_neox.layers[0]
    ours = gptneox.layer_table(4).to_distributed(dict(layer.state_dict()))
    # [heads, part, head size, hidden]
    fused = layer.attention.query_key_value.weight.view(4, 3, 8, 32)
    for part, name in enumerate(("query", "key", "value")):
        expected = torch.cat([fused[head, part] for head in range(4)])
        assert torch.equal(ours[f"attention.{name}.weight"], expected)
    bias = layer.attention.query_key_value.bias.view(4, 3, 8)
    assert torch.equal(ours["attention.key.bias"], bias[:, 1].flatten())


def test_both_layouts_of_experts_give_the_same_weights() -> None:
    gate, up, down = (torch.randn(3, *shape) for shape in ((6, 4), (6, 4), (4, 6)))
    packed = {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down.clone()}
    single = {}
    for expert in range(3):
        for name, stack in (("w1", gate), ("w3", up), ("w2", down)):
            single[f"block_sparse_moe.experts.{expert}.{name}.weight"] = stack[expert].clone()
    written = {}
    for is_packed in (True, False):
        table = Renaming(mixtral.layer_rules(packed=is_packed))
        ours = [table.to_distributed(dict(packed)), table.to_distributed(dict(single))]
        assert_same(ours[0], ours[1])
        assert_same(ours[0], {"output.experts_gate": gate, "output.experts_up": up, "output.experts_down": down})
        written[is_packed] = table.to_huggingface(ours[0])
    assert_same(written[True], packed)
    assert_same(written[False], single)


def test_both_layouts_of_vit_give_the_same_weights() -> None:
    layer = next(m for m in hf_models.make("vit").modules() if type(m).__name__ == "ViTLayer")
    own = {name: value.clone() for name, value in layer.state_dict().items()}
    flat = vit.layer_table(flat=True).to_huggingface(vit.installed_table().to_distributed(own))
    ours = vit.layer_table(flat=True).to_distributed(dict(flat))
    nested = vit.layer_table(flat=False).to_huggingface(dict(ours))
    assert "attention.attention.query.weight" in nested
    assert "output.dense.bias" in nested
    again = vit.layer_table(flat=True).to_distributed(dict(nested))
    assert "mlp.fc1.bias" in flat
    assert_same(vit.layer_table(flat=True).to_huggingface(again), flat)


# ------------------------------------------------------------------ ties and masks

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def test_tied_weight_is_dropped_and_added() -> None:
    weight = torch.randn(5, 3)
    table = gpt2.lm_table(tied=True)
    assert table.to_distributed({WTE: weight, HEAD: weight}).keys() == {"word_embedding.weight"}
    assert table.to_distributed({WTE: weight}).keys() == {"word_embedding.weight"}
    back = table.to_huggingface({"word_embedding.weight": weight})
    assert back.keys() == {WTE, HEAD}
    assert back[WTE] is back[HEAD]


def test_tied_weight_of_a_part_that_holds_the_head_only() -> None:
    weight = torch.randn(5, 3)
    assert gpt2.lm_table(tied=True).to_distributed({HEAD: weight}).keys() == {"word_embedding.weight"}


def test_untied_weight_stays_even_if_equal() -> None:
    weight = torch.randn(5, 3)
    table = gpt2.lm_table(tied=False)
    ours = table.to_distributed({WTE: weight, HEAD: weight.clone()})
    assert ours.keys() == {"word_embedding.weight", "lm_head.weight"}
    assert table.to_huggingface({"word_embedding.weight": weight}).keys() == {WTE}


@pytest.mark.parametrize("equal", [True, False])
def test_unknown_tie_is_found_from_values(equal: bool) -> None:
    weight = torch.randn(5, 3)
    head = weight.clone() if equal else weight + 1
    table = lm_table((), tied=None)
    plain = {"model.embed_tokens.weight": weight, HEAD: head}
    ours = table.to_distributed(dict(plain))
    assert ("lm_head.weight" in ours) is not equal
    assert_same(table.to_huggingface(ours), plain)


def test_masks_of_old_versions_are_dropped_and_made() -> None:
    table = gpt2.lm_table(tied=True)
    state = {
        "transformer.h.1.ln_1.weight": torch.ones(3),
        "transformer.h.1.attn.bias": torch.ones(1, 1, 4, 4),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    ours = table.to_distributed(state)
    assert ours.keys() == {"transformer.seq_layers.1.attention.pre_layernorm.weight"}
    back = table.making_masks(5).to_huggingface(ours)
    assert torch.equal(back["transformer.h.1.attn.bias"], torch.ones(5, 5).tril().bool().view(1, 1, 5, 5))
    assert back["transformer.h.1.attn.masked_bias"] == -1e4
    assert table.to_huggingface(table.to_distributed(back)).keys() == {"transformer.h.1.ln_1.weight"}


# ------------------------------------------------------------------ rules and refusals


def test_names_of_no_rule_are_refused_or_passed() -> None:
    table = Renaming((same("a.weight", "b.weight"),))
    with pytest.raises(UsageError, match=r"weight 'c\.weight' has no place in this model family"):
        table.to_distributed({"c.weight": torch.ones(1)})
    passed = table.passing().to_distributed({"c.weight": torch.ones(1), "a.weight": torch.ones(2)})
    assert passed.keys() == {"c.weight", "b.weight"}


def test_incomplete_group_is_refused() -> None:
    state = {"attention.query.weight": torch.ones(2, 2), "attention.key.weight": torch.ones(2, 2)}
    with pytest.raises(UsageError, match=r"came without 'attention\.value\.weight'"):
        gpt2.LAYER_TABLE.to_huggingface(state)


def test_wrong_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="has 24 rows, which are not 3 parts of 5 heads"):
        gptneox.layer_table(5).to_distributed({"attention.query_key_value.bias": torch.ones(24)})


def test_stacks_keep_layers_apart_and_experts_in_order() -> None:
    table = Renaming((Stacked(("{layer}.e.{expert}.w",), ("{layer}.w",)),))
    state = {
        f"{layer}.e.{e}.w": torch.tensor([10.0 * layer + e]) for e in (10, 2, 0, *range(3, 10), 1) for layer in (1, 0)
    }
    before = dict(state)
    ours = table.to_distributed(state)
    assert torch.equal(ours["1.w"].flatten(), torch.arange(10.0, 21.0))
    assert torch.equal(ours["0.w"].flatten(), torch.arange(0.0, 11.0))
    assert_same(table.to_huggingface(ours), before)


def test_prefix_moves_rules_ties_and_masks() -> None:
    table = Renaming((same("w", "v"), *conv1d("c", "d")), (Tie("t", "w", "u", True),), (Mask("m", "w"),))
    moved = table.prefixed("in.", "out.")
    state = {"in.w": torch.ones(1), "in.t": torch.ones(1), "in.m": torch.ones(1), "in.c.weight": torch.ones(2, 3)}
    ours = moved.to_distributed(state)
    assert {name: tuple(value.shape) for name, value in ours.items()} == {"out.v": (1,), "out.d.weight": (3, 2)}
    assert moved.to_huggingface(ours).keys() == {"in.w", "in.t", "in.c.weight"}


def test_fused_along_another_dim() -> None:
    rule = Fused(("f",), ("a", "b"), dim=1)
    table = Renaming((rule,))
    fused = torch.arange(24.0).view(2, 4, 3)
    ours = table.to_distributed({"f": fused})
    assert torch.equal(ours["a"], fused[:, :2])
    assert torch.equal(ours["b"], fused[:, 2:])
    assert_same(table.to_huggingface(ours), {"f": fused})
