"""What `shardwright ckpt export` and `import` hold of a checkpoint of 100 MB, in every form, and out of an object store."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import measured_memory
import shardwright.torch as smp
from harness import RankPool
from shardwright.checkpoint import storage
from shardwright.cli.main import main

WIDTH, BLOCKS = 1024, 12
MODEL_BYTES = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4
LARGEST_BYTES = WIDTH * WIDTH * 4
BATCH_BYTES = 16 << 20
NOISE_BYTES = 8e6
"""Of the interpreter, pickles, manifests, modules that are imported meanwhile."""


class Peak:
    """By how much the memory of this process that isn't mapped from files is larger at its largest than before."""

    def __init__(self) -> None:
        self._before = self.most = measured_memory.status("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, measured_memory.status("RssAnon"))

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most - self._before


def command(*arguments: object) -> int:
    """`shardwright ckpt ...`; returns what it takes in memory."""
    peak = Peak()
    try:
        main(["ckpt", *map(str, arguments)])
    except SystemExit as end:
        assert end.code in (0, None)
    finally:
        most = peak.end()
    return most


def save(path: Path) -> None:
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))

    measured_memory.train_once(model, optimizer, WIDTH)
    smp.save_checkpoint(path, "all", partial=False, model=model, optimizer=optimizer)


def to_store(path: Path) -> str:
    """A file or folder, copied to a store that lives in this process."""
    out = storage.place(f"memory://conversions/{path.name}")
    for file in path.rglob("*") if path.is_dir() else (path,):
        place = out / str(file.relative_to(path)) if path.is_dir() else out
        storage.of(place).upload(file, place)
    return str(out)


def convert(path: Path) -> dict[str, int]:
    measured_memory.map_tensors()
    save(path)
    command("reshard", path / "all", path / "cut", "--rdp", 2, "--sharded-data-parallel-degree", 2)  # no tensor is whole in any file
    forms: dict[str, tuple[str, ...]] = {"torch": ("--optimizer",), "dcp": (), "safetensors": ()}
    taken = {}
    for form, more in forms.items():
        out = path / f"out.{form}"
        taken[f"export {form}"] = command("export", path / "cut", out, "--format", form, *more)
        for kind, source in (("file", str(out)), ("store", to_store(out))):
            tag = f"{form}-{kind}"
            taken[f"import {form} {kind}"] = command("import", source, path / "in", "--tag", tag, "--trust")
            same(path, tag, *more)
    return taken


def same(path: Path, tag: str, optimizer: str = "") -> None:
    for prefix in ("", "optimizer_") if optimizer else ("",):
        one, other = (torch.load(file, mmap=True) for file in (path / f"{prefix}all", path / "in" / f"{prefix}{tag}"))
        leaves = [[t for t in torch.utils._pytree.tree_leaves(c) if isinstance(t, Tensor)] for c in (one, other)]
        assert len(leaves[0]) == len(leaves[1]) >= 2 * BLOCKS
        assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))


def test_few_tensors_are_held_at_a_time(tmp_path: Path) -> None:
    with RankPool(1) as pool:
        found = pool.run(convert, tmp_path, config={"microbatches": 2}, timeout_s=300)[0]
    one = 2 * LARGEST_BYTES + NOISE_BYTES
    several = 2 * BATCH_BYTES + one
    for what, taken in found.items():
        assert taken < (several if "import dcp" in what or "store" in what else one), f"{what} took {taken / 1e6:.1f} MB"
    assert several < MODEL_BYTES
