"""Parameters built late have the same values in every layout, and each process holds only its own."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import reference
from harness import RankPool

BATCH = 8


def weights_of(name: str, tp: bool, train: bool) -> dict[str, Tensor]:
    """Build a model late, run one step, and return the whole state dict (with `train` after an update)."""
    import shardwright.torch as smp

    spec = models.MODELS[name]
    torch.manual_seed(5)
    with smp.model_creation(tensor_parallelism=tp):
        plain = spec.build(0.0)
    drawn = torch.rand(()).clone()
    assert all(p.is_meta for p in plain.parameters())
    assert not any(b.is_meta for b in plain.buffers())
    model = smp.DistributedModel(plain)
    parameters = list(model.parameters())
    optimizer = smp.DistributedOptimizer(reference.adamw(parameters))

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = spec.loss_of(model, batch)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    with torch.set_grad_enabled(train):
        step(model, spec.make_batch(0, BATCH))
    if train:
        optimizer.step()
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    state = model.state_dict()
    for to_transformers, _ in smp.state.module_manager.translate_functions:
        state = to_transformers(state)
    return {"drawn": drawn, **{n: t.clone() for n, t in state.items() if isinstance(t, Tensor)}}


def config(pp: int = 1, tp: int = 1) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True, "microbatches": 2,
        "delayed_parameter_initialization": True, "log_level": "warning",
    }  # fmt: skip


def differences(runs: list[dict[str, Tensor]]) -> list[str]:
    assert len({tuple(run) for run in runs}) == 1
    return [n for run in runs for n in run if not torch.equal(run[n], runs[0][n])]


@pytest.mark.parametrize("name", ["gpt2", "resnet", *(pytest.param(n, marks=pytest.mark.heavy) for n in ("t5", "llama", "bert", "vit", "mixtral", "buffered", "root_parameters"))])
def test_values_are_the_same_in_every_layout(name: str, pool2: RankPool, pool4: RankPool) -> None:
    runs = pool2.run(weights_of, name, False, False, config=config(), timeout_s=120)
    runs += pool2.run(weights_of, name, False, False, config=config(pp=2), timeout_s=120)
    if name == "gpt2":
        runs += pool4.run(weights_of, name, False, False, config=config(pp=4), timeout_s=120)
        runs += pool2.run(weights_of, name, False, False, config=config(tp=2), timeout_s=120)  # nothing is marked
    assert differences(runs) == []
    torch.manual_seed(5)
    plain = models.MODELS[name].build(0.0).state_dict()
    assert [n for n in runs[0] if n != "drawn"] == list(plain)
    for key, want in plain.items():
        got = runs[0][key]
        assert (got.shape, got.dtype) == (want.shape, want.dtype), key
        if want.numel() < 2 or not want.is_floating_point():
            continue
        if float(want.std()) == 0 or key.endswith("running_mean"):
            if "running" not in key:
                assert torch.equal(got, want), key  # ones and zeros
        elif want.numel() > 500:
            assert float(got.std()) == pytest.approx(float(want.std()), rel=0.2), key
            assert float(got.mean()) == pytest.approx(float(want.mean()), abs=0.2 * float(want.std())), key
            assert not torch.equal(got, want)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.heavy)])
def test_distributed_modules_have_the_values_of_the_plain_ones(name: str, pool2: RankPool, pool4: RankPool) -> None:
    runs = pool2.run(weights_of, name, True, False, config=config(tp=2), timeout_s=120)
    runs += pool4.run(weights_of, name, True, False, config=config(tp=2, pp=2), timeout_s=120)
    runs += pool2.run(weights_of, name, True, False, config=config(), timeout_s=120)
    assert differences(runs) == []
    plain = pool2.run(weights_of, name, False, False, config=config(), timeout_s=120)[0]
    assert runs[0].keys() <= plain.keys()
    assert [n for n, t in runs[0].items() if not torch.equal(t, plain[n])] == []
    assert any(t.numel() > 1000 for t in runs[0].values())


def test_half_precision_rounds_the_same_values(pool2: RankPool) -> None:
    full = pool2.run(weights_of, "gpt2", False, False, config=config(pp=2), timeout_s=120)[0]
    for half in pool2.run(weights_of, "gpt2", False, True, config={**config(pp=2), "bf16": True}, timeout_s=120):
        assert half.keys() == full.keys()
        weights = {n: t for n, t in half.items() if n != "drawn"}
        assert all(t.dtype is torch.bfloat16 for t in weights.values())
        # one update of Adam by 1e-3 later
        assert [n for n, t in weights.items() if not torch.allclose(t.float(), full[n], atol=2e-3, rtol=1e-2)] == []


@pytest.mark.heavy
def test_sharded_optimizer_state_changes_nothing(pool2: RankPool) -> None:
    runs = pool2.run(weights_of, "gpt2", False, True, config=config())
    runs += pool2.run(weights_of, "gpt2", False, True, config={**config(), "shard_optimizer_state": True})
    assert differences(runs) == []


def test_training_updates_them(pool2: RankPool) -> None:
    before = pool2.run(weights_of, "gpt2", False, False, config=config(pp=2))[0]
    after = pool2.run(weights_of, "gpt2", False, True, config=config(pp=2))[0]
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    assert len(moved) > 40


# ------------------------------------------------------------------ loaded weights


def loaded(folder: str, how: str) -> dict[str, Tensor]:
    """Load a whole state dict: by transformers inside the context, or into parameters without storage."""
    import transformers

    import shardwright.torch as smp

    torch.manual_seed(5)
    with smp.model_creation():
        if how == "from_pretrained":
            plain = transformers.GPT2LMHeadModel.from_pretrained(folder)
        else:
            plain = models.MODELS["gpt2"].build(0.0)
    assert {p.is_meta for p in plain.transformer.parameters()} == {how != "from_pretrained"}
    model = smp.DistributedModel(plain)
    if how == "load_state_dict":
        model.load_state_dict(torch.load(f"{folder}/fullmodel.pt", weights_only=True))
    if how == "resume":
        smp.resume_from_checkpoint(folder, tag="fullmodel.pt", partial=False)

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        return models.own_loss(model, batch)

    with torch.no_grad():
        step(model, models.causal_batch(0, BATCH))
    return {n: t.clone() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("how", ["from_pretrained", "load_state_dict", "resume"])
def test_loaded_weights_are_kept(how: str, pool2: RankPool, tmp_path: Any) -> None:
    plain = models.make("gpt2", seed=3).model
    plain.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "fullmodel.pt")
    for run in pool2.run(loaded, str(tmp_path), how, config=config(pp=2), timeout_s=120):
        assert [n for n, t in plain.state_dict().items() if not torch.equal(t, run[n])] == []


def trained_and_saved(folder: str, late: bool) -> dict[str, Tensor]:
    """Train a step and save; or build late, resume from there. Returns this rank's state after one more step."""
    import shardwright.torch as smp

    torch.manual_seed(9 if late else 5)
    with smp.delay_param_initialization(enabled=late):
        plain = models.MODELS["gpt2"].build(0.0)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def step(model: nn.Module, batch: models.Batch) -> Tensor:
        loss = models.own_loss(model, batch)
        model.backward(loss)
        return loss

    if late:
        smp.resume_from_checkpoint(folder, tag="one")
        with pytest.raises(smp_errors().UsageError, match="no values yet"):
            model.state_dict()
    else:
        step(model, models.causal_batch(0, BATCH))
        optimizer.step()
        smp.save_checkpoint(folder, tag="one", model=model, optimizer=optimizer)
        optimizer.zero_grad()
    step(model, models.causal_batch(1, BATCH))
    optimizer.step()
    return {n: t.clone() for n, t in model.local_state_dict().items() if isinstance(t, Tensor)}


