"""FF-26: what saving and resuming a model of 100 MB takes on each of four processes, in memory and in bytes read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import measured_memory
import shardwright.torch as smp
from any_layout import config
from harness import RankPool
from sdp_ranks import config as sharded

WIDTH, BLOCKS = 1024, 24
MODEL_BYTES = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4
LARGEST_BYTES = WIDTH * WIDTH * 4
MESSAGE_BYTES = 16 << 20
NOISE_BYTES = 6e6
"""Of the interpreter, pickles, manifests."""


def wrap() -> tuple[Any, Any]:
    measured_memory.map_tensors()
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    model = smp.DistributedModel(made)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def grown(work: Callable[[], object]) -> int:
    """By how much this process is larger at its largest than before."""
    before = measured_memory.status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return measured_memory.status("VmHWM") - before


def read_by(work: Callable[[], object]) -> int:
    """Bytes that system calls read."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    work()
    return so_far() - before


class Opened:
    """The names of files in a folder that this process opens. An audit hook stays for good, so it is made once."""

    def __init__(self, folder: str) -> None:
        self.names: set[str] = set()
        sys.addaudithook(lambda event, args: self._see(event, args, folder))

    def _see(self, event: str, args: tuple[Any, ...], folder: str) -> None:
        if event == "open" and isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(folder):
            self.names.add(os.path.basename(args[0]))


def save_both(path: str) -> tuple[int, int]:
    model, optimizer = wrap()
    measured_memory.train_once(model, optimizer, WIDTH)
    smp.save_checkpoint(path, "all", model=model, optimizer=optimizer)
    full = grown(lambda: smp.save_checkpoint(f"{path}/full", "all", partial=False, model=model, optimizer=optimizer))
    gathered = grown(lambda: model.state_dict(gather_to_rank0=True))
    return full, gathered


def resume_both(path: str) -> tuple[int, int, set[str], int, int, int]:
    opened = Opened(f"{path}/all_partial")
    model, optimizer = wrap()

    def begin() -> None:
        smp.resume_from_checkpoint(path)
        measured_memory.train_once(model, optimizer, WIDTH)

    early = read_by(begin)
    late = read_by(lambda: smp.resume_from_checkpoint(path))
    full = grown(lambda: smp.resume_from_checkpoint(f"{path}/full", partial=False))
    return smp.pp_rank(), smp.rdp_rank(), opened.names, early, late, full


def test_only_the_writer_has_more_than_its_part_and_reads_are_what_is_needed(pool4: RankPool, tmp_path: Path) -> None:
    """Stages of 50 MB with two replicas each, whose optimizer state of 100 MB is shared."""
    settings = config((2, 1, 2), shard_optimizer_state=True)
    for rank, (full, gathered) in enumerate(pool4.run(save_both, str(tmp_path), config=settings, timeout_s=150)):
        if rank == 0:
            assert full < MESSAGE_BYTES + 2 * LARGEST_BYTES + NOISE_BYTES
            assert gathered < MODEL_BYTES + LARGEST_BYTES + NOISE_BYTES
        else:
            assert full < MESSAGE_BYTES + NOISE_BYTES
            assert gathered < MESSAGE_BYTES + NOISE_BYTES
    folder = tmp_path / "all_partial"
    size_of = {file.name: file.stat().st_size for file in folder.iterdir()}
    everything = sum(size_of.values())
    assert everything > 2.9 * MODEL_BYTES
    resumed = pool4.run(resume_both, str(tmp_path), config=settings, timeout_s=150)
    for rank, (stage, replica, opened, early, late, full) in enumerate(resumed):
        own = {f"model_{stage}_0.pt", f"optimizer_{stage}_0_{replica}.pt"}
        shared = {"manifest.json", "user_content.pt", "partition_info.pt", f"rng_{rank}.pt"}
        assert own <= opened <= own | shared
        assert early <= 1.1 * everything, "files are checked before the model has its parts, and read then"
        assert late <= 1.1 * sum(size_of[name] for name in own)
        assert full <= 3 * MODEL_BYTES, "no more than one copy of the file"


def save_shards(path: str) -> int:
    model, optimizer = wrap()
    measured_memory.train_once(model, optimizer, WIDTH)
    smp.save_checkpoint(path, "first", model=model, optimizer=optimizer)
    return grown(lambda: smp.save_checkpoint(path, "second", model=model, optimizer=optimizer))


def test_shards_are_saved_without_a_copy(pool2: RankPool, tmp_path: Path) -> None:
    """Of the flat groups either: a rank's is half the model."""
    for extra in pool2.run(save_shards, str(tmp_path), config=sharded(2, 2), timeout_s=150):
        assert extra < NOISE_BYTES
