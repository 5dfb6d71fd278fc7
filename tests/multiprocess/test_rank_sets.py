"""Files of ranks that `smp.save` wrote, loaded by `smp.load` in other layouts: training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_ranks as ranks
import shardwright.torch as smp
from any_layout import pool_of, train
from harness import RankPool
from layout_examples import SAVED_AT, STEPS, Example, Side, build, save_files, snapshot
from shardwright.checkpoint import rank_files
from shardwright.errors import CheckpointError

Snapshot = tuple[dict[str, Any], list[float], dict[str, Any]]

ONE, PP2, TP2, DP2 = (Side(layout, "") for layout in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
SHARDED = Side((1, 1, 2), "state")
FOUR = Side((2, 1, 2), "state")
TP_AND_SHARDED = Side((1, 2, 2), "state")


@pytest.fixture(scope="module")
def pool1() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def example_of(before: Side, after: Side, precision: str = "") -> Example:
    return Example(before, after, True, precision, depth=4, width=7, tied=True, doubled=False)


def save(f: str, example: Example, v3: bool) -> Snapshot:
    made, model, optimizer = build(example, 0)
    train(made, model, optimizer, 0, SAVED_AT)
    save_files(f, model, optimizer, v3=v3)
    before = snapshot(model, optimizer)
    losses = train(made, model, optimizer, SAVED_AT, STEPS)
    return before, losses, snapshot(model, optimizer)


def resume(f: str, example: Example, late: bool, own: bool) -> Snapshot:
    """late: load when the model is partitioned.   own: each rank has a file of its own to load."""
    made, model, optimizer = build(example, 1)
    if late:
        train(made, model, optimizer, 0, 1, update=False)
    loaded = smp.load(f)
    assert loaded["place"] == 0, "what isn't a partial dict is that of the first file"
    assert loaded["nets"][0]["_smp_is_partial"] is loaded["optimizer"]["_smp_is_partial"] is own
    assert loaded["nets"][0].keys() == {*model.state_dict(), "_smp_is_partial"}
    model.load_state_dict(loaded["nets"][0])
    optimizer.load_state_dict(loaded["optimizer"])
    train(made, model, optimizer, 0, 1, update=False)
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    losses = train(made, model, optimizer, loaded["step"], STEPS)
    return before, losses, snapshot(model, optimizer)


def run(request: pytest.FixtureRequest, side: Side, precision: str, function: Any, *args: Any) -> list[Snapshot]:
    config = {**side.config, **({precision: True} if precision else {})}
    return pool_of(request, side.layout).run(function, *args, config=config, timeout_s=180)


def check(request: pytest.FixtureRequest, f: str, before: Side, afters: list[Side], precision: str = "", v3: bool = False) -> None:
    saved, losses, ended = run(request, before, precision, save, f, example_of(before, before, precision), v3)[0]
    tolerance = 3e-2 if precision else 1e-5
    for number, after in enumerate(afters):
        same_replicas = "parameters" not in (before.sharding, after.sharding) and not before.sharding
        own = same_replicas and before.layout[: 3 if v3 else 2] == after.layout[: 3 if v3 else 2]
        resumed = run(request, after, precision, resume, f, example_of(before, after, precision), number % 2 == 1, own)
        for found, went_on, after_all in resumed:
            assert found.keys() == saved.keys()
            assert [name for name in saved if not torch.equal(found[name], saved[name])] == []
            assert went_on == pytest.approx(losses, rel=tolerance)
            if not precision:
                for name, value in ended.items():
                    torch.testing.assert_close(after_all[name], value, rtol=1e-4, atol=1e-5, msg=name)


def bit_for_bit(f: str, resume: bool) -> list[Any]:
    """Losses by microbatch, and weights: four steps and a save after the second, or the last two."""
    model = smp.DistributedModel(ranks.net(1 if resume else 0))
    if smp.pp_size() > 1:
        ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    if resume:
        assert all(t.is_meta for t in smp.load(f, "meta")["model"].values() if isinstance(t, torch.Tensor))
        loaded = smp.load(f)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        ranks.train(model, optimizer, 2)
        smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}, f)
        smp.barrier()
    losses = ranks.train(model, optimizer, 2, 2)
    return [[loss.tolist() for loss in losses], dict(model.state_dict()), optimizer.state_dict()["state"]]


def test_stages_and_slices(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    check(request, str(tmp_path / "net"), PP2, [ONE, TP2])


def test_without_stages_bit_for_bit(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """And back, over the files that were there. And what can't be joined."""
    f = str(tmp_path / "net")
    for pool, config, other, other_config in [
        (pool2, ranks.TWO_STAGES, pool1, ONE.config),
        (pool1, ONE.config, pool2, ranks.TWO_STAGES),
    ]:
        straight = pool.run(bit_for_bit, f, False, config=config)[0]
        for resumed in other.run(bit_for_bit, f, True, config=other_config):
            assert ranks.same(resumed, straight)
    assert (tmp_path / "net_1_0").is_file()
    pool2.run(save_faulty_sets, str(tmp_path), config=ranks.TWO_STAGES)
    (tmp_path / "gone_1_0").unlink()
    (reasons,) = pool1.run(refused_sets, str(tmp_path), config=ONE.config)
    for kind, expected in FAULTS.items():
        assert expected in reasons[kind], kind
    assert torch.load(tmp_path / "foreign_0_0")["model"]["else"].tolist() == [0, 0]  # with plain torch