def smp_errors() -> Any:
    import shardwright.errors

    return shardwright.errors


def test_resumed_weights_count(pool2: RankPool, tmp_path: Any) -> None:
    want = pool2.run(trained_and_saved, str(tmp_path), False, config=config(pp=2))
    got = pool2.run(trained_and_saved, str(tmp_path), True, config=config(pp=2))
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        assert [n for n in a if not torch.equal(a[n], b[n])] == []


# ------------------------------------------------------------------ a large one


def build_large() -> dict[str, int]:
    """1.3B parameters: 24 GPT-2 blocks of width 2048. Returns bytes: of all parameters, of this rank's, and the peak."""
    import transformers

    import shardwright.torch as smp

    torch.manual_seed(0)
    settings = transformers.GPT2Config(n_layer=24, n_embd=2048, n_head=16, n_positions=64, vocab_size=50257, use_cache=False)
    with smp.model_creation():
        plain = transformers.GPT2LMHeadModel(settings)
    total = sum(p.numel() * 4 for p in plain.parameters())
    model = smp.DistributedModel(plain)

    @smp.step
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    with torch.no_grad():
        loss = step(model, torch.zeros(1, 8, dtype=torch.int64)).reduce_mean()
    assert 9 < float(loss) < 13
    mine = sum(p.numel() * 4 for p in model.local_parameters())
    return {"total": total, "mine": mine, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


@pytest.mark.heavy
def test_a_model_of_1_3_billion_parameters_on_four_ranks(tmp_path: Any) -> None:
    with RankPool(4) as fresh:  # peaks are those of the processes
        runs = fresh.run(build_large, config={**config(pp=4), "ddp": False, "microbatches": 1}, timeout_s=280)
    print(runs)
    assert runs[0]["total"] > 1.3e9 * 4
    assert sum(run["mine"] for run in runs) == runs[0]["total"]
    assert max(run["peak"] for run in runs) < 2.5 * 2**30
