"""`smp.save` and `smp.load` with real ranks: names on disk, what comes back, and sets that don't belong together."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_STAGES
from harness import RankPool
from shardwright.errors import CheckpointError, CheckpointNotFoundError

TWO_TP = {"tensor_parallel_degree": 2, "ddp": True, "log_level": "warning"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_place(f: str, v3: bool = False) -> None:
    if v3 or smp.rdp_rank() == 0:
        smp.save({"place": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank())}, f, v3=v3)
    smp.barrier()


def load_place(f: str) -> Any:
    return smp.load(f)["place"]


def refused(f: str, kind: type[Exception] = CheckpointError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        smp.load(f, **options)
    return str(caught.value)


def refused_as_older(f: str) -> str:
    return refused(f, CheckpointNotFoundError, back_compat=True)


# ------------------------------------------------------------------ names


def test_names_with_stages(pool2: RankPool, tmp_path: Path) -> None:
    f = str(tmp_path / "new" / "ckpt.pt")
    pool2.run(save_place, f, config=TWO_STAGES)
    folder = tmp_path / "new"
    assert names(folder) == ["ckpt.pt_0", "ckpt.pt_0_0", "ckpt.pt_1", "ckpt.pt_1_0"]
    assert os.readlink(folder / "ckpt.pt_1") == "ckpt.pt_1_0"
    assert torch.load(folder / "ckpt.pt_1") == {"place": (1, 0, 0)}  # what the scripts do with it
    assert pool2.run(load_place, f, config=TWO_STAGES) == [(0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("gone", ["ckpt_0", "ckpt_0_0"])
def test_either_name_may_be_deleted(pool2: RankPool, tmp_path: Path, gone: str) -> None:
    f = str(tmp_path / "ckpt")
    pool2.run(save_place, f, config=TWO_STAGES)
    (tmp_path / gone).unlink()
    pool2.run(save_place, f, config=TWO_STAGES)
    assert names(tmp_path) == ["ckpt_0", "ckpt_0_0", "ckpt_1", "ckpt_1_0"]
    assert pool2.run(load_place, f, config=TWO_STAGES) == [(0, 0, 0), (1, 0, 0)]


def test_dangling_links_go_with_the_next_save(pool2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "ckpt_7").symlink_to("ckpt_7_0")
    (tmp_path / "ckpts_7").symlink_to("ckpts_7_0")  # another prefix
    pool2.run(save_place, str(tmp_path / "ckpt"), config=TWO_STAGES)
    assert names(tmp_path) == ["ckpt_0", "ckpt_0_0", "ckpt_1", "ckpt_1_0", "ckpts_7"]


def test_what_a_killed_process_left_goes_with_the_next_save(pool2: RankPool, tmp_path: Path) -> None:
    others = [".shardwright-ckpt_0_0-0-mine", ".shardwright-ckpt_0_0-7-123", ".shardwright-other_0_0-0-123"]
    for name in [*others, ".shardwright-ckpt_0_0-0-123", ".shardwright-ckpt_1_0-1-124"]:
        (tmp_path / name).write_bytes(b"half")
    pool2.run(save_place, str(tmp_path / "ckpt"), config=TWO_STAGES)
    assert names(tmp_path) == [*others, "ckpt_0", "ckpt_0_0", "ckpt_1", "ckpt_1_0"]


def without_links(f: str) -> Any:
    def symlink(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    real, os.symlink = os.symlink, symlink
    try:
        save_place(f)
    finally:
        os.symlink = real
    return load_place(f)


def test_a_file_system_without_links(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(without_links, str(tmp_path / "ckpt"), config=TWO_STAGES) == [(0, 0, 0), (1, 0, 0)]
    assert names(tmp_path) == ["ckpt_0", "ckpt_1"]


def test_names_with_tensor_parallelism(pool2: RankPool, tmp_path: Path) -> None:
    f = str(tmp_path / "ckpt")
    pool2.run(save_place, f, config=TWO_TP)
    assert names(tmp_path) == ["ckpt_0_0", "ckpt_0_1"]
    assert pool2.run(load_place, f, config=TWO_TP) == [(0, 0, 0), (0, 1, 0)]


def test_one_file_per_rank(pool4: RankPool, tmp_path: Path) -> None:
    f = str(tmp_path / "ckpt")
    pool4.run(save_place, f, True, config=TWO_BY_TWO)
    assert names(tmp_path) == ["ckpt_0_0_0", "ckpt_0_0_1", "ckpt_1_0_0", "ckpt_1_0_1"]
    assert sorted(pool4.run(load_place, f, config=TWO_BY_TWO)) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    reasons = pool4.run(refused_as_older, f, config=TWO_BY_TWO)
    assert all("ckpt_0_0_0, ckpt_0_0_1" in reason for reason in reasons)
    assert [f"world rank {rank}" in reason for rank, reason in enumerate(reasons)] == [True] * 4


def whole_on_every_rank(f: str, v3: bool) -> int:
    smp.save({"rank": smp.rank()}, f, partial=False, v3=v3)
    smp.barrier()
    loaded: int = smp.load(f, partial=False)["rank"]
    return loaded


def test_a_whole_file_in_the_newest_form_is_rank_0s(pool2: RankPool, tmp_path: Path) -> None:
    f = str(tmp_path / "ckpt")
    assert pool2.run(whole_on_every_rank, f, True, config=TWO_STAGES) == [0, 0]
    assert len(set(pool2.run(whole_on_every_rank, f, False, config=TWO_STAGES))) == 1  # the last one wins
    assert names(tmp_path) == ["ckpt"]


# ------------------------------------------------------------------ content


def everything(f: str) -> None:
    if smp.rank() > 0:
        return
    content = {"args": argparse.Namespace(lr=1e-3), "tensor": torch.arange(5.0), "epoch": 3, "names": ["a", None]}
    smp.save(content, f, False)
    loaded = smp.load(f, partial=False)
    assert torch.equal(loaded.pop("tensor"), content.pop("tensor"))
    assert loaded == content
    with pytest.raises(CheckpointError, match=r"(?s)^ckpt would hold .*Part.*trust"):
        smp.save({"x": Part()}, f, False)
    assert smp.load(f, partial=False)["epoch"] == 3, "a refused save must leave the file"
    smp.save({"x": Part()}, f, False, trust=True)
    assert "Part" in refused(f, partial=False)
    assert isinstance(smp.load(f, partial=False, trust=True)["x"], Part)
    with pytest.raises(TypeError, match="expected a string"):
        smp.save({}, Path(f))  # type: ignore[arg-type]
    torch.save({"old": 1}, f, _use_new_zipfile_serialization=False)
    assert smp.load(f, partial=False) == {"old": 1}
    torch.save({"on": torch.ones(1)}, f)
    assert smp.load(f, "meta", partial=False)["on"].is_meta
    assert "check the name" in refused(f + "x", CheckpointNotFoundError, partial=False)


class Part:
    """A class that safe loading does not know."""


def test_what_a_file_may_hold(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(everything, str(tmp_path / "ckpt"), config=TWO_STAGES)


def save_twice_on_one(f: str) -> str:
    save_place(f)
    assert smp.load(f)["place"][0] == smp.pp_rank()
    smp.barrier()
    if smp.pp_rank() == 1:
        smp.save({"place": "again"}, f)
    smp.barrier()
    return refused(f)


def test_files_of_two_saves_are_no_set(pool2: RankPool, tmp_path: Path) -> None:
    """A crash between the ranks' saves leaves one new and one old file; every rank must see that."""
    for reason in pool2.run(save_twice_on_one, str(tmp_path / "ckpt"), config=TWO_STAGES):
        assert "ckpt_0_0" in reason
        assert "ckpt_1_0" in reason
        assert "different saves" in reason