def test_shards_of_each_rank_in_half_precision(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    check(request, str(tmp_path / "net"), SHARDED, [ONE, PP2], "fp16", v3=True)


HEAVY = [
    (ONE, [PP2, TP2, SHARDED], "", False),
    (TP2, [ONE, PP2, DP2], "", False),
    (TP2, [ONE, SHARDED], "bf16", False),
    (PP2, [ONE, TP2], "fp16", False),
    (SHARDED, [ONE, DP2, TP2], "", False),
    (SHARDED, [ONE, FOUR], "", True),
    (DP2, [ONE, SHARDED], "", True),
    (FOUR, [ONE, SHARDED, Side((1, 1, 4), "state"), Side((2, 1, 1), ""), TP_AND_SHARDED], "bf16", False),
    (FOUR, [SHARDED, TP_AND_SHARDED], "", True),
    (TP_AND_SHARDED, [ONE, FOUR], "", False),
    (TP_AND_SHARDED, [SHARDED], "fp16", True),
    (Side((1, 1, 2), "parameters"), [ONE, PP2, Side((1, 1, 4), "parameters")], "", True),
    (Side((1, 1, 4), "parameters"), [Side((1, 1, 2), "parameters"), SHARDED], "bf16", True),
    (ONE, [Side((1, 1, 2), "parameters")], "", True),
    (DP2, [Side((1, 1, 2), "parameters"), Side((1, 1, 4), "")], "", False),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("before", "afters", "precision", "v3"), HEAVY)
def test_any_layout(
    request: pytest.FixtureRequest, tmp_path: Path, before: Side, afters: list[Side], precision: str, v3: bool
) -> None:
    check(request, str(tmp_path / "net"), before, afters, precision, v3)


# ------------------------------------------------------------------ what can't be joined


def refused(f: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        smp.load(f)
    return str(caught.value)


def save_faulty_sets(folder: str) -> None:
    """Sets of two stages with something wrong, each by its kind."""
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    ranks.train(model, optimizer, 1)
    first = smp.pp_rank() == 0
    for kind in FAULTS:
        f = f"{folder}/{kind}"
        content: dict[str, Any] = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        if kind == "twice" and first:
            smp.save(content, f)
        if kind == "lacking" and not first:
            del content["optimizer"]
        if kind == "foreign":
            content["model"] = {"_smp_is_partial": True, "else": torch.zeros(2)}
        if kind == "group":
            content["optimizer"]["param_groups"].pop()
        if kind == "two":
            smp.save(content, f, v3=True)
        if kind == "earlier":  # as releases before this one wrote it
            rank_files.save(content, f)
        else:
            smp.save(content, f)
    smp.barrier()


FAULTS = {
    "gone": "gone_0_0 was saved with pp=2 tp=1 rdp=1, but of that set gone_1_0 is missing",
    "two": "two_0_0_0 and two_0_0 are of two sets of files",
    "twice": "twice_0_0 and twice_1_0 come from different saves",
    "lacking": "lacking_1_0 has no partial state dict where lacking_0_0 has one, in optimizer",
    "foreign": "model in foreign_0_0 isn't a part of the model that was wrapped when it was saved",
    "group": "optimizer in group_0_0 has parameter groups of [",
    "earlier": "earlier_0_0 was saved with pp=2 tp=1 rdp=1, this job has pp=1 tp=1 rdp=1",
}


def refused_sets(folder: str) -> dict[str, str]:
    return {kind: refused(f"{folder}/{kind}") for kind in FAULTS}
