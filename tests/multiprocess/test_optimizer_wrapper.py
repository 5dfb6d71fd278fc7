"""The wrapped optimizer over two stages: groups, state, clipping, weights that two stages keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import models
import shardwright.torch as smp
from client_optimizers import ClientOptimizer
from engine_ranks import TWO_BY_TWO, TWO_STAGES, same
from harness import RankPool
from shardwright.errors import UsageError


def wrap(module: nn.Module | None = None) -> smp.DistributedModel:
    """The test model with blocks 2 and 3 and the head on stage 1."""
    model = smp.DistributedModel(ranks.net() if module is None else module)
    ranks.cut(model)
    return model


def whole_weights(model: smp.DistributedModel) -> dict[str, Tensor]:
    return dict(model.state_dict())


# -- groups -----------------------------------------------------------------------------------------------


def built(when: str, kind: str) -> dict[str, Any]:
    """Train with an optimizer made before or after the wrap, plain or of a client's class, with a scheduler."""
    module = ranks.net()
    model: Any = None
    if when == "after":
        model = wrap(module)
    inner = ranks.adam(module if model is None else model)
    optimizer: Any = ClientOptimizer(inner) if kind == "client" else inner
    model = wrap(module) if model is None else model
    groups = list(optimizer.param_groups)
    lists = [group["params"] for group in groups]
    given = [list(members) for members in lists]
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    assert [list(members) for members in lists] == given  # as given, until the model is partitioned
    for step in range(3):
        optimizer.zero_grad()
        ranks.train_step(model, ranks.data(step))
        optimizer.step()
        scheduler.step()
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
    assert all(g["params"] is members for g, members in zip(groups, lists, strict=True))
    local = {id(p) for p in model.local_parameters()}
    for members, before in zip(lists, given, strict=True):
        assert [id(p) for p in members] == [id(p) for p in before if id(p) in local]
        assert members
    assert groups[0]["lr"] == 0.01 / 8
    assert all(p.device == q.device for q, s in inner.state.items() for p in ranks.tensors(s) if p.dim())
    assert {id(p) for p in inner.state} == local
    return whole_weights(model)


@pytest.mark.parametrize(("when", "kind"), [("before", "plain"), ("after", "plain"), ("after", "client")])
def test_groups_shrink_in_place(pool2: RankPool, when: str, kind: str) -> None:
    results = pool2.run(built, when, kind, config=TWO_STAGES)
    truth = ranks.net()
    optimizer = ranks.adam(truth)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        ranks.reference_step(truth, optimizer, step, (0,))
        scheduler.step()
    for weights in results:
        assert same(weights, dict(truth.state_dict()))


def many_optimizers() -> None:
    """Every optimizer of torch with a stage that has nothing to update, and some with unusual ways."""
    model = wrap()
    module = model.get_module()
    first, everything = list(module.blocks[0].parameters()), list(module.parameters())
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and cls is not torch.optim.Optimizer]
    classes = [cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.LBFGS]
    chosen = [p for p in first if p.dim() == 2]
    optimizers = [
        smp.DistributedOptimizer(cls(chosen, lr=1e-9)) for cls in classes if cls is not torch.optim.SparseAdam
    ]
    assert any(isinstance(o, torch.optim.Adadelta) for o in optimizers)
    adagrad = smp.DistributedOptimizer(torch.optim.Adagrad(everything, lr=1e-9))
    assert len(adagrad.state) == len(everything)  # it makes its state at once
    named = smp.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), lr=1e-9))
    twice = smp.DistributedOptimizer(torch.optim.SGD([{"params": first}, {"params": module.head.parameters()}], lr=0.0))
    assert smp.state.optimizer is twice
    ranks.train_step(model, ranks.data())
    local = {id(p) for p in model.local_parameters()}
    for optimizer in [*optimizers, adagrad, named, twice]:
        optimizer.step()
        optimizer.zero_grad(set_grads_to_None=False)
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} <= local
    assert {id(p) for p in adagrad.state} == local
    assert named.param_groups[0]["param_names"] == [f"module.module.{n}" for n, _ in model.local_named_parameters()]
    names = [n for n, _ in module.named_parameters()]
    assert named.state_dict()["param_groups"][0]["params"] == list(range(len(names)))
    named.load_state_dict(named.state_dict())
    assert [len(g["params"]) for g in twice.param_groups] == ([2, 0] if smp.pp_rank() == 0 else [0, 2])
    twice.add_param_group({"params": [module.scale, module.blocks[3].linear.bias], "lr": 0.5})
    assert [len(g["params"]) for g in twice.param_groups] == ([2, 0, 1] if smp.pp_rank() == 0 else [0, 2, 1])
    assert len(twice.state_dict()["param_groups"][2]["params"]) == 2
    assert smp.state.param_index_to_name_tp_group[0][2] == ("scale" if smp.pp_rank() == 0 else "blocks.3.linear.bias")
    with pytest.raises(UsageError, match="inside a step function"):
        _step_inside(model, twice)


