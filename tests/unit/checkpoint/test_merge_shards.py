"""A folder in the form of the original, made by hand, put together again."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hostile_files import MakesFolder
from shardwright.checkpoint.merge_shards import get_full_state_dict_from_sharded_data_parallel_checkpoint as merge
from shardwright.errors import CheckpointError, CheckpointNotFoundError

SHAPES = [{"module.a": (3, 7), "module.b": (5,)}, {"module.c": (1,), "module.d": (6,)}]


def write(root: Path, num_ranks: int) -> dict[str, Tensor]:
    """The folder; returns its whole tensors."""
    generator = torch.Generator().manual_seed(0)
    whole = {n: torch.rand(shape, generator=generator) for group in SHAPES for n, shape in group.items()}
    folder = root / "ten_partial"
    folder.mkdir()
    (root / "newest").write_text("ten_partial")
    for rank in range(num_ranks):
        groups = []
        for group in SHAPES:
            blocks = []
            for name in group:
                flat = whole[name].flatten()
                block = -(-len(flat) // num_ranks)
                padded = torch.cat([flat, torch.zeros(block * num_ranks - len(flat))])
                blocks.append(padded[rank * block : (rank + 1) * block])
            groups.append(torch.cat(blocks))
        torch.save({"partition_count": num_ranks, "fp32_flat_groups": groups}, folder / f"optimizer_{rank}.pt")
    shapes = [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES]
    torch.save({"param_shapes": shapes, "buffer_names": ["module.mask"], "epoch": 1}, folder / "user_content.pt")
    torch.save({"module": {"module.mask": torch.ones(2, dtype=torch.float64)}}, folder / "model_0.pt")
    return whole


@pytest.mark.parametrize("num_ranks", [1, 4, 11])
def test_blocks_are_joined_in_the_order_of_ranks(tmp_path: Path, num_ranks: int) -> None:
    whole = write(tmp_path, num_ranks)
    found = merge(str(tmp_path))
    assert list(found) == ["a", "b", "c", "d", "mask"]
    assert all(torch.equal(found[name.removeprefix("module.")], value) for name, value in whole.items())
    assert found["mask"].dtype is torch.float64
    half = merge(tmp_path, dtype=torch.bfloat16, tag="ten", remove_smp_prefix=False)
    assert list(half) == ["module.a", "module.b", "module.c", "module.d", "module.mask"]
    assert half["module.a"].dtype is torch.bfloat16
    assert half["module.mask"].dtype is torch.float64


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no tag is given"):
        merge(tmp_path)
    write(tmp_path, 3)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'other'"):
        merge(tmp_path, tag="other")
    (tmp_path / "ten_partial" / "optimizer_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"2 files optimizer_\*.pt, but 'partition_count' is 3"):
        merge(tmp_path)
    (tmp_path / "empty_partial").mkdir()
    with pytest.raises(CheckpointError, match="there are no shards of sharded data parallelism here"):
        merge(tmp_path, tag="empty")


def test_what_scripts_save_beside_and_what_would_run_code(tmp_path: Path) -> None:
    """FF-35: files of the original are read by the rules of all others."""
    whole = write(tmp_path, 2)
    folder, marker = tmp_path / "ten_partial", tmp_path / "marker"
    told = torch.load(folder / "user_content.pt")
    torch.save({**told, "args": argparse.Namespace(lr=0.1), "epoch": np.int64(3), "at": Path("/data")}, folder / "user_content.pt")
    assert torch.equal(merge(tmp_path)["a"], whole["module.a"])
    for name in ("user_content.pt", "model_0.pt", "optimizer_1.pt"):
        kept = (folder / name).read_bytes()
        torch.save({"x": MakesFolder(marker)}, folder / name)
        with pytest.raises(CheckpointError, match=f"{name} holds"):
            merge(tmp_path)
        (folder / name).write_bytes(kept)
    assert not marker.exists()
