"""The wrapper of the optimizer in a world of one: it is the same object, with the same manners."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwright.torch as smp
from client_optimizers import ClientOptimizer
from shardwright.errors import UsageError

pytestmark = pytest.mark.usefixtures("world_of_one")


@smp.step
def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    model.backward(loss)
    return loss


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    train_step(model, torch.ones(4, 3))
    optimizer.step()


def test_it_is_the_same_object_of_its_own_class() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    groups, state = optimizer.param_groups, optimizer.state
    wrapped = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    assert wrapped is optimizer
    assert isinstance(wrapped, torch.optim.AdamW)
    assert type(wrapped).__name__ == "AdamW"
    assert wrapped.param_groups is groups
    assert wrapped.state is state
    assert smp.state.optimizer is wrapped
    assert not hasattr(wrapped, "train")
    assert wrapped.redefined_params is False


def test_optimizer_may_come_before_the_wrap() -> None:
    net = two_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"before smp\.DistributedModel"):
        smp.DistributedOptimizer(optimizer)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(optimizer)
    before = net[0].weight.clone()
    train(model, optimizer)
    assert not torch.equal(net[0].weight, before)


def test_schedulers_drive_it() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.25),
    ]
    train(model, optimizer)
    for scheduler in schedulers:
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    plateau.step(1.0)
    plateau.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.filterwarnings("error")
def test_schedulers_may_come_before_the_wrap() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer = smp.DistributedOptimizer(optimizer)
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer)
    early.step()
    late.step()
    assert optimizer.param_groups[0]["lr"] == 0.25

    @smp.step
    def wrong(model: nn.Module, x: torch.Tensor) -> None:
        optimizer.step()

    with pytest.raises(UsageError, match="inside a step function"):
        wrong(model, torch.ones(4, 3))


@pytest.mark.filterwarnings("error::UserWarning")
def test_schedulers_still_see_a_missing_step() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UserWarning, match=r"before `optimizer\.step"):
        scheduler.step()


def test_client_optimizer_keeps_its_class_and_its_attributes() -> None:
    model = smp.DistributedModel(two_layers())
    inner = torch.optim.Adam(model.parameters())
    optimizer = smp.DistributedOptimizer(ClientOptimizer(inner))
    assert isinstance(optimizer, ClientOptimizer)
    assert optimizer.optimizer is inner
    optimizer.loss_scaler = "a scaler"
    optimizer.overflow = True
    assert vars(optimizer)["loss_scaler"] == "a scaler"
    assert optimizer.clip_master_grads(1.0) == "the client's own, 1.0"
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.param_groups[0] is inner.param_groups[0]
    train(model, optimizer)
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_grads_to_None=True)
    assert optimizer.cleared_with == [False, False, True, True]
    assert optimizer.orig_state_dict().keys() == {"optimizer_state_dict", "overflow"}
    local = optimizer.local_state_dict()
    assert local.keys() == {"state", "param_groups", "_smp_is_partial"}
    assert local["state"][0]["exp_avg"] is inner.state[model.get_module()[0].weight]["exp_avg"]
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    kept = copy.deepcopy(local)
    train(model, optimizer)
    optimizer.load_state_dict(kept)
    assert torch.equal(inner.state[model.get_module()[0].weight]["exp_avg"], kept["state"][0]["exp_avg"])


def test_maps_may_be_replaced_on_the_instance() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.param_name_to_index() == {"0.weight": 0, "0.bias": 1, "1.weight": 2, "1.bias": 3}
    assert optimizer._param_index_to_param_local()[2] is model.get_module()[1].weight
    assert optimizer._param_id_to_index()[id(model.get_module()[1].bias)] == 3
    assert smp.state.param_index_to_name_tp_group == [{0: "0.weight", 1: "0.bias", 2: "1.weight", 3: "1.bias"}]
    assert smp.state.param_name_to_index_tp_group[0]["1.bias"] == 3
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 3))  # a master copy in its place
    assert optimizer.param_name_to_index()["0.weight"] == 0
    optimizer.param_name_to_index = dict  # type: ignore[method-assign]
    assert optimizer.param_name_to_index() == {}


def test_zero_grad() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model, torch.ones(4, 3))
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_grads_to_None=False)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_inside_a_step_is_refused() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def wrong(model: nn.Module, x: torch.Tensor) -> None:
        optimizer.step()

    with pytest.raises(UsageError, match="inside a step function"):
        wrong(model, torch.ones(4, 3))
    train(model, optimizer)


def test_closure() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.step(lambda: train_step(model, torch.ones(4, 3)).reduce_mean()) is not None


def test_stale_parameters_are_told_by_shape_and_group() -> None:
    model = smp.DistributedModel(two_layers())
    stale = [{"params": list(model.parameters())}, {"params": nn.Linear(7, 5).parameters(), "lr": 1.0}]
    with pytest.raises(UsageError, match=r"holds 2 parameters .* shape \[5, 7\] in group 1, \[5\] in group 1"):
        smp.DistributedOptimizer(torch.optim.SGD(stale, lr=0.1))


def test_repeated_parameters_count_once() -> None:
    net = two_layers()
    weights = [net[0].weight, net[1].weight, net[0].weight, net[0].weight]
    model = smp.DistributedModel(net)
    with pytest.warns(UserWarning, match="duplicate"):
        plain = torch.optim.SGD(weights, lr=0.1)
    optimizer = smp.DistributedOptimizer(plain)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(w) for w in weights[:2]]
    train_step(model, torch.ones(4, 3))
    before, gradient = net[0].weight.detach().clone(), net[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(net[0].weight, before.add(gradient, alpha=-0.1))
    optimizer.load_state_dict(optimizer.state_dict())


def test_what_cannot_be_wrapped() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="wrapped already"):
        smp.DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match="not Linear"):
        smp.DistributedOptimizer(nn.Linear(1, 1))


def test_a_group_may_be_added_later() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.get_module()[1].parameters(), lr=0.1))
    optimizer.add_param_group({"params": model.get_module()[0].parameters(), "lr": 0.5})
    assert optimizer.param_name_to_index() == {"1.weight": 0, "1.bias": 1, "0.weight": 2, "0.bias": 3}
    with pytest.raises(UsageError, match="doesn't have"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    optimizer.load_state_dict(optimizer.state_dict())


def test_loading_keeps_the_dicts_of_groups_and_leaves_the_given_one_alone() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    train(model, optimizer)
    group, params = optimizer.param_groups[0], optimizer.param_groups[0]["params"]
    for content in (copy.deepcopy(optimizer.local_state_dict()), copy.deepcopy(optimizer.state_dict())):
        content["param_groups"][0]["lr"] = 0.3
        untouched = copy.deepcopy(content)
        optimizer.load_state_dict(content)
        assert optimizer.param_groups[0] is group
        assert group["params"] is params
        assert group["lr"] == 0.3
        calls.clear()
        train(model, optimizer)
        assert calls == ["step"]  # once, also after loading
        assert content["param_groups"] == untouched["param_groups"]
        assert torch.equal(content["state"][0]["exp_avg"], untouched["state"][0]["exp_avg"])
    with pytest.raises(UsageError, match="parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_a_list_of_shards_gives_each_replica_its_own() -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train(model, optimizer)
    content = copy.deepcopy(optimizer.local_state_dict())
    optimizer.load_state_dict({**content, "state": [content["state"]]})
    assert torch.equal(optimizer.state[model.get_module()[0].weight]["exp_avg"], content["state"][0]["exp_avg"])


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping(norm_type: float) -> None:
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model, 30 * torch.ones(4, 3))
    gradients = [p.grad.clone() for p in model.parameters()]
    twin = two_layers()
    for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0, norm_type)
    assert optimizer.clip_master_grads(1.0, norm_type) == pytest.approx(float(norm), rel=1e-6)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