def _step_inside(model: Any, optimizer: Any) -> None:
    @smp.step
    def body(model: Any, x: Tensor) -> Tensor:
        optimizer.step()
        return x

    body(model, ranks.data())


def test_optimizers_without_anything_to_do(pool2: RankPool) -> None:
    pool2.run(many_optimizers, config=TWO_STAGES)


# -- clipping ---------------------------------------------------------------------------------------------


def clipped(norm_type: float) -> tuple[float, float, dict[str, Tensor]]:
    model = wrap()
    optimizer = smp.DistributedOptimizer(ranks.adam(model))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = 300 * ranks.loss_of(model, x)
        model.backward(loss)
        return loss

    step(model, ranks.data())
    norm = smp.clip_grad_norm(1.0, norm_type)
    again = optimizer.clip_master_grads(2.0, norm_type)  # below the limit: nothing happens
    optimizer.step()
    return float(norm), again, whole_weights(model)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_equals_one_process(pool2: RankPool, norm_type: float) -> None:
    """FF-10 at pp 2."""
    results = pool2.run(clipped, norm_type, config=TWO_STAGES)
    truth = ranks.net()
    optimizer = ranks.adam(truth)
    for x in ranks.data(0, 0).chunk(2):
        (300 * ranks.loss_of(truth, x) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(truth.parameters(), 1.0, norm_type))
    assert norm > 10
    optimizer.step()
    for found, again, weights in results:
        assert found == pytest.approx(norm, rel=1e-5)
        assert again == pytest.approx(1.0, rel=1e-5)
        for name, value in truth.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


# -- weights that two stages keep ---------------------------------------------------------------------------

REPLICATE = {"tied_weights": "replicate", "microbatches": 2}


def tied_training() -> dict[str, Any]:
    """FF-07: GPT-2 whose head is on the last stage, five steps; what the copies and the owner have."""
    made = models.make("gpt2")
    module = made.model
    model = smp.DistributedModel(module)
    for name, stage in models.even_stages(models.block_names(module), 2).items():
        smp.set_partition(module.get_submodule(name), stage)
    smp.set_partition(module.transformer.ln_f, 1)
    smp.set_partition(module.lm_head, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))

    @smp.step
    def step(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    norms = []
    for number in range(5):
        optimizer.zero_grad()
        step(model, made.make_batch(10 * number + smp.dp_rank(), 8))
        norms.append(float(smp.clip_grad_norm(1.0)))
        optimizer.step()
        copies = smp.allgather(module.lm_head.weight.detach(), smp.WORLD)
        assert all(same(c, copies[0]) for c in copies)
        assert module.lm_head.weight is module.transformer.wte.weight
    assert module.lm_head.weight.shared is True
    assert "transformer.wte.weight" in dict(model.local_named_parameters())
    assert ("transformer.wte.weight" in model.local_state_dict()) == (smp.pp_rank() == 0)
    assert ("lm_head.weight" in model.local_state_dict()) == (smp.pp_rank() == 0)
    full = model.state_dict()
    assert full["lm_head.weight"] is full["transformer.wte.weight"]
    states = smp.allgather(module.lm_head.weight in optimizer.state, smp.PP_GROUP)
    assert states == [True, False]
    if smp.pp_rank() == 1:
        assert module.lm_head.weight.grad is None
    other = {n: v + 1 for n, v in full.items()}
    model.load_state_dict(other)
    copies = smp.allgather(module.lm_head.weight.detach(), smp.WORLD)
    assert all(same(c, other["lm_head.weight"]) for c in copies)
    return {"weights": dict(full), "norms": norms, "state": optimizer.state_dict()}


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_tied_weights_on_two_stages(request: pytest.FixtureRequest, dp: int) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{2 * dp}")
    config = {**(TWO_BY_TWO if dp == 2 else TWO_STAGES), **REPLICATE}
    results = pool.run(tied_training, config=config)
    made = models.make("gpt2")
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-3, eps=1e-4)
    norms = []
    for number in range(5):
        optimizer.zero_grad()
        for replica in range(dp):
            batch = made.make_batch(10 * number + replica, 8)
            for index in range(2):
                part = {n: v.chunk(2)[index] for n, v in batch.items()}
                (made.loss_of(made.model, part) / 2 / dp).backward()
        norms.append(float(nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)))
        optimizer.step()
    for result in results:
        assert result["norms"] == pytest.approx(norms, rel=1e-5)
        for name, value in made.model.state_dict().items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-6)
        optimizer.load_state_dict(copy.deepcopy(result["state"]))


