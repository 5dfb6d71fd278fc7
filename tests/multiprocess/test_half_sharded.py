"""Half precision with sharded optimizer state: masters of pieces, and decisions that all owners share."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, same
from harness import RankPool
from sharded_models import OPTIMIZERS, SMALL_BUCKETS, batch, two_groups, uneven

DDP = {"ddp": True, "microbatches": 2, "log_level": "warning"}
STEPS = 4
SCALE = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10, "scale_window": 2}}
MAKE = {**OPTIMIZERS, "lamb": lambda p: smp.optimizers.FusedLAMB(p, lr=0.05, max_grad_norm=0.1)}


def wrap(name: str, seed: int = 0) -> tuple[Any, Any]:
    model = smp.DistributedModel(uneven(seed), bucket_cap_mb=SMALL_BUCKETS)
    return model, smp.DistributedOptimizer(two_groups(model, MAKE[name]), None, **SCALE)


def steps(model: Any, optimizer: Any, numbers: range, *, clip: float | None = None) -> list[Any]:
    seen: list[Any] = []
    for step in numbers:
        optimizer.zero_grad()
        seen.append(ranks.train_step(model, batch(step, smp.dp_rank())).stack())
        if clip is not None:
            seen.append(optimizer.clip_master_grads(clip))
        optimizer.step()
        seen.append(optimizer.loss_scale)
    return seen


def trained(name: str, clip: float | None) -> dict[str, Any]:
    model, optimizer = wrap(name)
    seen = steps(model, optimizer, range(STEPS), clip=clip)
    sharded = smp.state.cfg.shard_optimizer_state
    held = [p for g in optimizer.param_groups for p in g["params"]]
    masters = [m for group in optimizer.fp32_from_fp16_groups for m in group]
    assert optimizer.redefined_params is sharded
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype is torch.float32 for p in held if p.requires_grad)
    assert len(masters) == len(trainable)
    assert all(p.grad is None for p in trainable) is sharded
    assert all(p.dtype is not torch.float32 for p in model.parameters())
    return {
        "seen": seen,
        "weights": {n: p.detach().clone() for n, p in model.local_named_parameters()},
        "state": optimizer.state_dict(),
        "elements": (sum(m.numel() for m in masters), sum(p.numel() for p in trainable)),
    }


@pytest.mark.parametrize(
    ("kind", "name", "dp", "clip"),
    [
        ("fp16", "adamw", 2, None),
        ("bf16", "adamw", 2, 0.05),
        ("fp16", "lamb", 2, None),
        pytest.param("bf16", "sgd", 4, None, marks=pytest.mark.heavy),
        pytest.param("fp16", "adamw", 4, 0.05, marks=pytest.mark.heavy),
        pytest.param("bf16", "lamb", 4, None, marks=pytest.mark.heavy),
    ],
)
def test_numbers_equal_those_without_sharding(
    request: pytest.FixtureRequest, kind: str, name: str, dp: int, clip: float | None
) -> None:
    """Masters, moments, weights and the scale, bit for bit."""
    pool: RankPool = request.getfixturevalue(f"pool{dp}")
    plain = pool.run(trained, name, clip, config={**DDP, kind: True})
    sharded = pool.run(trained, name, clip, config={**DDP, kind: True, "shard_optimizer_state": True})
    for one, other in zip(plain, sharded, strict=True):
        assert one["state"]["fp32_from_fp16"]
        for key in ("seen", "weights", "state"):
            if key == "seen" and clip is not None:
                assert [float(torch.as_tensor(v).sum()) for v in other[key]] == pytest.approx(
                    [float(torch.as_tensor(v).sum()) for v in one[key]], rel=1e-6
                )
            elif clip is None:
                assert same(one[key], other[key]), key
    if clip is not None:  # the norm's parts are added in another order
        for key, master in plain[0]["state"]["fp32_from_fp16"].items():
            torch.testing.assert_close(sharded[0]["state"]["fp32_from_fp16"][key], master, rtol=1e-5, atol=1e-7)
    held, whole = [r["elements"][0] for r in sharded], plain[0]["elements"][0]
    assert sum(held) == whole == plain[0]["elements"][1]
    assert max(held) <= whole / dp + 5 * dp


def overflow(split: str) -> dict[str, Any]:
    """Inf in one gradient of one rank, after the reduction: in a piece that only this rank owns."""
    if split == "pp":
        model = smp.DistributedModel(ranks.net(), bucket_cap_mb=SMALL_BUCKETS)
        ranks.cut(model)
        optimizer = smp.DistributedOptimizer(ranks.adam(model), None, **SCALE)
    else:
        model, optimizer = wrap("adamw")
    result: dict[str, Any] = {"scales": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        x = ranks.data(step) if split == "pp" else batch(step, smp.dp_rank())
        ranks.train_step(model, x)
        virtual = [p for _, p in model.virtual_named_parameters() if p.grad is not None and p.numel()]
        if step == 1 and smp.rank() == smp.size() - 1:
            virtual[0].grad.view(-1)[0] = float("inf")
        before = {n: p.detach().clone() for n, p in model.local_named_parameters()}
        result["norms"].append(optimizer.clip_master_grads(1e9))
        optimizer.step()
        assert optimizer.overflow == (step == 1)
        unchanged = all(torch.equal(p, before[n]) for n, p in model.local_named_parameters())
        assert unchanged == optimizer.overflow
        result["scales"].append(optimizer.loss_scale)
    names = dict(model.get_module().named_parameters())  # buffers are each replica's own until the next step
    result["weights"] = {n: v for n, v in model.state_dict().items() if n in names}
    return result


@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2-dp2", marks=pytest.mark.heavy)])
def test_overflow_in_one_piece(request: pytest.FixtureRequest, layout: str) -> None:
    """FF-12 with sharded state: the decision is the world's."""
    pool: RankPool = request.getfixturevalue("pool2" if layout == "dp2" else "pool4")
    config = {**(DDP if layout == "dp2" else TWO_BY_TWO), "fp16": True, "shard_optimizer_state": True}
    results = pool.run(overflow, "dp" if layout == "dp2" else "pp", config=config)
    for result in results:
        assert result["scales"] == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
        assert result["norms"][1] == -1.0
        assert result["norms"] == results[0]["norms"]
        assert same(result["weights"], results[0]["weights"])


