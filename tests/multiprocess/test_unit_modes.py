"""Randomness, recomputation and autocast around units (design rules 8 and 13)."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import step_cases
from harness import RankPool
from step_cases import Case, Verdict

WIDTH = 8
BATCH = 4


def one_tensor(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)),), {}


def train(model: Any, x: Tensor) -> Any:
    out = model(x)
    loss = out.square().mean()
    model.backward(loss)
    return loss, out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.num_calls += 1
        return x + self.down(torch.tanh(self.up(x))) * scale


# ------------------------------------------------------------------ a model's own checkpointing


class Checkpointed(nn.Module):
    """Blocks under torch.utils.checkpoint; each counts how often its forward runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = torch.utils.checkpoint.checkpoint(block, h, 0.5, use_reentrant=self.reentrant)
        return h


class CheckpointedPairs(Checkpointed):
    """Two blocks of different stages under one checkpoint, with glue between them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for pair in (self.blocks[:2], self.blocks[2:]):

            def both(h: Tensor, pair: Any = pair) -> Tensor:
                return pair[1](pair[0](h) * 1.5) + h

            h = torch.utils.checkpoint.checkpoint(both, h, use_reentrant=self.reentrant)
        return h


BLOCKS = {"blocks.1": 1, "blocks.2": 0, "blocks.3": 1}


# ------------------------------------------------------------------ autocast


def autocast_bfloat16(model: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    loss = out.float().square().mean()
    model.backward(loss)
    return loss, out


def autocast_float16(model: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = out.float().square().mean()
    model.backward(loss)
    return loss, out


def autocast_off_inside(model: Any, x: Tensor) -> Any:
    """The same units under two autocast states within one step."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
        with torch.autocast("cpu", enabled=False):
            high = model(x)
    loss = (low.float() + high).square().mean()
    model.backward(loss)
    return loss, low, high


class Pure(nn.Module):
    """No residual: under autocast the border is crossed in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def inference(model: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        return model(x) * 2


# ------------------------------------------------------------------ randomness


class Dropped(nn.Module):
    """Layer drop decided by torch, Python and NumPy in glue, right after units that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), Draws())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        h = self.first(x)
        drawn = []
        for index, block in enumerate(self.blocks):
            kind = index % 3
            chance = float(torch.rand(())) if kind == 0 else random.random() if kind == 1 else float(numpy.random.rand())
            drawn.append(chance)
            if chance < 0.5:
                h = h + block(h)
        noise = torch.rand_like(h) + torch.randn(h.shape[0], 1) + nn.functional.dropout(h, 0.5)
        return h + 0.1 * noise, drawn


class Draws(nn.Module):
    """Draws from every generator inside a unit."""

    def forward(self, x: Tensor) -> Tensor:
        return x + random.random() + float(numpy.random.rand()) + torch.rand(())


def train_dropped(model: Any, x: Tensor) -> Any:
    out, drawn = model(x)
    loss = out.square().mean()
    model.backward(loss)
    return loss, out, drawn


def random_runs(microbatches: int) -> dict[str, Any]:
    """On each rank: the same seeds twice, then the second half again from a saved random state."""
    import shardwright.torch as smp
    from shardwright.engine.state import state

    def build() -> Any:
        torch.manual_seed(0)
        net = Dropped()
        for i in range(6):
            smp.set_partition(net.blocks[i], i % 2)
        return smp.DistributedModel(net)

    step = smp.step(train_dropped)

    def run(model: Any, steps: int) -> list[Any]:
        seen = []
        for number in range(steps):
            model.zero_grad(set_to_none=True)
            (x,), _ = one_tensor(number)
            loss, out, drawn = step(model, torch.cat([x[:1]] * 4))
            gradients = [p.grad.clone() for p in model.local_parameters() if p.grad is not None]
            seen.append((loss.outputs, out.outputs, drawn, gradients))
        return seen

    found: dict[str, Any] = {}
    model = build()
    torch.manual_seed(5)
    torch.rand(())
    found["once"] = run(model, 2)
    saved = torch.get_rng_state()
    found["then"] = run(model, 2)
    random.seed(99)
    numpy.random.seed(99)
    torch.set_rng_state(saved)
    found["again"] = run(model, 2)
    state._world = None  # as in a new process: nothing is wrapped yet
    model = build()
    torch.manual_seed(5)
    torch.rand(())
    found["twice"] = run(model, 2)
    found["outside"] = (torch.rand(()).item(), random.getstate()[1][:3])
    return found


CASES = [
    Case("checkpoint", lambda: Checkpointed(False), train, one_tensor, BLOCKS, steps=3),
    Case("checkpoint_reentrant", lambda: Checkpointed(True), train, one_tensor, BLOCKS, steps=3),
    Case("checkpoint_pairs", lambda: CheckpointedPairs(False), train, one_tensor, BLOCKS, reordered="uses on two stages"),
    Case("checkpoint_pairs_reentrant", lambda: CheckpointedPairs(True), train, one_tensor, BLOCKS, reordered="uses on two stages"),
    Case("autocast_bfloat16", lambda: Checkpointed(False), autocast_bfloat16, one_tensor, BLOCKS),
    Case("autocast_float16", Pure, autocast_float16, one_tensor, {"second": 1}),
    Case("autocast_pure", Pure, autocast_float16, one_tensor, {"second": 1}, microbatches=4),
    Case("autocast_off_inside", Pure, autocast_off_inside, one_tensor, {"second": 1}, reordered="two calls"),
    Case("inference_mode", Pure, inference, one_tensor, {"second": 1}, grad=False),
]  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(pool2: RankPool) -> dict[str, list[Verdict]]:
    return step_cases.run_cases(pool2, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_modes(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])


def test_blocks_are_recomputed(verdicts: dict[str, list[Verdict]]) -> None:
    """Every block's forward runs twice per microbatch: 3 steps, 2 microbatches."""
    for name in ("checkpoint", "checkpoint_reentrant"):
        counts = {n: int(b) for v in verdicts[name] for n, b in v.buffers.items()}
        assert counts == {f"blocks.{i}.num_calls": 12 for i in range(4)}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def test_randomness(pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 4, "auto_partition": False}
    ranks = pool2.run(random_runs, 4, config=config, timeout_s=90)
    for found in ranks:
        assert _same(found["once"], found["twice"])
        assert _same(found["then"], found["again"])
        assert not _same(found["once"][0][0], found["then"][0][0])
        for loss, out, drawn, _ in found["once"]:
            assert len({float(x) for x in loss}) == 4, "microbatches of equal data drew equal masks"
            assert not torch.equal(out[0], out[1])
            assert all(len(set(draws)) == 4 for draws in drawn)
    assert _same([f[0:3] for f in ranks[0]["once"]], [f[0:3] for f in ranks[1]["once"]])
    assert ranks[0]["outside"] == ranks[1]["outside"]
