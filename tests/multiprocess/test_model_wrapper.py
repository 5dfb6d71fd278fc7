"""The wrapped model over two stages: what is where, before and after partitioning; state dicts; loading."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine_ranks as ranks
import models
import shardwright.torch as smp
from engine_ranks import TWO_STAGES, same
from harness import RankPool
from shardwright.errors import PartitionError, UsageError


def life_of_a_model() -> list[str]:
    """Everything that may be asked of a model before and after it is partitioned; returns local names."""
    module = ranks.net()
    plain = module.state_dict()
    identities = {n: id(p) for n, p in module.named_parameters()}
    model = smp.DistributedModel(module)
    ranks.cut(model)
    _before(model, plain)
    seen: list[Any] = []
    model.register_post_partition_hook(lambda m, o: seen.append(_seen_by_hook(m, o)))
    model.register_post_partition_hook(lambda: seen.append("second"))
    model.register_post_step_hook(lambda m, o: seen.append(all(p.grad is not None for p in m.local_parameters())))
    optimizer = smp.DistributedOptimizer(ranks.adam(model, lr=0.0))
    assert seen == []
    ranks.train_step(model, ranks.data())
    assert seen == [(True, True, True), "second", True]
    model.register_post_partition_hook(lambda m, o: seen.append((m is model, o is optimizer)))
    assert seen[3:] == [(True, True)]
    optimizer.step()
    assert {n: id(p) for n, p in module.named_parameters()} == identities
    _after(model, plain)
    _casts(model)
    return [n for n, _ in model.local_named_parameters()]


def _before(model: Any, plain: dict[str, Any]) -> None:
    assert not model.partitioned
    assert model.to("cuda") is model.cuda() is model.train() is model
    if smp.rank() == 0:  # without communication
        assert same(dict(model.state_dict()), dict(plain))
        assert model.state_dict(keep_vars=True)["scale"] is model.get_module().scale
    for name in ("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules"):
        with pytest.raises(UsageError, match=rf"local_{name}\(\) before the model is partitioned"):
            getattr(model, f"local_{name}")()
    with pytest.raises(UsageError, match=r"local_state_dict\(\) before"):
        model.local_state_dict()
    with pytest.raises(UsageError, match=r"get_partition\(\) before"):
        smp.get_partition(model.head)
    with pytest.raises(UsageError, match="outside a step function"):
        model(ranks.data())
    with pytest.raises(UsageError, match="outside a step function"):
        model.backward(torch.ones((), requires_grad=True))
    with pytest.raises(UsageError, match="one per process"):
        smp.DistributedModel(ranks.net())
    with pytest.raises(UsageError, match="retain_graph"):
        model.backward(torch.ones(()), retain_graph=True)
    with pytest.raises(UsageError, match="LBFGS"):
        smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))


def _seen_by_hook(model: Any, optimizer: Any) -> tuple[bool, bool, bool]:
    local = {id(p) for p in model.local_parameters()}
    grouped = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return model.partitioned, grouped == local, smp.get_partition(model.head) == 1


def _after(model: Any, plain: dict[str, Any]) -> None:
    assert model.partitioned
    me = smp.pp_rank()
    module = model.get_module()
    assert [n for n, _ in model.named_parameters()] == [f"module.module.{n}" for n, _ in module.named_parameters()]
    wanted = {n for n in dict(module.named_parameters()) if n.startswith(("blocks.2", "blocks.3", "head")) == (me == 1)}
    local = dict(model.local_named_parameters())
    assert local.keys() == wanted
    assert [id(p) for p in model.local_parameters()] == [id(p) for p in local.values()]
    modules = dict(model.local_named_modules())
    assert ("head" in modules) == (me == 1) == ("" not in modules)
    assert list(model.local_modules()) == list(modules.values())
    buffers = dict(model.local_named_buffers())
    assert ("blocks.3.size" in buffers) == (me == 1) == ("positions" not in buffers)
    for name, parameter in module.named_parameters():
        assert parameter.shape == plain[name].shape
        if name not in local:
            assert parameter.device.type == "cpu"
            assert parameter.grad is None
            assert parameter.isnan().all()
    num_tensors = sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())
    needed = ranks.plain_bytes(local.items()) + ranks.plain_bytes(buffers.items())
    assert ranks.held_bytes(module) <= needed + 8 * num_tensors
    with pytest.raises(UsageError, match="outside a step function"):
        model(ranks.data())
    with pytest.raises(UsageError, match="lives on pipeline rank"):
        (module.blocks[0] if me == 1 else module.head)(torch.ones(1, 16))
    with pytest.raises(PartitionError, match="partitioned already"):
        smp.set_partition(module.head, 0)
    smp.set_partition(nn.Linear(1, 1), 0)  # of no model
    module.head.note = "trained" if me == 1 else "not the owner's"
    _state_dicts(model, plain)


def _state_dicts(model: Any, plain: dict[str, Any]) -> None:
    full = model.state_dict()
    assert list(full) == list(plain)
    assert full._metadata == plain._metadata
    assert full["head._extra_state"] == "trained"
    assert all(t.device.type == "cpu" and not t.requires_grad for t in ranks.tensors(full))
    constant = {n: v for n, v in plain.items() if not n.endswith((".size", ".calls", "_extra_state"))}
    assert same({n: full[n] for n in constant}, constant)
    assert full["blocks.3.calls"] == full["blocks.0.calls"] == 2
    assert next(iter(model.state_dict(prefix="a."))) == "a.scale"
    only_zero = model.state_dict(gather_to_rank0=True)
    assert same(dict(only_zero), dict(full) if smp.rank() == 0 else {})
    local = model.local_state_dict()
    assert local.pop("_smp_is_partial") is True
    parts = smp.allgather(dict(local), smp.PP_GROUP)
    assert parts[0].keys() | parts[1].keys() == full.keys()
    assert not parts[0].keys() & parts[1].keys()
    assert same({**parts[0], **parts[1]}, dict(full))
    kept = full["scale"].clone()  # later training must not change what was gathered
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.mul_(2)
    assert torch.equal(full["scale"], kept)
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.div_(2)


def _casts(model: Any) -> None:
    module = model.get_module()
    small = ranks.held_bytes(module)
    result = ranks.evaluate(model, ranks.data()).concat()
    assert model.double() is model
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert ranks.held_bytes(module) <= 2 * small
    precise = ranks.evaluate(model, ranks.data().double()).concat()
    assert precise.dtype == torch.float64
    torch.testing.assert_close(precise.float(), result, rtol=0.1, atol=0.1)  # running estimates have moved on
    assert model.to("cuda", torch.float32) is model
    ranks.train_step(model, ranks.data())
    full = model.state_dict()
    assert model.cpu() is model
    assert all(not p.isnan().any() for p in model.parameters())
    assert torch.equal(module.positions, torch.arange(16) % 3)
    assert module.head.note == "trained"
    assert same(dict(model.state_dict()), dict(full))
    if smp.rank() == 0:  # nothing is communicated any more
        assert same(dict(model.state_dict()), dict(full))
    assert model.eval() is model
    gathered = smp.allgather(model(torch.ones(2, 16)).detach(), smp.WORLD)
    assert same(gathered[0], gathered[1])
    with pytest.raises(UsageError, match=r"after model\.cpu\(\)"):
        ranks.train_step(model, ranks.data())


def test_life_of_a_model(pool2: RankPool) -> None:
    names = pool2.run(life_of_a_model, config=TWO_STAGES)
    assert sorted(names[0] + names[1]) == sorted(n for n, _ in ranks.net().named_parameters())


def half_before_partitioning() -> None:
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    assert model.to(torch.bfloat16) is model
    result = ranks.evaluate(model, ranks.data().bfloat16()).concat()
    assert result.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_cast_before_partitioning(pool2: RankPool) -> None:
    pool2.run(half_before_partitioning, config=TWO_STAGES)


def memory_of_a_large_model() -> tuple[int, int]:
    """Resident memory before and after partitioning, bytes. Each tensor is large enough to be given back."""
    module = nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(4)))
    start = _resident()
    model = smp.DistributedModel(module)
    for layer in list(module)[2:]:
        smp.set_partition(layer, 1)
    with torch.no_grad():
        ranks.evaluate(model, torch.ones(2, 3000))
    return start, _resident()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_what_others_hold_takes_no_memory(pool2: RankPool) -> None:
    whole = 4 * 3000 * 3001 * 4
    for before, after in pool2.run(memory_of_a_large_model, config=TWO_STAGES):
        assert after < before - 0.4 * whole


def save_pretrained(path: str) -> dict[str, Any]:
    made = models.make("gpt2")
    model = smp.DistributedModel(made.model)

    @smp.step
    def look(model: Any, batch: Any) -> torch.Tensor:
        return made.loss_of(model, batch)

    with torch.no_grad():
        look(model, made.make_batch(0, 8))
    model.save_pretrained(path)
    return dict(model.state_dict())


def test_transformers_folder_is_written_whole(pool2: RankPool, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    results = pool2.run(save_pretrained, str(tmp_path), config={**TWO_STAGES, "auto_partition": True})
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert same(dict(loaded.state_dict()), results[0])
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


# -- loading ----------------------------------------------------------------------------------------------


def states_after_two_steps(first_of_stage_1: int) -> dict[str, Any]:
    """What can be saved of a model and its optimizer, and how training goes on."""
    model = smp.DistributedModel(ranks.net(seed=1))
    ranks.cut(model, first_of_stage_1)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    ranks.train(model, optimizer, 2)
    model.get_module().head.note = "trained"
    states = {
        "model_local": model.local_state_dict(),
        "model_full": model.state_dict(),
        "optimizer_local": optimizer.local_state_dict(),
        "optimizer_full": optimizer.state_dict(),
    }
    states = pickle.loads(pickle.dumps(states))
    return {**states, "then": ranks.train(model, optimizer, 2, first=2)}


def load_and_go_on(states: list[dict[str, Any]], kind: str, first_of_stage_1: int, when: str) -> list[torch.Tensor]:
    """Load what `states_after_two_steps` returned, before or after partitioning; return the losses that follow."""
    mine = states[smp.rank()]
    model = smp.DistributedModel(ranks.net(seed=2))
    ranks.cut(model, first_of_stage_1)
    optimizer = smp.DistributedOptimizer(ranks.adam(model, lr=0.5))
    if when == "after":
        ranks.train(model, optimizer, 1)
    seen: list[Any] = []
    model.register_post_partition_hook(lambda m, o: seen.append(m.get_module().scale.clone()))
    content, optimizer_content = dict(mine[f"model_{kind}"]), dict(mine[f"optimizer_{kind}"])
    if kind == "full":
        content["_smp_is_partial"] = False
    options = {"same_partition_load": True} if kind == "local" and first_of_stage_1 == 2 else {}
    keys, optimizer_keys = set(content), set(optimizer_content)
    groups = [id(group) for group in optimizer.param_groups]
    assert model.load_state_dict(content, **options) == ([], [])
    optimizer.load_state_dict(optimizer_content)
    assert (set(content), set(optimizer_content)) == (keys, optimizer_keys)
    losses = ranks.train(model, optimizer, 2, first=2)
    assert [id(group) for group in optimizer.param_groups] == groups
    assert same(content, {**mine[f"model_{kind}"], **({"_smp_is_partial": False} if kind == "full" else {})})
    assert same(optimizer_content, mine[f"optimizer_{kind}"])
    assert model.state_dict()["head._extra_state"] == "trained"
    if when == "before" and smp.pp_rank() == 0:  # hooks come after the loads
        assert torch.equal(seen[0], mine["model_full"]["scale"])
    return losses


@pytest.fixture(scope="module")
def states(pool2: RankPool) -> list[dict[str, Any]]:
    return pool2.run(states_after_two_steps, 2, config=TWO_STAGES)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("kind", "first_of_stage_1"), [("local", 2), ("full", 2), ("full", 1)])
def test_training_goes_on_from_state_dicts(
    pool2: RankPool, states: list[dict[str, Any]], kind: str, first_of_stage_1: int, when: str
) -> None:
    results = pool2.run(load_and_go_on, states, kind, first_of_stage_1, when, config=TWO_STAGES)
    for result, wanted in zip(results, states, strict=True):
        assert same(result, wanted["then"])


def test_state_dicts_equal_those_of_one_process(states: list[dict[str, Any]]) -> None:
    model, optimizer = ranks.reference(2, seed=1)
    plain = {**model.state_dict(), "head._extra_state": "trained"}
    for mine in states:
        assert same(dict(mine["model_full"]), plain)
        full, wanted = mine["optimizer_full"], optimizer.state_dict()
        assert full["param_groups"] == wanted["param_groups"]
        assert same(full["state"], wanted["state"])
    optimizer.load_state_dict(states[1]["optimizer_full"])


def partial_into_another_partition(states: list[dict[str, Any]]) -> None:
    mine = states[smp.rank()]
    model = smp.DistributedModel(ranks.net(seed=2))
    ranks.cut(model, 1)
    assert model.load_state_dict(mine["model_local"]) == ([], [])
    with torch.no_grad():
        ranks.evaluate(model, ranks.data())
    wanted = dict(states[0]["model_full"])
    found = model.state_dict()
    assert same(
        {n: found[n] for n in wanted if "size" not in n and "calls" not in n},
        {n: wanted[n] for n in wanted if "size" not in n and "calls" not in n},
    )
    if smp.rank() == 0:  # no communication: the others needn't come
        with pytest.raises(RuntimeError, match=r"unexpected keys \['blocks.1"):
            model.load_state_dict(mine["model_local"], same_partition_load=True)
    assert model.load_state_dict(mine["model_local"]) == ([], [])
    short = {n: v for n, v in wanted.items() if n != "scale"}
    with pytest.raises(RuntimeError, match=r"missing keys \['scale'\]"):
        model.load_state_dict(short)
    keys = model.load_state_dict({**short, "more": torch.ones(1)}, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["scale"], ["more"])
    size = "size mismatch for head.bias" if smp.rank() == 1 else None
    wrong = {**wanted, "head.bias": torch.ones(3)}
    if size is None:
        model.load_state_dict(wrong)
    else:
        with pytest.raises(RuntimeError, match=size):
            model.load_state_dict(wrong)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    with pytest.raises(UsageError, match="parameter groups"):
        optimizer.load_state_dict(mine["optimizer_local"])


def test_partial_state_into_another_partition(pool2: RankPool, states: list[dict[str, Any]]) -> None:
    pool2.run(partial_into_another_partition, states, config=TWO_STAGES)


def refused_before_partitioning(states: list[dict[str, Any]]) -> None:
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    content = dict(states[0]["model_full"])
    with pytest.raises(RuntimeError, match="scale"):
        model.load_state_dict({n: v for n, v in content.items() if n != "scale"})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**content, "scale": torch.ones(3)}, strict=False)
    with pytest.raises(UsageError, match="parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_what_can_be_told_early_is_told_early(pool2: RankPool, states: list[dict[str, Any]]) -> None:
    pool2.run(refused_before_partitioning, states, config=TWO_STAGES)