def save_on_one(f: str) -> None:
    if smp.pp_rank() == 0:
        smp.save({}, f)


def test_files_of_two_jobs_are_no_set(pool2: RankPool, tmp_path: Path) -> None:
    f = str(tmp_path / "ckpt")
    pool2.run(save_place, f, config=TWO_STAGES)
    pool2.run(save_on_one, f, config=TWO_STAGES)
    assert all("different saves" in reason for reason in pool2.run(refused, f, config=TWO_STAGES))


def test_another_layout_is_refused_with_both(pool2: RankPool, tmp_path: Path) -> None:
    f = str(tmp_path / "ckpt")
    pool2.run(save_place, f, config=TWO_STAGES)
    (tmp_path / "ckpt_0_1").write_bytes((tmp_path / "ckpt_1_0").read_bytes())
    for reason in pool2.run(refused, f, config=TWO_TP):
        assert "pp=2 tp=1" in reason
        assert "pp=1 tp=2" in reason


# ------------------------------------------------------------------ training


def train(f: str, resume: bool) -> list[torch.Tensor]:
    """Four steps and a save after the second; or load what was saved, before the first step, and the last two."""
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    if resume:
        loaded = smp.load(f)
        model.load_state_dict(loaded["model"], same_partition_load=True)
        optimizer.load_state_dict(loaded["optimizer"])
        return ranks.train(model, optimizer, 2, loaded["step"])
    ranks.train(model, optimizer, 2)
    if smp.rdp_rank() == 0:
        content = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "step": 2}
        smp.save(content, f, partial=True)
    return ranks.train(model, optimizer, 2, 2)


