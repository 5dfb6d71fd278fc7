"""Scripts for the original with a Trainer of their own and its files, and with a detector in half precision.

Each is a script in small: it uses names, positions and orders of calls as such scripts do, through the original import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_models
import smdistributed.modelparallel.torch as smp
from client_optimizers import ClientFP16Optimizer
from client_steps import BATCH, LENGTH, REPLICAS, SLICES, STAGES, agreed, causal_step, ids
from harness import RankPool

# -- A Trainer of the script's own, with its files ------------------------------------------------------------------


def bloom(folder: str, begin: str) -> list[float]:
    """Train, save in both ways, and go on; or begin with what was saved in one of them. Returns the losses of the end."""

    def build() -> Any:
        model = hf_models.make("gpt2")
        smp.set_tensor_parallelism(model, True)
        model = smp.DistributedModel(model, backward_passes_per_step=1)
        optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            static_loss_scale=1.0, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**4, "scale_window": 1000},
        )  # fmt: skip
        cfg = smp.state.cfg
        inner = optimizer.optimizer if cfg.fp16 or cfg.sharded_data_parallel_degree > 1 else optimizer
        assert isinstance(inner, torch.optim.Optimizer)
        assert all(one is other for one, other in zip(inner.param_groups, optimizer.param_groups, strict=True))
        assert not hasattr(optimizer, "train")
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))

    def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            loss = causal_step(model, ids(step), torch.ones(BATCH, LENGTH))
            if smp.state.cfg.fp16:
                optimizer.clip_master_grads(1.0)
            optimizer.step()
            if not (smp.state.cfg.fp16 and optimizer.overflow):
                schedule.step()
            losses.append(loss.detach().reduce_mean().item())
        return losses

    model, optimizer, schedule = build()
    sharded = smp.state.cfg.shard_optimizer_state
    assert not hasattr(smp.state.cfg, "no_such_key")
    if begin == "new":
        train(model, optimizer, schedule, range(2))
        smp.save_checkpoint(path=folder, tag="pytorch_model.bin", partial=True, model=model, optimizer=optimizer)
        state = optimizer.local_state_dict(gather_if_shard=False)
        if smp.rdp_rank() == 0 or sharded:
            smp.save(state, f"{folder}/optimizer.pt", partial=True, v3=sharded)
        weights = model.state_dict()  # collective: every rank
        if smp.rank() == 0:
            torch.save(weights, f"{folder}/whole.bin")
    elif begin == "resume":
        smp.resume_from_checkpoint(folder, tag="pytorch_model.bin", partial=True)
    else:
        content = torch.load(f"{folder}/whole.bin")
        content["_smp_is_partial"] = False  # a whole model in the library's own names
        model.load_state_dict(content, strict=True)
        assert content["_smp_is_partial"] is False
        optimizer.load_state_dict(smp.load(f"{folder}/optimizer.pt", partial=True, back_compat=not sharded))
    if begin != "new":
        for _ in range(2):
            schedule.step()
    losses = train(model, optimizer, schedule, range(2, 4))
    gathered = smp.allgather(torch.tensor(losses), smp.DP_GROUP)
    assert torch.equal(torch.cat(gathered), torch.tensor(losses * smp.dp_size()))
    return losses


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({**STAGES, "fp16": True}, id="pp2_fp16"),
        pytest.param(SLICES, id="tp2"),
        pytest.param({**REPLICAS, "shard_optimizer_state": True}, id="dp2_sharded", marks=pytest.mark.heavy),
    ],
)
def test_a_trainer_of_the_script(pool2: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    wanted, resumed, loaded = (
        pool2.run(bloom, str(tmp_path), begin, config=config, timeout_s=240) for begin in ("new", "resume", "load")
    )
    assert resumed == wanted
    assert loaded == wanted
    assert (tmp_path / "pytorch_model.bin_partial").is_dir()


# -- A detector ---------------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with smp.partition(0):
            self.layer1 = nn.Linear(6, 8)
        with smp.partition(1):
            self.layer2 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.layer2(Square.apply(self.layer1(x).tanh()))
        return {"loss_box": out[:, :2].square().mean(), "loss_kind": (out[:, 2:] - 1).square().mean()}


@smp.step
def detection_step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Tensor]:
    losses = model(x.half())
    optimizer.backward(sum(losses.values()), update_master_grads=False)
    return losses


def detector(folder: str) -> Any:
    calls: list[str] = []
    model = smp.DistributedModel(Detector())
    model.half()
    before = model.state_dict()  # before there are stages: every rank has all
    assert set(before) == {"layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"}
    groups = [{"params": [p], "lr": 0.02, "weight_decay": 0.0 if n.endswith("bias") else 0.01} for n, p in model.named_parameters()]
    inner = smp.optimizers.FusedNovoGrad(
        groups, lr=0.01, betas=(0.9, 0.4), eps=1e-8, grad_averaging=False, init_zero=False, reg_inside_moment=True, bias_correction=True
    )
    optimizer = smp.DistributedOptimizer(ClientFP16Optimizer(inner, model, 2.0**4, agreed))
    assert isinstance(optimizer, ClientFP16Optimizer)

    def in_hook(model: Any, optimizer: Any) -> None:
        calls.append("partitioned")
        assert isinstance(optimizer, ClientFP16Optimizer)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
        optimizer.init_master_params()

    model.register_post_partition_hook(in_hook)
    model.register_post_partition_hook(lambda model, optimizer: calls.append("second"))
    model.register_post_step_hook(lambda model, optimizer: calls.append("stepped"))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer.optimizer, [100])
    sums = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        losses = {name: value.reduce_mean() for name, value in detection_step(model, optimizer, x).items()}
        optimizer.update_master_grads()
        optimizer.step()
        schedule.step()
        stacked = torch.stack([losses[name].float() for name in sorted(losses)])
        dist.reduce(stacked, dst=smp.get_dp_group()[0], group=smp.get_dp_process_group())
        sums.append(stacked.tolist())
    assert calls == ["partitioned", "second", "stepped"]
    model.register_post_partition_hook(lambda model, optimizer: calls.append("at once"))
    assert calls[-1] == "at once"
    assert [len(group["params"]) for group in optimizer.param_groups] == ([1, 1, 0, 0] if smp.pp_rank() == 0 else [0, 0, 1, 1])
    data = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "iteration": 3}
    if smp.dp_rank() == 0:
        smp.save(data, f"{folder}/model.pth", True)
    again = smp.load(f"{folder}/model.pth", partial=True)
    model.load_state_dict(again["model"], strict=True)
    optimizer.load_state_dict(again["optimizer"])
    assert again["iteration"] == 3
    if smp.rank() == 0:
        smp.broadcast({"done": True}, smp.WORLD)
    else:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == {"done": True}
    assert smp.allgather(bool(sums), smp.MP_GROUP) == [True, True]
    return sums


def test_a_detector(pool2: RankPool, tmp_path: Path) -> None:
    config = {**STAGES, "auto_partition": False, "default_partition": 0, "fp16_params": True}
    one, other = pool2.run(detector, str(tmp_path), config=config, timeout_s=240)
    assert one == other
    assert sum(one[-1]) < sum(one[0])
