"""Saving and loading the state of AdamW and its model, sharded over two ranks: ours beside PyTorch's and the raw disk.

    python benchmarks/checkpoint.py --gb 0.2
    python benchmarks/checkpoint.py --rows "DCP|shardwright" --rounds 5

--gb: size of the fp32 parameters; the state is three times that, half of it on each rank. `--dir` needs room for nine times
the state. Every save ends on the disk. Cold: the files were dropped from the system's cache before; warm: they were just
read. A row with "after" in its name loads what another row has left, so that one has to be run as well.
raw s: in turn with the row, in the same processes: plain writes of the same tensors with fsync, and plain reads of the row's own
files into memory that is ready, each rank its share of every file. Cold reads are measured after an unmeasured one of the same kind.
blocked: how long an asynchronous save keeps the training waiting.   slowdown: of matrix products while it is written.
extra memory: of all ranks together, as a share of the state.   CPU s: of the busiest rank; it suffers less from a busy
machine than seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RankResult, Rounds, Row, main, start, table
from measure import ExtraMemory, drop_from_cache, machine_cpu_s
from torch import Tensor, nn
from torch.nn import functional as F

RANKS = 2
PEER = "DCP"
OURS = "shardwright"
ROWS_OF_TENSOR, COLUMNS = 8192, 1024  # 32 MiB
OPERATIONS = ("save", "first", "later", "cold", "warm")
RAW = "raw "
"""Prefix of the operation that one is compared with."""


def num_layers(args: argparse.Namespace) -> int:
    return max(1, round(args.gb * 1e9 / (ROWS_OF_TENSOR * COLUMNS * 4)))


class Bench:
    """One rank of one row. Collects figures, a list for each operation; all ranks make the same calls."""

    def __init__(self, args: argparse.Namespace, folder: str, state_bytes: int) -> None:
        self.folder = Path(args.dir, f"benchmark-checkpoint-{folder}")
        self.figures: RankResult = {"bytes": state_bytes}
        self._turns = args.turns

    def clear(self) -> None:
        clear(self.folder)

    def _drop(self) -> None:
        barrier()
        if int(os.environ["RANK"]) == 0:
            drop_from_cache(self.folder)
        barrier()

    def time(self, operation: str, work: Callable[[], object], *, cold: bool = False) -> None:
        """cold: after doing it once unmeasured. The system's cache takes what it gave back last, in pages as small or large as
        the reader before had them, and what is new to it the host has to find.
        """
        if cold:
            self._drop()
            work()
            self._drop()
        machine, own = machine_cpu_s(), sum(os.times()[:4])
        with ExtraMemory() as memory:
            barrier()
            begin = time.perf_counter()
            work()
            barrier()
            seconds = time.perf_counter() - begin
        own, machine = sum(os.times()[:4]) - own, machine_cpu_s() - machine
        measured = {"s": seconds, "cpu_s": own, "machine_s": machine, "extra": memory.extra_bytes}
        self.figures.setdefault(operation, []).append(measured)

    def save(self, save: Callable[[], object], tensors: Sequence[Tensor]) -> RankResult:
        """Save, and write the same plainly, in turn; each finds the disk without what it wrote before."""
        plain = self.folder.with_name(f"{self.folder.name}-raw")
        for turn in range(self._turns):
            for folder in (plain, self.folder)[:: 1 if turn % 2 else -1]:
                clear(folder)
                if folder is plain:
                    self.time(f"{RAW}save", lambda: write_plainly(plain / os.environ["RANK"], tensors))
                else:
                    self.time("save", save)
        clear(plain)
        return self.figures

    def load(self, load: Callable[[], object], tensors: Callable[[], Sequence[Tensor]]) -> RankResult:
        """Cold and warm, each in turn with plain reads, into tensors that hold something else.

        tensors: looked up again each time.
        """
        expected = last_elements(tensors())
        for operation in ("cold", "warm"):
            for turn in range(self._turns):
                for is_plain in (True, False)[:: 1 if turn % 2 else -1]:
                    found = tensors()
                    for tensor in found:
                        tensor.detach().zero_()
                    work = (lambda found=found: read_plainly(self.folder, found)) if is_plain else load
                    self.time(f"{RAW * is_plain}{operation}", work, cold=operation == "cold")
                    assert is_plain or last_elements(tensors()) == expected, last_elements(tensors())
        return self.figures


def clear(folder: Path) -> None:
    """Delete what was saved before, and let the disk settle: deleting while writing makes some disks slow."""
    if int(os.environ["RANK"]) == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        os.sync()
    barrier()


def last_elements(tensors: Sequence[Tensor]) -> list[float]:
    return [tensor.flatten()[-1].item() for tensor in tensors]


def bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().numpy()).cast("B")


def write_plainly(path: Path, tensors: Sequence[Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            left = bytes_of(tensor)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def read_plainly(folder: Path, tensors: Sequence[Tensor]) -> None:
    """This rank's share of every file, in order, into the memory of the tensors, over and over where it is too small."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = itertools.cycle(bytes_of(tensor) for tensor in tensors)
    room = next(memory)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            file.seek(size * rank // ranks)
            left = size * (rank + 1) // ranks - file.tell()
            while left:
                count = file.readinto(room[:left])
                left -= count
                room = room[count:] or next(memory)


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


# ------------------------------------------------------------------ peers


def tensors_of(args: argparse.Namespace, num_shards: int = RANKS) -> dict[str, Tensor]:
    """This rank's share: rows of every parameter and of its two moments, each with a number of its own."""
    names = [f"{kind}.{i}" for i in range(num_layers(args)) for kind in ("model", "exp_avg", "exp_avg_sq")]
    return {n: torch.full((ROWS_OF_TENSOR // num_shards, COLUMNS), float(i + 1)) for i, n in enumerate(names)}


def num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def file_per_rank(name: str, save: Callable[[Any, str], None], load: Callable[[str], Any]) -> Callable[..., RankResult]:
    """A library that knows files, not ranks."""

    def run(args: argparse.Namespace) -> RankResult:
        rank = start()
        tensors = tensors_of(args)
        bench = Bench(args, name, num_bytes(tensors))
        path = str(bench.folder / str(rank))

        def save_durably() -> None:
            save(tensors, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())

        def load_into_place() -> None:
            found = load(path)
            for key, tensor in tensors.items():
                tensor.copy_(found[key])

        bench.save(save_durably, list(tensors.values()))
        return bench.load(load_into_place, lambda: list(tensors.values()))

    return run


def torch_files(*, mmap: bool) -> Callable[..., RankResult]:
    return file_per_rank(f"torch-{mmap}", torch.save, lambda path: torch.load(path, mmap=mmap, weights_only=True))


def safetensors(args: argparse.Namespace) -> RankResult:
    from safetensors.torch import load_file, save_file

    return file_per_rank("safetensors", save_file, load_file)(args)


def sharded(tensors: dict[str, Tensor], num_shards: int) -> dict[str, Any]:
    """For DCP: shards as DTensors."""
    if num_shards == 1:
        return dict(tensors)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (num_shards,))
    return {n: DTensor.from_local(t, mesh, (Shard(0),), run_check=False) for n, t in tensors.items()}


def dcp(*, save: bool, ranks: int, folder: str) -> Callable[..., RankResult]:
    """Save, and load as it was saved; or load what another row has saved."""

    def run(args: argparse.Namespace) -> RankResult:
        import torch.distributed.checkpoint as checkpoint

        start()
        tensors = tensors_of(args, ranks)
        content = sharded(tensors, ranks)
        bench = Bench(args, folder, num_bytes(tensors))
        if save:
            bench.save(lambda: checkpoint.save(content, checkpoint_id=bench.folder), list(tensors.values()))
            if ranks == 1:
                return bench.figures
        return bench.load(lambda: checkpoint.load(content, checkpoint_id=bench.folder), lambda: list(tensors.values()))

    return run


def matrix_product_s(matrix: Tensor) -> float:
    """Stands for training."""
    begin = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - begin


def asynchronous(bench: Bench, save: Callable[[], Callable[[], bool]]) -> RankResult:
    """Save twice without waiting. save: returns a function that tells whether all is on the disk."""
    matrix = torch.randn(512, 512)
    alone_s = statistics.median(matrix_product_s(matrix) for _ in range(200))
    for operation in ("first", "later"):
        bench.clear()
        told: dict[str, float] = {}

        def go(told: dict[str, float] = told) -> None:
            begin = time.perf_counter()
            is_done = save()
            told["blocked_s"] = time.perf_counter() - begin
            products = []
            while not is_done():
                products.append(matrix_product_s(matrix))
            if products:
                told["slowdown"] = statistics.mean(products) / alone_s

        bench.time(operation, go)
        bench.figures[operation][-1].update(told)
    return bench.figures


def dcp_async(kind: str) -> Callable[..., RankResult]:
    def run(args: argparse.Namespace) -> RankResult:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        start()
        tensors = tensors_of(args)
        content = sharded(tensors, RANKS)
        bench = Bench(args, f"dcp-{kind}", num_bytes(tensors))

        def save() -> Callable[[], bool]:
            kind_of = AsyncCheckpointerType(kind)
            got: Any = checkpoint.async_save(content, checkpoint_id=bench.folder, async_checkpointer_type=kind_of)
            future = getattr(got, "upload_completion", got)

            def is_done() -> bool:
                return bool(future.done()) and future.result() is not False

            return is_done

        return asynchronous(bench, save)

    return run


# ------------------------------------------------------------------ ours


class Layer(nn.Module):
    """One weight of 32 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS_OF_TENSOR, COLUMNS).normal_(std=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.weight), self.weight.t())


class Trained:
    """A wrapped model and optimizer after a step, with a number of its own in every tensor of their state.

    fresh: before the step, with a new optimizer, as in a process that begins by resuming.
    """

    def __init__(self, args: argparse.Namespace, ranks: int, *, fresh: bool = False) -> None:
        import shardwright.torch as smp

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        degree = {"sharded_data_parallel_degree": ranks} if ranks > 1 else {}
        smp.init({"ddp": ranks > 1, "microbatches": 1, "log_level": "warning", "sdp_gradient_clipping": 0, **degree})
        self.smp = smp
        self.model = smp.DistributedModel(nn.Sequential(*(Layer() for _ in range(num_layers(args)))))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.state_bytes = 3 * num_layers(args) * ROWS_OF_TENSOR * COLUMNS * 4 // ranks
        if fresh:
            return

        @smp.step
        def train_step(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        train_step(self.model, torch.ones(1, COLUMNS))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for number, tensor in enumerate(self.tensors()):
                tensor.fill_(number + 1.0)

    def tensors(self) -> list[Tensor]:
        """The live ones: weights and moments."""
        weights = [value for value in self.model.local_state_dict().values() if isinstance(value, Tensor)]
        state = self.optimizer.local_state_dict(gather_if_shard=False)["state"]
        return [*weights, *(values[key] for values in state.values() for key in ("exp_avg", "exp_avg_sq"))]

    def save(self, folder: Path, **options: Any) -> None:
        self.smp.save_checkpoint(str(folder), "saved", model=self.model, optimizer=self.optimizer, **options)

    def load(self, folder: Path) -> None:
        self.smp.resume_from_checkpoint(str(folder), "saved")


def shardwright(*, save: bool, ranks: int, folder: str) -> Callable[..., RankResult]:
    """As `dcp`; ours is loaded into a model and optimizer that have been training."""

    def run(args: argparse.Namespace) -> RankResult:
        trained = Trained(args, ranks)
        bench = Bench(args, folder, trained.state_bytes)
        if save:
            bench.save(lambda: trained.save(bench.folder), trained.tensors())
            if ranks == 1:
                return bench.figures
        return bench.load(lambda: trained.load(bench.folder), trained.tensors)

    return run


def shardwright_fresh(args: argparse.Namespace) -> RankResult:
    """What another row has saved, into an optimizer without state: memory for it is touched for the first time."""
    trained = Trained(args, RANKS, fresh=True)
    bench = Bench(args, "ours", trained.state_bytes)
    bench.time("cold", lambda: trained.load(bench.folder), cold=True)
    values = last_elements(trained.tensors())
    assert values == [number + 1.0 for number in range(len(values))], values
    bench.time(f"{RAW}cold", lambda: read_plainly(bench.folder, trained.tensors()), cold=True)
    return bench.figures


def shardwright_async(*, prepared: bool) -> Callable[..., RankResult]:
    """prepared: memory for the copies was made ready while training went on."""

    def run(args: argparse.Namespace) -> RankResult:
        from shardwright.checkpoint import background

        trained = Trained(args, RANKS)
        bench = Bench(args, "ours-async", trained.state_bytes)
        if prepared:
            trained.smp.prepare_background_save(trained.model, trained.optimizer)
            background.finish()

        def save() -> Callable[[], bool]:
            trained.save(bench.folder, blocking=False)
            return (bench.folder / "newest").exists

        return asynchronous(bench, save)

    return run


ROWS = {
    "torch.save per rank": Row(RANKS, 1, torch_files(mmap=False)),
    "torch.save per rank, mmap": Row(RANKS, 1, torch_files(mmap=True)),
    "safetensors per rank": Row(RANKS, 1, safetensors),
    PEER: Row(RANKS, 1, dcp(save=True, ranks=RANKS, folder="dcp")),
    OURS: Row(RANKS, 1, shardwright(save=True, ranks=RANKS, folder="ours")),
    "shardwright after that, new process": Row(RANKS, 1, shardwright_fresh),
    "DCP after that, 2 -> 1": Row(1, 1, dcp(save=False, ranks=1, folder="dcp")),
    "shardwright after that, 2 -> 1": Row(1, 1, shardwright(save=False, ranks=1, folder="ours")),
    "DCP, 1 rank": Row(1, 1, dcp(save=True, ranks=1, folder="dcp-1")),
    "shardwright, 1 rank": Row(1, 1, shardwright(save=True, ranks=1, folder="ours-1")),
    "DCP after that, 1 -> 2": Row(RANKS, 1, dcp(save=False, ranks=RANKS, folder="dcp-1")),
    "shardwright after that, 1 -> 2": Row(RANKS, 1, shardwright(save=False, ranks=RANKS, folder="ours-1")),
    "DCP, async thread": Row(RANKS, 1, dcp_async("thread")),
    "DCP, async process": Row(RANKS, 1, dcp_async("process")),
    "shardwright, blocking=False": Row(RANKS, 1, shardwright_async(prepared=False)),
    "shardwright, blocking=False, prepared": Row(RANKS, 1, shardwright_async(prepared=True)),
}


def report(results: dict[str, Rounds], args: argparse.Namespace) -> str:
    """The table of ratios."""
    for folder in Path(args.dir).glob("benchmark-checkpoint-*"):
        shutil.rmtree(folder, ignore_errors=True)
    lines = []
    for name, rounds in results.items():
        state_bytes = sum(rank["bytes"] for rank in rounds[0])
        for operation in (operation for operation in OPERATIONS if operation in rounds[0][0]):
            measured, plain = turns_of(rounds, operation), turns_of(rounds, f"{RAW}{operation}")
            seconds = [max(rank["s"] for rank in ranks) for ranks in measured]
            middle, limit_s = statistics.median(seconds), middle_of(plain, "s")
            foreign = [
                max(0.0, ranks[0]["machine_s"] - sum(rank["cpu_s"] for rank in ranks)) / ranks[0]["s"]
                for ranks in measured
            ]
            lines.append([
                name, operation, middle, limit_s, limit_s and limit_s / middle,
                statistics.median(sum(rank["extra"] for rank in ranks) for ranks in measured) / state_bytes,
                middle_of(measured, "cpu_s"), middle_of(plain, "cpu_s"), middle_of(measured, "blocked_s"),
                middle_of(measured, "slowdown"), statistics.median(foreign), (max(seconds) - min(seconds)) / middle,
            ])  # fmt: skip
    header = [
        "row", "operation", "s", "raw s", "speed, of raw", "extra memory", "CPU s", "raw CPU s", "blocked s", "slowdown",
        "foreign cores", "spread",
    ]  # fmt: skip
    return table(header, lines)


def turns_of(rounds: Rounds, operation: str) -> list[list[dict[str, float]]]:
    """All measurements of an operation: of each the figures of all ranks."""
    return [list(ranks) for results in rounds for ranks in zip(*(rank.get(operation, []) for rank in results), strict=True)]


def middle_of(measured: Sequence[Sequence[Mapping[str, float]]], key: str) -> float | None:
    """The median of what the slowest rank took."""
    found = [max(rank[key] for rank in ranks) for ranks in measured if all(key in rank for rank in ranks)]
    return statistics.median(found) if found else None


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the parameters in GB, a third of the state")
    parser.add_argument("--turns", type=int, default=2, help="how often an operation and its limit are measured in each round")
    parser.add_argument("--dir", default="/tmp", help="where checkpoints go, on the disk to measure")
    return parser


if __name__ == "__main__":
    main(ROWS, report, parse())
