"""Random models in random layouts, saved and resumed in other ones; the property that training goes on.

    python tests/layout_examples.py SEED COUNT

Each example is a model, two layouts and a kind of checkpoint. The first layout trains, saves, and trains on; the second one
resumes and trains the same steps. Weights, moments and masters come back bit for bit, in any layout; losses go on as without
an interruption, bit for bit in the same layout.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import any_layout
import models
import shardwright.torch as smp
from any_layout import layout_name, train
from forked_ranks import Job

STEPS, SAVED_AT = 6, 3
LAYOUTS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4), (1, 2, 1), (2, 2, 1), (1, 2, 2)]
WAITS = {"timeout_s": 120, "startup_timeout_s": 240}


@dataclass(frozen=True)
class Side:
    """One layout. sharding: "", "state" or "parameters"."""

    layout: any_layout.Layout
    sharding: str

    @property
    def config(self) -> dict[str, Any]:
        more: dict[str, Any] = {"shard_optimizer_state": True} if self.sharding == "state" else {}
        if self.sharding == "parameters":
            more = {"sharded_data_parallel_degree": self.layout[2], "sdp_gradient_clipping": 0}
        return {**any_layout.config(self.layout, **more), **WAITS}


@dataclass(frozen=True)
class Example:
    """precision: "" for fp32.   files: saved by `smp.save`, not as a checkpoint.   depth, width, tied, doubled: of the model, see `Net`."""

    before: Side
    after: Side
    partial: bool
    precision: str
    depth: int
    width: int
    tied: bool
    doubled: bool
    files: bool = False

    def __str__(self) -> str:
        sides = [f"{layout_name(side.layout)} {side.sharding}".strip() for side in (self.before, self.after)]
        kind = "files" if self.files else "partial" if self.partial else "full"
        traits = f"depth {self.depth}, width {self.width}, tied {self.tied}, doubled {self.doubled}"
        return f"{' -> '.join(sides)}, {kind}, {self.precision or 'fp32'}, {traits}"


def draw_example(draw: random.Random) -> Example:
    def side() -> Side:
        layout = draw.choice(LAYOUTS)
        kinds = ["", "state"] if layout[2] > 1 else [""]
        if layout[2] > 1 and layout[:2] == (1, 1):
            kinds.append("parameters")
        return Side(layout, draw.choice(kinds))

    before = side()
    after = before if draw.random() < 0.2 else side()
    precision = draw.choice(["", "", "bf16", "fp16"])
    # sharded parameters of one block are of one dtype
    may_be_doubled = not precision and "parameters" not in (before.sharding, after.sharding)
    partial, depth, width, tied = draw.random() < 0.65, draw.randint(3, 6), draw.randrange(6, 12), draw.random() < 0.4
    doubled = may_be_doubled and draw.random() < 0.5
    return Example(before, after, partial, precision, depth, width, tied, doubled, partial and draw.random() < 0.5)


# ------------------------------------------------------------------ on the ranks


class Net(nn.Module):
    """Blocks of odd sizes with a norm, a constant and a counter.

    tied: the first and the last block share a weight.   doubled: one parameter and one buffer are in float64.
    """

    constant: Tensor
    calls: Tensor

    def __init__(self, example: Example) -> None:
        super().__init__()
        wide, inner = models.plain_modules.WIDTH, example.width
        # tensor parallelism cuts what divides; one size is even so that there is something to cut
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, inner + i % 2), nn.Tanh(), nn.Linear(inner + i % 2, wide))
            for i in range(example.depth)
        )
        if example.tied:
            last = example.depth - 1 - (example.depth - 1) % 2
            self.blocks[last][0].weight = self.blocks[0][0].weight  # type: ignore[index, union-attr]
        self.norm = nn.LayerNorm(wide)
        self.head = nn.Linear(wide, models.plain_modules.CLASSES)
        self.one = nn.Parameter(torch.ones(1))
        dtype = torch.float64 if example.doubled else torch.float32
        self.factor = nn.Parameter(torch.rand(wide, dtype=dtype) + 0.5)
        self.register_buffer("constant", torch.rand(3, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        h = x.to(self.one.dtype)
        for block in self.blocks:
            h = h + block(h) * self.one
        h = h * self.factor.to(h.dtype) + self.constant.sum().to(h.dtype)
        return self.head(self.norm(h)).float()


def build(example: Example, seed: int) -> tuple[Any, Any, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Net(example)
    for block in module.blocks:
        smp.set_tensor_parallelism(block)
    model = smp.DistributedModel(module)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 2e-3},
            {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1, "lr": 1e-3},
        ],
        eps=1e-4,
    )
    made = models.Made(module, models.vector_batch, models.classification_loss)
    return made, model, smp.DistributedOptimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})


def snapshot(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that training has made, whole, by name."""
    names = [name for group in optimizer._full_group_names() for name in group]
    content = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "calls"}
    found: dict[str, Any] = dict(weights)
    for index, values in content["state"].items():
        found.update({f"{names[index]} {key}": torch.as_tensor(value).clone() for key, value in values.items()})
    found.update({f"{names[i]} master": m.clone() for i, m in content.get("fp32_from_fp16", {}).items()})
    found["scale"] = torch.tensor(float(optimizer.loss_scale)) if "loss_scaler" in content else torch.tensor(0.0)
    return found


