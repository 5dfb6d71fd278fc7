"""Folders with the contract's file names and no manifest (api.md 9.5): they load into the layout they were written in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_REPLICAS, TWO_STAGES, same
from harness import RankPool
from shardwright.errors import CheckpointError


def build(seed: int) -> tuple[Any, Any]:
    model = smp.DistributedModel(ranks.net(seed))
    if smp.pp_size() > 1:
        ranks.cut(model)
    return model, smp.DistributedOptimizer(ranks.adam(model))


def laid_out(path: str) -> list[Any]:
    """Two steps, files by hand, two steps."""
    model, optimizer = build(0)
    ranks.train(model, optimizer, 2)
    folder = Path(path) / "two_partial"
    folder.mkdir(parents=True, exist_ok=True)
    place = f"{smp.pp_rank()}_{smp.tp_rank()}"
    sharded = smp.state.cfg.shard_optimizer_state
    if smp.rdp_rank() == 0:
        torch.save(model.local_state_dict(), folder / f"model_{place}.pt")
    if smp.rdp_rank() == 0 or sharded:
        own = f"{place}_{smp.rdp_rank()}" if sharded else place
        torch.save(optimizer.local_state_dict(gather_if_shard=False), folder / f"optimizer_{own}.pt")
    if smp.rank() == 0:
        torch.save({"step": 2}, folder / "user_content.pt")
        (Path(path) / "newest").write_text("two_partial")
    smp.barrier()
    return ranks.train(model, optimizer, 2, 2)


def go_on(path: str) -> list[Any]:
    model, optimizer = build(1)
    assert smp.resume_from_checkpoint(path) == {"step": 2}
    return ranks.train(model, optimizer, 2, 2)


def refused(path: str) -> str:
    build(1)
    with pytest.raises(CheckpointError) as caught:
        smp.resume_from_checkpoint(path, "two")
    return str(caught.value)


SHARDED = {**TWO_REPLICAS, "shard_optimizer_state": True}


@pytest.mark.parametrize("config", [TWO_STAGES, SHARDED], ids=["stages", "sharded"])
def test_a_folder_laid_out_by_hand(pool2: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    path = str(tmp_path)
    whole = pool2.run(laid_out, path, config=config)
    assert not list(tmp_path.rglob("manifest*"))
    assert same(pool2.run(go_on, path, config=config), whole)
    for reason in pool2.run(refused, path, config=SHARDED if config is TWO_STAGES else TWO_STAGES):
        assert "'two_partial' is incomplete" in reason  # of another layout
    (tmp_path / "two_partial" / ("optimizer_0_0_1.pt" if config is SHARDED else "optimizer_1_0.pt")).unlink()
    for reason in pool2.run(refused, path, config=config):
        assert "'two_partial' is incomplete" in reason
