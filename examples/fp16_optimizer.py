"""Train in half precision with an optimizer class of the script's own, which hooks make ready after the first step.

    python examples/fp16_optimizer.py
    shardwright run --pp 2 examples/fp16_optimizer.py
    shardwright run --tp 2 --ddp examples/fp16_optimizer.py
    shardwright run --nproc 2 --ddp -o shard_optimizer_state=true examples/fp16_optimizer.py

What a script did before the library had `fp16`: the class holds a torch optimizer and fp32 copies (masters) of its
parameters. Which parameters those are is known when the model is cut, or with sharded optimizer state at the end of the
first step; so a post-step hook makes the masters. `--save FILE` writes one file for each rank; `--load FILE` continues: the
weights at once, the masters in a hook, when they are there.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from smdistributed.modelparallel.torch.utils import get_distribution_axis
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp

WIDTH = 32
BATCH = 16


class FP16_Optimizer:
    """fp32 masters around a torch optimizer, and a loss scale that halves after an overflow."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: smp.DistributedModel, scale: float) -> None:
        self.optimizer = optimizer
        self.model = model
        self.loss_scale = scale
        self.overflow = False
        self.halves: list[list[nn.Parameter]] = []
        self.fp32_from_fp16: list[list[nn.Parameter]] = []

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def init_master_params(self) -> None:
        """Put fp32 copies into the groups. These hold what this rank updates, by now."""
        for group in self.param_groups:
            self.halves.append(list(group["params"]))
            group["params"] = [nn.Parameter(half.detach().float()) for half in group["params"]]
            self.fp32_from_fp16.append(group["params"])

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter of the model, its master)."""
        for halves, masters in zip(self.halves, self.fp32_from_fp16, strict=True):
            yield from zip(halves, masters, strict=True)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_grads_to_None)

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss.float() * self.loss_scale)

    def update_master_grads(self) -> None:
        """Move the gradients to the masters, unless some rank has one that is not finite."""
        bad = any(not half.grad.isfinite().all() for half, _ in self.pairs() if half.grad is not None)
        self.overflow = agreed_sum(float(bad)) > 0
        if not self.overflow:
            for half, master in self.pairs():
                master.grad = None if half.grad is None else half.grad.float() / self.loss_scale

    def clip_master_grads(self, max_norm: float) -> float:
        """Scale the gradients of the whole model down to this norm. Returns the norm before, -1 after an overflow."""
        if self.overflow:
            return -1.0
        norm = agreed_sum(sum(m.grad.square().sum().item() for h, m in self.pairs() if counts(h, m))) ** 0.5
        for _, master in self.pairs():
            if master.grad is not None:
                master.grad *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self, closure: Any = None) -> None:
        if self.overflow:
            self.loss_scale /= 2
            return
        self.optimizer.step()
        with torch.no_grad():
            for half, master in self.pairs():
                half.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        masters = [[m.detach() for m in group] for group in self.fp32_from_fp16]
        return {"loss_scale": self.loss_scale, "fp32_from_fp16": masters, "inner": self.optimizer.state_dict()}

    def load_masters(self, content: dict[str, Any]) -> None:
        """Take over scale and masters of a state_dict."""
        self.loss_scale = content["loss_scale"]
        with torch.no_grad():
            for group, saved in zip(self.fp32_from_fp16, content["fp32_from_fp16"], strict=True):
                for master, value in zip(group, saved, strict=True):
                    master.copy_(value)
            for half, master in self.pairs():
                half.copy_(master)


def agreed_sum(value: float) -> float:
    """Sum over the ranks of one replica of the model, over all with sharded optimizer state."""
    whole = smp.get_world_process_group() if smp.state.cfg.shard_optimizer_state else smp.get_mp_process_group()
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=whole)
    return total.item()


def counts(half: nn.Parameter, master: nn.Parameter) -> bool:
    """Is this rank the one that counts it in a norm? What tp ranks hold in common counts on the first of them."""
    if master.grad is None:
        return False
    return smp.state.cfg.shard_optimizer_state or smp.tp_rank() == 0 or get_distribution_axis(half) is not None


def param_name_to_index(optimizer: Any) -> dict[str, int]:
    """Name in the model -> index over the optimizer's groups, which hold masters; in place of the library's own."""
    indices = optimizer._param_id_to_index()
    masters = {id(half): master for half, master in optimizer.pairs()}
    named = optimizer.model.virtual_named_parameters if optimizer.redefined_params else optimizer.model.local_named_parameters
    return {name: indices[id(masters[id(half)])] for name, half in named() if id(half) in masters}


def register_hooks(model: smp.DistributedModel, checkpoint: dict[str, Any] | None) -> None:
    """Masters after the first step, and then what was saved for them."""

    def make_masters(model: smp.DistributedModel, optimizer: Any) -> None:
        optimizer.init_master_params()
        optimizer.param_name_to_index = functools.partial(param_name_to_index, optimizer)
        if checkpoint is not None:  # the model is cut already, so this runs at once
            model.register_post_partition_hook(fill_masters)

    def fill_masters(model: smp.DistributedModel, optimizer: Any) -> None:
        assert checkpoint is not None
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.load_masters(checkpoint["masters"])

    model.register_post_step_hook(make_masters)


class Net(nn.Module):
    """Residual layers around a narrow stem and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        with smp.tensor_parallelism(smp.tp_size() > 1):
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


@smp.step
def train_step(model: smp.DistributedModel, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x.half()).float(), y)
    optimizer.backward(loss)
    return loss


def samples(step: int) -> tuple[Tensor, Tensor]:
    """This replica's share of the inputs of a step, and a function of them."""
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    return x[smp.rdp_rank() :: smp.rdp_size()].contiguous(), y[smp.rdp_rank() :: smp.rdp_size()].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", metavar="FILE")
    parser.add_argument("--load", metavar="FILE")
    args = parser.parse_args()
    smp.init({"microbatches": 2, "prescaled_batch": True, "fp16_params": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net().half())
    optimizer = FP16_Optimizer(torch.optim.AdamW(model.parameters(), lr=0.005), model, scale=2.0**17)
    optimizer = smp.DistributedOptimizer(optimizer)
    checkpoint = smp.load(args.load, partial=True) if args.load else None
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"], same_partition_load=True)
        optimizer.loss_scale = checkpoint["masters"]["loss_scale"]
    register_hooks(model, checkpoint)
    for step in range(args.first, args.steps):
        loss = train_step(model, optimizer, *samples(step)).reduce_mean()
        optimizer.update_master_grads()
        norm = optimizer.clip_master_grads(1.0)
        optimizer.step()
        optimizer.zero_grad(set_grads_to_None=True)
        dist.all_reduce(loss, group=smp.get_rdp_process_group())
        if smp.rank() == 0:
            mean = loss.item() / smp.rdp_size()
            print(f"step {step + 1}: loss {mean:.6f}, norm {norm:.4f}, scale {optimizer.loss_scale:g}", flush=True)
    if args.save:
        content = {
            "model": model.local_state_dict(),
            "optimizer": optimizer.local_state_dict(gather_if_shard=False),
            "masters": optimizer.orig_state_dict(),
        }
        smp.save(content, args.save, partial=True, v3=True)
    smp.barrier()


if __name__ == "__main__":
    main()
