"""Memory of a microbatch: watched on fake tensors, and played for a part of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from shardwright.partition.footprint import Border, Footprint, Stretch, peaks
from shardwright.partition.meter import measure
from shardwright.partition.shorten import lengthened_trace, shortened
from shardwright.partition.trace import trace

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    def __init__(self, blocks: int = 6, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 50)
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = torch.zeros(3, 17, dtype=torch.long)


def allocated(step: Callable[[], Any]) -> int:
    """The most that torch's allocator had given out at one time, as its own profiler saw it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    live = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def real_step(net: nn.Module) -> tuple[int, int]:
    """Peaks of a first and a second backward into the same gradients."""
    net(IDS).backward()
    net.zero_grad(set_to_none=True)
    return allocated(lambda: net(IDS).backward()), allocated(lambda: net(IDS).backward())


def test_peak_is_that_of_the_allocator() -> None:
    net = Net()
    found = peaks(measure(net, (IDS,), {}))
    first, second = real_step(net)
    assert abs(max(found.first_backward_bytes, found.forward_bytes) - first) < 512  # scalars are rounded up
    assert abs(max(found.backward_bytes, found.forward_bytes) - second) < 512
    assert found.kept_bytes < found.backward_bytes


def test_recomputed_blocks() -> None:
    net = Net()
    names = [f"blocks.{n}" for n in range(6)]
    found = peaks(measure(net, (IDS,), {}), checkpointed=names)
    first, second = real_step(Net(recompute=True))
    output = IDS.numel() * WIDTH * 4  # torch stops the second forward somewhere before it, and drops what is there late
    assert abs(max(found.first_backward_bytes, found.forward_bytes) - first) < 1.5 * output
    assert abs(max(found.backward_bytes, found.forward_bytes) - second) < 1.5 * output
    assert found.checkpoint_bytes == 6 * IDS.numel() * WIDTH * 4


def test_model_is_left_as_it_was() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    measure(net, (IDS,), {})
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_cut_short_and_stretched_is_the_same() -> None:
    net = Net(blocks=9)
    whole, seen = measure(net, (IDS,), {}), trace(net, (IDS,))
    with shortened(net) as runs:
        assert [name for name, _ in net.blocks.named_children()] == ["0", "1", "8"]
        short, trace_of_short = measure(net, (IDS,), {}), trace(net, (IDS,))
    assert len(net.blocks) == 9
    assert short.lengthened(runs) == whole
    stretched = lengthened_trace(trace_of_short, runs)
    assert stretched.borrowed == seen.borrowed
    assert stretched.records.keys() == seen.records.keys()
    for name, record in seen.records.items():
        assert stretched.records[name] == record, name


def test_only_equal_blocks_are_left_out() -> None:
    net = Net(blocks=9)
    net.blocks[4].up.bias.requires_grad_(False)
    with shortened(net) as runs:
        assert [run.left_out for run in runs] == [("blocks.2",), ("blocks.7",)] or len(net.blocks) == 7
    net.blocks[2].up.weight = net.blocks[3].up.weight
    with shortened(net):
        assert {"2", "3"} <= set(net.blocks._modules)


def test_larger_microbatch() -> None:
    net = Net()
    one, three = measure(net, (IDS,), {}), measure(net, (IDS.repeat(3, 1),), {})
    estimated, exact = peaks(one.enlarged(3)), peaks(three)
    assert estimated.backward_bytes == pytest.approx(exact.backward_bytes, rel=0.02)


MADE = Footprint(
    forward=(Stretch("a", "a", 100, 60), Stretch("b", "b", 90, 50)),
    light=(Stretch("a", "a", 40, 10), Stretch("b", "b", 30, 0)),
    backward=(Stretch("b", "b", 70, -30, 20), Stretch("a", "a", 45, -20, 30)),
    borders={"a": Border(0, 0), "b": Border(10, 4)},
)


def test_played_whole() -> None:
    found = peaks(MADE)
    assert (found.kept_bytes, found.forward_bytes) == (110, 150)
    assert found.first_backward_bytes == 110 + 70
    assert found.backward_bytes == 110 + 70


def test_played_on_two_stages() -> None:
    first = peaks(MADE, lambda home: home == "a", exits=["b"])
    assert (first.kept_bytes, first.forward_bytes) == (60 - (10 - 4), 100)  # what crosses goes, but what it keeps
    assert first.backward_bytes == 54 + 10 + 45  # the gradient of what crossed is received
    second = peaks(MADE, lambda home: home == "b", entries=["b"])
    assert (second.kept_bytes, second.forward_bytes) == (10 + 50, 10 + 90)


def test_inputs_that_only_recomputation_keeps() -> None:
    made = Footprint(MADE.forward, MADE.light, MADE.backward, {"a": Border(0, 0), "b": Border(10, 0, 10)})
    with_saved = peaks(MADE, checkpointed=["b"])
    assert (with_saved.kept_bytes, with_saved.checkpoint_bytes) == (60, 10)  # what `a` left holds its input
    assert peaks(made, checkpointed=["b"]).kept_bytes == 60 + 10


def test_reduction_under_way() -> None:
    assert peaks(MADE, transit_bytes=1000).first_backward_bytes == 110 - 30 + 45 + 2 * (20 + 30)
    assert peaks(MADE, transit_bytes=5).first_backward_bytes == 110 + 70 + 5