# -- state ------------------------------------------------------------------------------------------------


def taken(path: str) -> dict[str, Any]:
    """Two steps, everything saved in every form, two more steps."""
    model, optimizer = wrap("adamw")
    steps(model, optimizer, range(2))
    smp.save_checkpoint(path, "two", True, model, optimizer)
    saved = {
        "shard": optimizer.local_state_dict(gather_if_shard=False),
        "gathered": optimizer.local_state_dict(),
        "full": optimizer.state_dict(),
        "model": dict(model.state_dict()),
    }
    saved = copy.deepcopy(saved)
    assert isinstance(saved["gathered"]["fp32_from_fp16"], list) == (smp.rdp_rank() == 0)
    seen = steps(model, optimizer, range(2, 4))
    return {"seen": seen, "end": copy.deepcopy(optimizer.state_dict()), "saved": saved}


def continued(form: str, when: str, path: str, saved: Any) -> dict[str, Any]:
    """A fresh model that goes on from the saved state."""
    model, optimizer = wrap("adamw", seed=9)
    mine = saved[smp.rank()]

    def load() -> None:
        model.load_state_dict(mine["model"])
        if form == "gathered":  # every rank reads what rdp_rank 0 wrote
            optimizer.load_state_dict(saved[0]["gathered"])
        else:
            optimizer.load_state_dict(mine[form])

    if when == "later":
        steps(model, optimizer, range(7, 8))
    if form == "checkpoint":
        smp.resume_from_checkpoint(path)
    else:
        load()
    assert optimizer.loss_scale == mine["full"]["loss_scaler"]["cur_scale"]
    return {"seen": steps(model, optimizer, range(2, 4)), "end": optimizer.state_dict()}


@pytest.mark.parametrize("kind", ["fp16", pytest.param("bf16", marks=pytest.mark.heavy)])
def test_state_goes_on_bitwise(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """FF-28, FF-29 with shards: in four forms, before the first step and after it."""
    config = {**DDP, kind: True, "shard_optimizer_state": True}
    whole = pool2.run(taken, str(tmp_path), config=config)
    names = {p.name for p in (tmp_path / "two_partial").glob("*_states_*")}
    assert names == {"fp16_states_0_0_0.pt", "fp16_states_0_0_1.pt"}
    saved = [r["saved"] for r in whole]
    for form in ("checkpoint", "full", "gathered", "shard"):
        for when in ("at once", "later"):
            again = pool2.run(continued, form, when, str(tmp_path), saved, config=config)
            for one, other in zip(whole, again, strict=True):
                assert same(one["seen"], other["seen"]), (form, when)
                assert same(one["end"], other["end"]), (form, when)


# -- sums in fp32 -------------------------------------------------------------------------------------------


def sums() -> dict[str, Any]:
    model, optimizer = wrap("adamw")
    steps(model, optimizer, range(2))
    pieces = [p for _, p in model.virtual_named_parameters()]
    ranks.train_step(model, batch(2, smp.dp_rank()))
    assert all(p.grad.dtype is torch.float32 for p in pieces if p.grad is not None)
    return {"state": optimizer.state_dict()}


def test_gradients_add_up_in_full(pool2: RankPool) -> None:
    config = {**DDP, "bf16": True, "_fp32_grad_accumulation": True}
    plain = pool2.run(sums, config=config)
    sharded = pool2.run(sums, config={**config, "shard_optimizer_state": True})
    assert same(plain, sharded)


# -- with slices ------------------------------------------------------------------------------------------


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Linear(12, 6)
        self.whole = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(torch.tanh(self.cut(x)))


def with_slices() -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = Cut()
    smp.set_tensor_parallelism(module.cut)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(two_groups(model, MAKE["lamb"]), static_loss_scale=64.0)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + smp.dp_rank()))
        ranks.train_step(model, x)
        norms.append(optimizer.clip_master_grads(1e9))
        optimizer.step()
    axes = [axis for axis in optimizer.master_distribution_axis.values() if axis is not None]
    assert axes == [1]
    return {"norms": norms, "weights": dict(model.state_dict()), "state": optimizer.state_dict()}


@pytest.mark.heavy
def test_slices_and_replicas(pool4: RankPool) -> None:
    """tp 2 x rdp 2, LAMB: sharded or not, the same."""
    config = {**DDP, "tensor_parallel_degree": 2, "fp16": True}
    plain = pool4.run(with_slices, config=config)
    sharded = pool4.run(with_slices, config={**config, "shard_optimizer_state": True})
    for one, other in zip(plain, sharded, strict=True):
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-6)
        for index, master in one["state"]["fp32_from_fp16"].items():
            torch.testing.assert_close(other["state"]["fp32_from_fp16"][index], master, rtol=1e-4, atol=1e-5)