# -- stages by hand ---------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Modules made in contexts; one that is in none."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        with smp.partition(0):
            self.first = nn.Linear(16, 16)
            with smp.partition(1):
                self.inner = nn.Linear(16, 16)
        self.unassigned = nn.Linear(16, 16)
        with smp.partition(1):
            self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unassigned(self.inner(self.first(x))))


def partition_by_hand(auto: bool) -> tuple[list[int], list[str]]:
    torch.manual_seed(0)
    module = ByHand()
    model = smp.DistributedModel(module)
    ranks.train_step(model, ranks.data())
    twin = copy.deepcopy(module)
    twin.load_state_dict(model.state_dict())
    for x in ranks.data().chunk(2):
        (ranks.loss_of(twin, x) / 2).backward()
    wanted = dict(twin.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter.grad, wanted[name].grad)
    stages = [smp.get_partition(m) for m in (module, module.first, module.inner, module.unassigned, module.last)]
    with pytest.raises(UsageError, match="not part of"):
        smp.get_partition(nn.Linear(1, 1))
    return stages, [n for n, _ in model.local_named_parameters()]


@pytest.mark.parametrize("default", [0, 1])
def test_contexts_at_creation(pool2: RankPool, default: int) -> None:
    """FF-06: what no context names goes to the default; together the stages hold everything once."""
    config = {**TWO_STAGES, "default_partition": default}
    results = pool2.run(partition_by_hand, False, config=config)
    assert results[0][0] == results[1][0] == [0, 0, 1, default, 1]
    assert sorted(results[0][1] + results[1][1]) == sorted(n for n, _ in ByHand().named_parameters())


def test_contexts_are_ignored_with_auto_partition(pool2: RankPool) -> None:
    results = pool2.run(partition_by_hand, True, config={**TWO_STAGES, "auto_partition": True})
    stages = results[0][0]
    assert stages == sorted(stages)  # in order, not as the contexts say
    assert sorted(results[0][1] + results[1][1]) == sorted(n for n, _ in ByHand().named_parameters())


def few_layers(num_layers: int) -> tuple[list[tuple[str, int]], list[Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(num_layers)))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = ranks.train(model, optimizer, 3)
    return [(n, p.numel()) for n, p in model.local_named_parameters()], losses


@pytest.mark.parametrize(
    ("num_layers", "num_stages"),
    [(5, 4), (2, 4), pytest.param(7, 3, marks=pytest.mark.heavy)],
)
def test_layers_do_not_divide_by_stages(request: pytest.FixtureRequest, num_layers: int, num_stages: int) -> None:
    """FF-06: every parameter on exactly one stage, and the losses of one process."""
    config = {"pipeline_parallel_degree": num_stages, "microbatches": 2}
    if num_stages == 4:
        results = request.getfixturevalue("pool4").run(few_layers, num_layers, config=config)
    else:
        with RankPool(num_stages) as pool:
            results = pool.run(few_layers, num_layers, config=config)
    torch.manual_seed(0)
    truth = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(truth.parameters(), lr=0.01)
    found = sorted(entry for parameters, _ in results for entry in parameters)
    assert found == sorted((n, p.numel()) for n, p in truth.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for x in ranks.data(step, 0).chunk(2):
            loss = ranks.loss_of(truth, x)
            (loss / 2).backward()
            losses.append(loss.detach())
        optimizer.step()
        assert all(same(list(r[1][step]), losses) for r in results)
