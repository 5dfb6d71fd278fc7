"""What a call costs beside its own work: units, glue, transfers, and switching between microbatches.

    python benchmarks/unit_overhead.py

The model is a row of tiny linear layers, so that a step is nearly all bookkeeping. Each row differs from
another in one thing; the difference of their step times divided by how often that happens is its price:

    one process            plain PyTorch, the same loop over microbatches: subtracted from all others
    contiguous             layers cut once: a unit call for each layer, one transfer each way
    contiguous, glue       the same, with an addition by the root's own forward after every layer
    alternating            neighbours on different stages: one transfer each way for each layer
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from common import RankResult, Rounds, Row, main, step_time, table
from measure import timed_steps
from torch import Tensor, nn

STAGES = 2


class Chain(nn.Module):
    """Tiny layers in a row; with `glue`, each is added to what came before by this module's own code."""

    def __init__(self, num_layers: int, glue: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.glue else layer(x)
        return x


def plain(args: argparse.Namespace) -> RankResult:
    """The chain in one process."""
    torch.set_num_threads(1)
    model = Chain(args.layers, glue=False)
    x = torch.ones(args.micro, 4)

    def step() -> float:
        total = 0.0
        for part in x.chunk(args.micro):
            loss = model(part).mean() / args.micro
            loss.backward()
            total += loss.item()
        model.zero_grad(set_to_none=True)
        return total

    return timed_steps(step, args.steps)


def ours(owner: Callable[[int, int], int], glue: bool = False) -> Callable[[argparse.Namespace], RankResult]:
    """The chain over two stages. owner: from a layer's index and the number of layers to its stage."""

    def run(args: argparse.Namespace) -> RankResult:
        import shardwright.torch as smp

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        smp.init({
            "pipeline_parallel_degree": STAGES, "microbatches": args.micro, "auto_partition": False,
            "log_level": "warning",
        })  # fmt: skip
        chain = Chain(args.layers, glue)
        for index, layer in enumerate(chain.layers):
            smp.set_partition(layer, owner(index, args.layers))
        model = smp.DistributedModel(chain)
        x = torch.ones(args.micro, 4)

        @smp.step
        def train_step(model: nn.Module, x: Tensor) -> Tensor:
            loss = model(x).mean()
            model.backward(loss)
            return loss

        def step() -> float:
            loss = train_step(model, x).reduce_mean().item()
            for parameter in model.parameters():
                parameter.grad = None
            return loss

        return timed_steps(step, args.steps)

    return run


def _halves(index: int, count: int) -> int:
    return index * STAGES // count


def _alternating(index: int, count: int) -> int:
    return index % STAGES


ROWS = {
    "one process": Row(1, 1, plain),
    "contiguous": Row(STAGES, 1, ours(_halves)),
    "contiguous, glue": Row(STAGES, 1, ours(_halves, glue=True)),
    "alternating": Row(STAGES, 1, ours(_alternating)),
}


def report(results: dict[str, Rounds], args: argparse.Namespace) -> str:
    """Step times, and the price of each kind of call in microseconds (forward and backward together).

    Once by the clock, and once by the processor time of a rank, which other load disturbs less.
    """
    times = {name: time for name, rounds in results.items() if (time := step_time(rounds))}
    calls = args.layers * args.micro
    clock = {name: time.seconds / calls * 1e6 for name, time in times.items()}
    cpu = {name: time.cpu_s / calls * 1e6 for name, time in times.items()}
    lines = [
        [
            name,
            t.seconds * 1e3,
            f"{clock[name]:.0f}",
            f"{cpu[name]:.0f}",
            f"{t.num_quiet}/{t.num_steps}",
            t.spread,
        ]
        for name, t in times.items()
    ]
    header = ["row", "step ms", "us per call", "CPU us per call and rank", "quiet steps", "spread"]
    text = [table(header, lines), ""]
    text.append(f"{args.layers} layers, {args.micro} microbatches: {calls} calls per step on each rank")
    prices = {
        "unit call": ("contiguous", "one process"),
        "glue operation": ("contiguous, glue", "contiguous"),
        "transfer there and back": ("alternating", "contiguous"),
    }
    for what, (row, without) in prices.items():
        if row in times and without in times:
            by_cpu = cpu[row] - cpu[without] / (STAGES if without == "one process" else 1)
            text.append(f"{what}: {clock[row] - clock[without]:.0f} us by the clock, {by_cpu:.0f} us CPU of each rank")
    return "\n".join(text)


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a row in one round")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--micro", type=int, default=8, help="microbatches")
    return parser


if __name__ == "__main__":
    main(ROWS, report, parse())
