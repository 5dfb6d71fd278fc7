"""Data parallelism over two processes: ours, plain and with sharded optimizer state, beside PyTorch's own.

    python benchmarks/data_parallel.py
    python benchmarks/data_parallel.py --rows "single|DDP|shardwright, sharded state" --rounds 2

Each rank trains on its half of the batch; a step is forward and backward, AdamW, and clearing the gradients.
efficiency: tokens/s over twice those of the one-thread process of the same run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import model as gpt
import torch
import torch.distributed as dist
from common import RankResult, Rounds, Row, main, median_of, start, step_time, table
from measure import timed_steps
from model import Sizes
from torch import Tensor, nn

RANKS = 2
PEER = "DDP"
SINGLE = "single"


def own_batch(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """This rank's share of the batch."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    x, y = gpt.batch(Sizes.of(args))
    return x.chunk(size)[rank], y.chunk(size)[rank]


def state_bytes(optimizer: Any) -> int:
    """Memory of an optimizer's state on this rank."""
    return sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in _tensors(s))


def _tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, Tensor):
            yield getattr(value, "_local_tensor", value)


def measured(
    args: argparse.Namespace, train: Callable[[Tensor, Tensor], float], optimizer: Any, holder: Any = None
) -> RankResult:
    """Time steps. train: forward and backward on this rank's batch.   holder: of the state, if not the optimizer."""
    x, y = own_batch(args)
    losses: list[float] = []

    def step() -> float:
        losses.append(train(x, y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses[-1]

    result = timed_steps(step, args.steps)
    if int(os.environ["WORLD_SIZE"]) > 1:
        first = torch.tensor(losses[0])
        dist.all_reduce(first)
        result["loss"] = float(first) / RANKS
    return {**result, "state_bytes": state_bytes(optimizer if holder is None else holder)}


def plain(args: argparse.Namespace, whole: nn.Module, optimizer: Any, holder: Any = None) -> RankResult:
    """Time steps of a module that takes care of its gradients itself."""

    def train(x: Tensor, y: Tensor) -> float:
        loss = gpt.loss_of(whole(x), y)
        loss.backward()
        return loss.item()

    return measured(args, train, optimizer, holder)


def single(args: argparse.Namespace) -> RankResult:
    """Plain PyTorch in one process, on the whole batch."""
    start()
    whole = nn.Sequential(*gpt.layers(Sizes.of(args)))
    return plain(args, whole, gpt.adamw(whole))


def ddp(args: argparse.Namespace) -> RankResult:
    """DistributedDataParallel, gradients as views of its buckets."""
    from torch.nn.parallel import DistributedDataParallel

    start()
    whole = DistributedDataParallel(nn.Sequential(*gpt.layers(Sizes.of(args))), gradient_as_bucket_view=True)
    return plain(args, whole, gpt.adamw(whole))


def zero_redundancy(args: argparse.Namespace) -> RankResult:
    """The same with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    start()
    whole = DistributedDataParallel(nn.Sequential(*gpt.layers(Sizes.of(args))), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW, lr=1e-3)
    return plain(args, whole, optimizer, optimizer.optim)


def fully_sharded(*, reshard: bool) -> Callable[[argparse.Namespace], RankResult]:
    """`fully_shard` on each layer. reshard: parameters are gathered again in backward."""

    def run(args: argparse.Namespace) -> RankResult:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        start()
        whole = nn.Sequential(*gpt.layers(Sizes.of(args)))
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in whole:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(whole, mesh=mesh, reshard_after_forward=reshard)
        return plain(args, whole, gpt.adamw(whole))

    return run


def shardwright(views: bool = False, **settings: Any) -> Callable[[argparse.Namespace], RankResult]:
    """Ours, in a step function."""

    def run(args: argparse.Namespace) -> RankResult:
        import shardwright.torch as smp

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        smp.init({"ddp": True, "sdp_gradient_clipping": 0, **settings})
        wrapped = smp.DistributedModel(nn.Sequential(*gpt.layers(Sizes.of(args))), gradient_as_bucket_view=views)
        optimizer = smp.DistributedOptimizer(gpt.adamw(wrapped))

        @smp.step
        def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = gpt.loss_of(model(x), y)
            model.backward(loss)
            return loss

        return measured(args, lambda x, y: train_step(wrapped, x, y).reduce_mean().item(), optimizer)

    return run


ROWS = {
    SINGLE: Row(1, 1, single),
    PEER: Row(RANKS, 1, ddp),
    "DDP, ZeroRedundancyOptimizer": Row(RANKS, 1, zero_redundancy),
    "fully_shard": Row(RANKS, 1, fully_sharded(reshard=True)),
    "fully_shard, no reshard": Row(RANKS, 1, fully_sharded(reshard=False)),
    "shardwright": Row(RANKS, 1, shardwright()),
    "shardwright, bucket views": Row(RANKS, 1, shardwright(views=True)),
    "shardwright, sharded state": Row(RANKS, 1, shardwright(shard_optimizer_state=True)),
    "shardwright, sharded parameters": Row(RANKS, 1, shardwright(sharded_data_parallel_degree=RANKS)),
}


def report(results: dict[str, Rounds], args: argparse.Namespace) -> str:
    """The table of ratios."""
    sizes = Sizes.of(args)
    times = {name: time for name, rounds in results.items() if (time := step_time(rounds))}
    speed = {name: sizes.batch * sizes.seq / time.seconds for name, time in times.items()}

    def ratio(name: str, other: str, factor: float = 1.0) -> float | None:
        return speed[name] / speed[other] / factor if other in speed else None

    def megabytes(name: str, key: str) -> str:
        return " / ".join(f"{(median_of(results[name], key, r) or 0) / 1e6:.0f}" for r in range(ROWS[name].num_ranks))

    lines = [
        [
            name, time.seconds, f"{speed[name]:.0f}", ratio(name, SINGLE, 2.0), ratio(name, PEER),
            megabytes(name, "state_bytes"), megabytes(name, "peak_bytes"), time.cpu_s,
            f"{time.num_quiet}/{time.num_steps}", time.foreign_cores, time.spread, median_of(results[name], "loss"),
        ]
        for name, time in times.items()
    ]  # fmt: skip
    header = [
        "row", "step s", "tokens/s", "efficiency", f"vs {PEER}", "optimizer MB per rank", "peak MB per rank",
        "CPU s per rank", "quiet steps", "foreign cores", "spread", "first loss",
    ]  # fmt: skip
    return table(header, lines)


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a row in one round")
    Sizes.add_options(parser)
    return parser


if __name__ == "__main__":
    main(ROWS, report, parse())