def save_files(f: str, model: Any, optimizer: Any, *, v3: bool) -> None:
    """v3: each rank its own shard, as scripts do with sharded state; otherwise it is gathered."""
    content = {"optimizer": optimizer.local_state_dict(gather_if_shard=not v3), "place": smp.pp_rank(), "step": SAVED_AT}
    if v3 or smp.rdp_rank() == 0:
        smp.save({"nets": [model.local_state_dict()], **content}, f, v3=v3)
    smp.barrier()


def save(path: str, example: Example) -> tuple[dict[str, Any], list[float]]:
    made, model, optimizer = build(example, 0)
    train(made, model, optimizer, 0, SAVED_AT)
    if example.files:
        save_files(f"{path}/net", model, optimizer, v3=bool(example.before.sharding))
    else:
        smp.save_checkpoint(
            path, "mid", partial=example.partial, model=model, optimizer=optimizer, user_content={"step": SAVED_AT}
        )
    return snapshot(model, optimizer), train(made, model, optimizer, SAVED_AT, STEPS)


def resume(path: str, example: Example) -> tuple[dict[str, Any], list[float]]:
    made, model, optimizer = build(example, 1)
    if example.files:
        content = smp.load(f"{path}/net")
        model.load_state_dict(content["nets"][0])
        optimizer.load_state_dict(content["optimizer"])
    else:
        content = smp.resume_from_checkpoint(path, partial=example.partial)
    train(made, model, optimizer, 0, 1, update=False)  # partitions, and changes nothing
    optimizer.zero_grad()
    return snapshot(model, optimizer), train(made, model, optimizer, content["step"], STEPS)


# ------------------------------------------------------------------ in the process that looks on


def run(side: Side, function: Any, path: str, example: Example) -> list[tuple[dict[str, Any], list[float]]]:
    size = side.layout[0] * side.layout[1] * side.layout[2]
    config = {**side.config, **({example.precision: True} if example.precision else {})}
    with Job(size, function, path, example, config=config) as job:
        ended = job.wait(300)
    failures = [rank.error for rank in ended if rank.error is not None]
    assert not failures, "\n".join(failures)
    return [rank.value for rank in ended]


def check(example: Example) -> None:
    with tempfile.TemporaryDirectory() as path:
        (saved, losses), *_ = run(example.before, save, path, example)
        resumed = run(example.after, resume, path, example)
    tolerance = 1e-5 if not example.precision else 3e-2
    for rank, (found, went_on) in enumerate(resumed):
        assert found.keys() == saved.keys(), (rank, found.keys() ^ saved.keys())
        others = [name for name, value in saved.items() if not torch.equal(found[name], value)]
        assert not others, f"rank {rank}: {len(others)} of {len(saved)} tensors differ, the first are {others[:5]}"
        if example.before == example.after:
            assert went_on == losses, (rank, went_on, losses)
        for one, other in zip(went_on, losses, strict=True):
            assert abs(one - other) <= tolerance * abs(other), (rank, went_on, losses)


def main(seed: int, count: int) -> None:
    torch.set_num_threads(1)
    for number in range(count):
        example = draw_example(random.Random(f"{seed} {number}"))
        print(f"{seed}/{number}: {example}", flush=True)
        check(example)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
