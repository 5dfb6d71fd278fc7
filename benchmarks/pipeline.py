"""Pipeline parallelism over two processes: ours beside torch.distributed.pipelining and one process.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --rows "single 1 thread|torch 1F1B|shardwright" --rounds 2

A step is forward and backward of the whole batch in microbatches, AdamW, and clearing the gradients.
efficiency: tokens/s over twice those of the best one-thread process of the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import model as gpt
import torch
from common import RankResult, Rounds, Row, main, median_of, start, step_time, table
from measure import timed_steps
from model import Sizes
from torch import Tensor, nn

STAGES = 2
TWO_SINGLES = "two independent processes"
PEER = "torch 1F1B"


def single(args: argparse.Namespace) -> RankResult:
    """Plain PyTorch in one process, microbatch by microbatch."""
    start()
    sizes = Sizes.of(args)
    whole = nn.Sequential(*gpt.layers(sizes))
    optimizer = gpt.adamw(whole)
    x, y = gpt.batch(sizes)

    def step() -> float:
        total = 0.0
        for ids, labels in zip(x.chunk(sizes.micro), y.chunk(sizes.micro), strict=True):
            loss = gpt.loss_of(whole(ids), labels) / sizes.micro
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return timed_steps(step, args.steps)


def profile(args: argparse.Namespace) -> RankResult:
    """Seconds for one microbatch of each kind of layer, forward and backward: what balance can reach."""
    start()
    sizes = Sizes.of(args)
    layers = gpt.layers(sizes)
    x, y = (tensor[: sizes.batch // sizes.micro] for tensor in gpt.batch(sizes))
    hidden = torch.randn(len(x), sizes.seq, sizes.d, requires_grad=True)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(12):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    return {
        "embed_s": seconds(lambda: layers[0](x).sum().backward()),
        "block_s": seconds(lambda: layers[1](hidden).sum().backward()),
        "head_s": seconds(lambda: gpt.loss_of(layers[-1](hidden), y).backward()),
    }


def split_of(text: str, sizes: Sizes) -> list[int]:
    """Read "5,3": how many blocks each stage gets."""
    split = [int(word) for word in text.split(",")]
    if sum(split) != sizes.layers or len(split) % STAGES:
        raise SystemExit(f"split {text!r} must have {sizes.layers} blocks in a multiple of {STAGES} parts")
    return split


def torch_pipelining(schedule: str, option: str) -> Callable[[argparse.Namespace], RankResult]:
    """A schedule of torch.distributed.pipelining, with stages cut by the option `split` or `split2`."""

    def run(args: argparse.Namespace) -> RankResult:
        from torch.distributed import pipelining

        rank, sizes = start(), Sizes.of(args)
        x, y = gpt.batch(sizes)
        split = split_of(getattr(args, option), sizes)
        layers, parts, first = gpt.layers(sizes), [], 1
        for index, count in enumerate(split):
            part = layers[first : first + count]
            first += count
            before, after = (layers[:1] if index == 0 else []), (layers[-1:] if first > sizes.layers else [])
            parts.append(nn.Sequential(*before, *part, *after))
        del layers
        own = range(rank, len(split), STAGES)
        modules = [parts[index] for index in own]
        del parts
        optimizer = gpt.adamw(nn.ModuleList(modules))
        device = torch.device("cpu")
        stages = [
            pipelining.PipelineStage(module, index, len(split), device)
            for module, index in zip(modules, own, strict=True)
        ]
        make: Any = getattr(pipelining, schedule)
        runner = make(stages if len(stages) > 1 else stages[0], sizes.micro, loss_fn=gpt.loss_of)
        last = rank == STAGES - 1

        def step() -> float | None:
            losses: list[Tensor] = []
            runner.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if last else {}))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return sum(loss.item() for loss in losses) / sizes.micro if last else None

        return timed_steps(step, args.steps)

    return run


def shardwright(option: str = "", **config: Any) -> Callable[[argparse.Namespace], RankResult]:
    """Ours: partitioned by itself, or by hand as the option says, with owners 0, 1, 0, 1 ..."""

    def run(args: argparse.Namespace) -> RankResult:
        import shardwright.torch as smp

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sizes = Sizes.of(args)
        smp.init(
            {
                "pipeline_parallel_degree": STAGES,
                "microbatches": sizes.micro,
                "auto_partition": not option,
                **config,
            }
        )
        layers = gpt.layers(sizes)
        if option:
            split = split_of(getattr(args, option), sizes)
            owners = [index % STAGES for index, count in enumerate(split) for _ in range(count)]
            for layer, owner in zip(layers, [0, *owners, (len(split) - 1) % STAGES], strict=True):
                smp.set_partition(layer, owner)
        whole = smp.DistributedModel(nn.Sequential(*layers))
        del layers
        optimizer = smp.DistributedOptimizer(gpt.adamw(whole))
        x, y = gpt.batch(sizes)

        @smp.step
        def train_step(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
            loss = gpt.loss_of(model(ids), labels)
            model.backward(loss)
            return loss

        def step() -> float:
            loss = train_step(whole, x, y).reduce_mean().item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return timed_steps(step, args.steps)

    return run


ROWS = {
    "profile": Row(2, 1, profile),
    "single 1 thread": Row(1, 1, single),
    "single 2 threads": Row(1, 2, single),
    TWO_SINGLES: Row(2, 1, single),
    "torch GPipe": Row(STAGES, 1, torch_pipelining("ScheduleGPipe", "split")),
    PEER: Row(STAGES, 1, torch_pipelining("Schedule1F1B", "split")),
    "torch Interleaved1F1B": Row(STAGES, 1, torch_pipelining("ScheduleInterleaved1F1B", "split2")),
    "shardwright": Row(STAGES, 1, shardwright()),
    "shardwright, optimize speed": Row(STAGES, 1, shardwright(optimize="speed")),
    "shardwright, by hand": Row(STAGES, 1, shardwright("split")),
    "shardwright, virtual stages by hand": Row(STAGES, 1, shardwright("split2")),
    "shardwright, simple schedule": Row(STAGES, 1, shardwright(pipeline="simple")),
}


def report(results: dict[str, Rounds], args: argparse.Namespace) -> str:
    """The table of ratios, and the bounds that they are measured against."""
    sizes = Sizes.of(args)
    bound = sizes.micro / (sizes.micro + STAGES - 1)
    times = {name: time for name, rounds in results.items() if (time := step_time(rounds))}
    tokens = sizes.batch * sizes.seq
    speed = {name: tokens * (2 if name == TWO_SINGLES else 1) / time.seconds for name, time in times.items()}
    peak = {
        name: [median_of(results[name], "peak_bytes", r) or 0 for r in range(ROWS[name].num_ranks)] for name in times
    }

    def ratio(name: str, other: str, factor: float = 1.0) -> float | None:
        return speed[name] / speed[other] / factor if other in speed else None

    lines = []
    for name, time in times.items():
        efficiency = ratio(name, "single 1 thread", 2.0)
        staged = ROWS[name].num_ranks == STAGES and name != TWO_SINGLES
        of_bound = efficiency / bound if efficiency and staged else None
        of_single = max(peak[name]) / peak["single 1 thread"][0] if "single 1 thread" in peak else None
        lines.append([
            name, time.seconds, f"{speed[name]:.0f}", efficiency, of_bound, ratio(name, PEER),
            ratio(name, "single 2 threads"), " / ".join(f"{b / 1e6:.0f}" for b in peak[name]), of_single,
            f"{time.num_quiet}/{time.num_steps}", time.foreign_cores, time.spread,
            median_of(results[name], "loss"),
        ])  # fmt: skip
    header = [
        "row", "step s", "tokens/s", "efficiency", "of bubble bound", f"vs {PEER}", "vs 2 threads",
        "peak MB per rank", "largest, of single", "quiet steps", "foreign cores", "spread", "first loss",
    ]  # fmt: skip
    text = [
        table(header, lines),
        "",
        f"bubble bound m/(m+p-1) = {bound:.3f} ({sizes.micro} microbatches, {STAGES} stages)",
    ]
    if "profile" in results:
        text += _balance(results["profile"], args)
    return "\n".join(text)


def _balance(rounds: Rounds, args: argparse.Namespace) -> list[str]:
    """What the splits could reach at best by balance alone, from the measured seconds of the layers."""
    embed, block, head = (median_of(rounds, key) or 0.0 for key in ("embed_s", "block_s", "head_s"))
    parts = {"embedding": embed, "block": block, "head and loss": head}
    lines = ["layers: " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())]
    for text in (args.split, args.split2):
        split = split_of(text, Sizes.of(args))
        work = [sum(split[rank::STAGES]) * block for rank in range(STAGES)]
        work[0] += embed
        work[(len(split) - 1) % STAGES] += head
        lines.append(f"split {text}: balance bound {sum(work) / STAGES / max(work):.3f}")
    return lines


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a row in one round")
    parser.add_argument("--split", default="5,3", help="blocks per stage")
    parser.add_argument("--split2", default="3,2,2,1", help="blocks per virtual stage")
    Sizes.add_options(parser)
    return parser


if __name__ == "__main__":
    main(ROWS, report, parse())
