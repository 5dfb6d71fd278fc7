"""Autocast in the step function, and `smp.amp.GradScaler`: all ranks skip a step, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_REPLICAS, TWO_STAGES
from harness import RankPool

STEPS = 5
INTERVAL = 2
POISONED = 2


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def trained(clip: float | None) -> dict[str, Any]:
    model = smp.DistributedModel(ranks.net())
    if smp.pp_size() > 1:
        ranks.cut(model)
    optimizer = smp.DistributedOptimizer(make(model.parameters()))
    scaler = smp.amp.GradScaler(init_scale=2.0**10, growth_interval=INTERVAL)

    @smp.step
    def body(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = out.float().square().mean()
        model.backward(scaler.scale(loss))
        return loss

    result: dict[str, Any] = {"losses": [], "scales": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        result["losses"].append(body(model, ranks.data(step)).stack())
        if step == POISONED and smp.state.cfg.shard_optimizer_state:  # in a piece that this rank alone owns
            virtual = [p.grad for _, p in model.virtual_named_parameters() if p.grad is not None and p.numel()]
            if smp.rank() == smp.size() - 1:
                virtual[0].view(-1)[0] = float("nan")
        elif step == POISONED and smp.pp_rank() == smp.pp_size() - 1:
            model.get_module().head.bias.grad[1] = float("nan")
        before = {n: p.detach().clone() for n, p in model.local_named_parameters()}
        if clip is not None:
            scaler.unscale_(optimizer)
            result["norms"].append(float(smp.clip_grad_norm(clip)))
        scaler.step(optimizer)
        if step == POISONED:
            assert all(torch.equal(p, before[n]) for n, p in model.local_named_parameters())
        scaler.update()
        result["scales"].append(scaler.get_scale())
    result["weights"] = dict(model.state_dict())
    again = smp.amp.GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == scaler.get_scale()
    return result


def reference(clip: float | None, num_replicas: int) -> dict[str, Any]:
    model = ranks.net()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=INTERVAL)
    result: dict[str, Any] = {"losses": [], "scales": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        start = {n: b.clone() for n, b in model.named_buffers()}
        kept: dict[str, Tensor] = {}
        for replica in range(num_replicas):
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            for x in ranks.data(step, replica).chunk(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(x).float().square().mean()
                scaled = scaler.scale(loss)
                scaled.backward(torch.full_like(scaled, 0.5 / num_replicas))
                losses.append(loss.detach())
            kept = kept or {n: b.clone() for n, b in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        if step == POISONED:
            model.head.bias.grad[1] = float("nan")
        if clip is not None:
            scaler.unscale_(optimizer)
            result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        scaler.step(optimizer)
        scaler.update()
        result["losses"].append(torch.stack(losses))
        result["scales"].append(scaler.get_scale())
    result["weights"] = {n: p.detach() for n, p in model.named_parameters()}
    return result


@pytest.mark.parametrize(
    ("layout", "clip"),
    [("pp2", None), ("pp2", 0.01), ("dp2", None), ("dp2-sharded", 0.01), pytest.param("pp2-dp2", 0.01, marks=pytest.mark.heavy)],
)
def test_scaler_equals_one_process(request: pytest.FixtureRequest, layout: str, clip: float | None) -> None:
    sharded = {**TWO_REPLICAS, "shard_optimizer_state": True}
    config = {"pp2": TWO_STAGES, "dp2": TWO_REPLICAS, "dp2-sharded": sharded, "pp2-dp2": TWO_BY_TWO}[layout]
    pool: RankPool = request.getfixturevalue("pool4" if layout == "pp2-dp2" else "pool2")
    num_replicas = 1 if layout == "pp2" else 2
    truth = reference(clip, num_replicas)
    assert truth["scales"] == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    for index, result in enumerate(pool.run(trained, clip, config=config)):
        assert result["scales"] == truth["scales"]
        assert result["norms"] == pytest.approx(truth["norms"], rel=1e-5, nan_ok=True)
        replica = index % num_replicas if layout.startswith("dp2") else index // 2
        for step in range(STEPS):
            mine = truth["losses"][step][2 * replica : 2 * replica + 2]
            torch.testing.assert_close(result["losses"][step], mine, rtol=1e-2, atol=1e-3)
        for name, value in truth["weights"].items():
            if layout == "pp2" and clip is None:
                assert torch.equal(result["weights"][name], value)
            else:
                torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-4)


def lists(model: Any) -> None:
    """Scaling several outputs at once; a scaler that is switched off."""
    scaler, off = smp.amp.GradScaler(init_scale=4.0), smp.amp.GradScaler(enabled=False)

    @smp.step
    def body(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = ranks.loss_of(model, x)
        one, two = scaler.scale([loss, 2 * loss])
        same = off.scale(loss)
        assert same is loss
        model.backward(one)
        return loss, one, two

    loss, one, two = body(model, ranks.data())
    assert torch.equal(one.stack(), 4 * loss.stack())
    assert torch.equal(two.stack(), 8 * loss.stack())
    assert not off.is_enabled()
    assert scaler.is_enabled()


def scale_lists() -> None:
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    lists(model)


def test_scaling_lists(pool2: RankPool) -> None:
    pool2.run(scale_lists, config=TWO_STAGES)