@pytest.mark.parametrize("config", [TWO_STAGES, TWO_BY_TWO], ids=["pp2", "pp2-dp2"])
def test_training_goes_on_bit_for_bit(request: pytest.FixtureRequest, tmp_path: Path, config: dict[str, Any]) -> None:
    pool: RankPool = request.getfixturevalue("pool4" if config.get("ddp") else "pool2")
    f = str(tmp_path / "net.pt")
    whole = pool.run(train, f, False, config=config)
    resumed = pool.run(train, f, True, config=config)
    assert [[x.tolist() for x in losses] for losses in whole] == [[x.tolist() for x in losses] for losses in resumed]


def train_by_hook(f: str, resume: bool) -> list[Any]:
    """The weights at once, and the optimizer's state in a hook at the end of the first step, as a Trainer of scripts does it."""
    sharded = smp.state.cfg.shard_optimizer_state
    model = smp.DistributedModel(ranks.net(1 if resume else 0))
    if smp.pp_size() > 1:
        ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    if not resume:
        ranks.train(model, optimizer, 2)
        content = optimizer.local_state_dict(gather_if_shard=False)
        if sharded or smp.rdp_rank() == 0:
            smp.save(content, f, partial=True, v3=sharded)
        weights = model.state_dict()
        if smp.rank() == 0:
            smp.save(weights, f + ".model", partial=False)
        smp.barrier()
    else:
        model.load_state_dict(smp.load(f + ".model", partial=False))
        called = []

        def hook(model: Any, optimizer: Any) -> None:
            called.append(optimizer.load_state_dict(smp.load(f, partial=True)))

        model.register_post_step_hook(hook)
    losses = [loss.tolist() for loss in ranks.train(model, optimizer, 2, 2)]
    if resume:
        assert len(called) == 1
    return [losses, optimizer.state_dict()]


@pytest.mark.parametrize(
    "config", [TWO_STAGES, {**ranks.TWO_REPLICAS, "shard_optimizer_state": True}], ids=["stages", "sharded"]
)
def test_optimizer_state_that_a_hook_loads_in_the_first_step(pool2: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    """It counts in that very step."""
    f = str(tmp_path / "optimizer.pt")
    whole = pool2.run(train_by_hook, f, False, config=config)
    assert (tmp_path / "optimizer.pt_0_0_1").exists() == ("shard_optimizer_state" in config)
    resumed = pool2.run(train_by_hook, f, True, config=config)
    assert ranks.same(whole, resumed)
