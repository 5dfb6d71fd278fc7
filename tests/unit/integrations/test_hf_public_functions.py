"""The functions of `smp.nn.huggingface`: every spelling, every form of `max_seq_len`, weights equal after both ways."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import hf_models
import shardwright.torch as smp
from shardwright.errors import UsageError
from shardwright.integrations.huggingface import translation

FAMILIES = ["gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta"]


def functions(family: str) -> tuple[Any, Any]:
    face = getattr(smp.nn.huggingface, family)
    return (
        getattr(face, f"translate_hf_state_dict_to_smdistributed_{family}"),
        getattr(face, f"translate_state_dict_to_hf_{family}"),
    )


def heads(family: str) -> dict[str, int]:
    return {"num_attention_heads": 4} if family == "gptneox" else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [(), (16,), {"max_seq_len": 16}])
def test_both_ways(family: str, length: Any) -> None:
    enter, leave = functions(family)
    model = hf_models.make(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = dict(model.state_dict())
    args, kwargs = ((), length) if isinstance(length, dict) else (length, {})
    ours = enter(given, *args, **kwargs, **heads(family))
    assert given == {}
    expected = "encoder.seq_layers.1.attention.query.weight" if family in ("bert", "roberta") else (
        "transformer.seq_layers.1.attention.query.weight"
    )  # fmt: skip
    assert any(name.endswith(expected) for name in ours)
    back = leave(ours, *args, **kwargs, **heads(family))
    assert ours == {}
    assert back.keys() == before.keys()
    assert all(torch.equal(back[name], before[name]) for name in before)
    model.load_state_dict(back, strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_spellings(family: str) -> None:
    face = getattr(smp.nn.huggingface, family)
    one = getattr(face, f"translate_hf_state_dict_to_smdistributed_{family}")
    assert getattr(face, f"translate_hf_{family}_state_dict_to_smdistributed") is one
    assert getattr(face, f"translate_hf_{family}_state_dict_to_smdistributed_{family}") is one
    if family == "gpt2":
        assert face.translate_hf_state_dict_to_smdistributed is one


@pytest.mark.parametrize("case", ["gpt2", "gptj", "gptneo", "gptneox"])
def test_bare_models_come_in(case: str) -> None:
    enter, _ = functions(case)
    bare = dict(hf_models.make(f"{case}_bare").state_dict())
    whole = dict(hf_models.make(case).state_dict())
    assert enter(bare, **heads(case)).keys() == {
        name for name in enter(whole, **heads(case)) if not name.startswith("lm_head.")
    }


def test_untied_head_survives_without_a_configuration() -> None:
    enter, leave = functions("gpt2")
    before = {name: value.clone() for name, value in hf_models.make("gpt2_untied").state_dict().items()}
    back = leave(enter(dict(before)))
    assert all(torch.equal(back[name], before[name]) for name in before)
    assert not torch.equal(back["lm_head.weight"], back["transformer.wte.weight"])


@pytest.mark.parametrize("alone", [True, False])
def test_blocks_only(alone: bool) -> None:
    face = smp.nn.huggingface.gpt2
    model = hf_models.make("gpt2")
    source = model.transformer.h[1] if alone else model
    before = {name: value.clone() for name, value in source.state_dict().items()}
    ours = face.translate_hf_block_state_dict_to_smdistributed(dict(before), 16)
    prefix = "" if alone else "transformer.h.1."
    assert f"{prefix}attention.query.weight" in ours
    assert f"{prefix}attn.c_attn.weight" not in ours
    assert alone or "transformer.wte.weight" in ours
    back = face.translate_layer_state_dict_to_hf_gpt2_block(ours, max_seq_len=16)
    assert back.keys() == before.keys()
    assert all(torch.equal(back[name], before[name]) for name in before)


def test_neox_needs_the_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, leave = functions("gptneox")
    adapter = importlib.import_module("shardwright.integrations.huggingface.adapter")
    monkeypatch.setattr(adapter, "_last_config", {})
    model = hf_models.make("gptneox")
    with pytest.raises(UsageError, match="number of attention heads"):
        enter(dict(model.state_dict()))
    families = importlib.import_module("shardwright.integrations.huggingface.families")
    families.find(model).arguments(model)
    back = leave(enter(dict(model.state_dict())))
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_masks_are_made_for_versions_that_had_them(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, leave = functions("gpt2")
    state = dict(hf_models.make("gpt2").state_dict())
    monkeypatch.setattr(translation.importlib.metadata, "version", lambda _: "4.29.2")
    back = leave(enter(dict(state)), 8)
    assert back["transformer.h.0.attn.bias"].shape == (1, 1, 8, 8)
    assert back["transformer.h.1.attn.masked_bias"] == -1e4
    by_rows = leave(enter(dict(state)))
    assert by_rows["transformer.h.0.attn.bias"].shape == (1, 1, hf_models.POSITIONS, hf_models.POSITIONS)
    enter, leave = functions("gptj")
    ours = enter(dict(hf_models.make("gptj").state_dict()))
    with pytest.raises(UsageError, match="pass max_seq_len"):
        leave(ours)
