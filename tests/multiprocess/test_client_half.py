"""Half precision by a class of the script's own around a torch optimizer: the library stays out of its way."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine_ranks as ranks
import half_reference
import shardwright.torch as smp
from client_optimizers import ClientFP16Optimizer
from engine_ranks import TWO_REPLICAS, TWO_STAGES
from half_reference import adam, batches, chain
from harness import RankPool

STEPS = 4
POISONED = 1


def agree(found: bool) -> bool:
    """As scripts do it."""
    flag = torch.tensor([int(found)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=smp.get_mp_process_group())
    return bool(flag)


def name_to_index(optimizer: Any) -> dict[str, int]:
    """A script's own map over the masters: it counts them by what they stand for."""
    optimizer.map_calls = getattr(optimizer, "map_calls", 0) + 1
    names = {id(p): n for n, p in optimizer.model.local_named_parameters()}
    halves = [p for group in optimizer.fp16_groups for p in group]
    return {names[id(p)]: i for i, p in enumerate(halves)}


@smp.step
def body(model: Any, optimizer: Any, x: Any) -> Any:
    loss = model(x.half()).float().square().mean()
    optimizer.backward(loss, update_master_grads=False)
    return loss


def build(half: str) -> tuple[Any, Any]:
    model = smp.DistributedModel(chain().half() if half == "before" else chain())
    for part in (model.get_module().blocks[2], model.get_module().head):
        smp.set_partition(part, 1)
    if half == "after":
        model.half()
    made = ClientFP16Optimizer(adam(model.named_parameters()), model, 2.0**6, agree)
    optimizer = smp.DistributedOptimizer(made)
    assert optimizer is made
    assert isinstance(optimizer, ClientFP16Optimizer)
    model.register_post_step_hook(lambda model, optimizer: optimizer.init_master_params())
    optimizer.param_name_to_index = functools.partial(name_to_index, optimizer)
    return model, optimizer


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for step in numbers:
        body(model, optimizer, ranks.data(step))
        if step == POISONED and smp.pp_rank() == 1:
            model.get_module().head.bias.grad[0] = float("inf")
        optimizer.update_master_grads()
        assert optimizer.overflow == (step == POISONED)
        optimizer.step()
        optimizer.zero_grad(set_grads_to_None=True)


def trained(half: str) -> tuple[dict[str, Any], float]:
    model, optimizer = build(half)
    steps(model, optimizer, range(STEPS - 1))
    assert optimizer.master_params_created
    held = [p for g in optimizer.param_groups for p in g["params"]]
    assert all(p.dtype is torch.float32 for p in held)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    own = optimizer.orig_state_dict()
    assert set(own) >= {"fp32_from_fp16", "optimizer_state_dict", "loss_scaler"}
    saved = {"optimizer": optimizer.local_state_dict(), "masters": own["fp32_from_fp16"], "model": model.local_state_dict()}
    saved = copy.deepcopy(saved)
    assert saved["optimizer"]["_smp_is_partial"]
    full = optimizer.state_dict()
    assert optimizer.map_calls > 0  # the script's own map was used
    names = [n for names in optimizer._full_group_names() for n in names]
    mine = set(name_to_index(optimizer))
    for index, name in enumerate(names):
        if name in mine:
            state = optimizer.optimizer.state[held[name_to_index(optimizer)[name]]]
            assert torch.equal(full["state"][index]["exp_avg"], state["exp_avg"])
    steps(model, optimizer, range(STEPS - 1, STEPS))
    wanted = dict(model.state_dict())
    scale = optimizer.scale
    # The same again from the saved state.
    model.load_state_dict(saved["model"], same_partition_load=True)
    optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for masters, values in zip(optimizer.fp32_from_fp16_groups, saved["masters"], strict=True):
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)
    steps(model, optimizer, range(STEPS - 1, STEPS))
    again = model.state_dict()
    assert all(torch.equal(again[n], wanted[n]) for n in wanted)
    return wanted, scale


def agree_world(found: bool) -> bool:
    flag = torch.tensor([int(found)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def with_pieces(lamb: bool) -> dict[str, Any]:
    """Replicas; with sharded state the masters are those of pieces."""
    model = smp.DistributedModel(chain().half())
    make = functools.partial(smp.optimizers.FusedLAMB, lr=0.05, max_grad_norm=0.01) if lamb else None
    inner = adam(model.named_parameters()) if make is None else make(model.parameters())
    optimizer = smp.DistributedOptimizer(ClientFP16Optimizer(inner, model, 2.0**6, agree_world))
    model.register_post_step_hook(lambda model, optimizer: optimizer.init_master_params())
    for step in range(STEPS):
        body(model, optimizer, ranks.data(step))
        grads = [h.grad for group in optimizer.fp16_groups for h in group if h.grad is not None and h.numel()]
        if step == POISONED and smp.rank() == 1:
            grads[0].view(-1)[0] = float("inf")
        optimizer.update_master_grads()
        assert optimizer.overflow == (step == POISONED)
        optimizer.step()
        optimizer.zero_grad(set_grads_to_None=True)
    masters = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    state = optimizer.state_dict()
    return {"weights": dict(model.state_dict()), "state": state, "masters": masters}


@pytest.mark.parametrize("lamb", [False, True])
def test_a_client_s_class_with_sharded_state(pool2: RankPool, lamb: bool) -> None:
    """Replicas stay equal, and equal to those without sharding; the whole state is whole."""
    plain = pool2.run(with_pieces, lamb, config={**TWO_REPLICAS, "fp16_params": True})
    sharded = pool2.run(with_pieces, lamb, config={**TWO_REPLICAS, "fp16_params": True, "shard_optimizer_state": True})
    assert sum(r["masters"] for r in sharded) == plain[0]["masters"]
    for one, other in zip(plain, sharded, strict=True):
        assert ranks.same(one["weights"], other["weights"])
        assert ranks.same(one["state"]["state"], other["state"]["state"])


@pytest.mark.parametrize("half", ["before", "after"])
def test_a_client_s_class_trains_as_in_one_process(pool2: RankPool, half: str) -> None:
    def poison(step: int, named: Any) -> None:
        if step == POISONED:
            named["head.bias"].grad[0] = float("inf")

    truth = half_reference.train_in_half(
        chain(),
        torch.float16,
        adam,
        lambda step: [lambda forward, x=x: forward(x).square().mean() for x in batches(step, 1)],
        STEPS,
        scale=2.0**6,
        dynamic=True,
        poison=poison,
    )
    for weights, scale in pool2.run(trained, half, config={**TWO_STAGES, "fp16_params": True}):
        assert scale == truth.scales[-1] == 2.0**5
        assert all(torch.equal(weights[n], truth.weights[-1][n]) for n in truth.weights[-1])
