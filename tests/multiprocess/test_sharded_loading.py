"""State dicts of sharded optimizers: every form of them, into every form of optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as smp
from engine_ranks import same, tensors
from harness import RankPool
from sharded_models import DDP, OPTIMIZERS, SHARDED, SMALL_BUCKETS, batch, train_step, two_groups, uneven
from shardwright.checkpoint.manifest import Manifest
from shardwright.errors import CheckpointError, UsageError


def wrapped(module: nn.Module, name: str = "adamw") -> tuple[Any, Any]:
    model = smp.DistributedModel(module, bucket_cap_mb=SMALL_BUCKETS)
    return model, smp.DistributedOptimizer(two_groups(model, OPTIMIZERS[name]))


def train(model: Any, optimizer: Any, first: int, last: int) -> list[Tensor]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        losses.append(train_step(model, batch(step, smp.dp_rank())).stack())
        optimizer.step()
    return losses


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, replicas: int) -> list[Any]:
    """The same in one process; losses by step and replica."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        losses.append([])
        for replica in range(replicas):
            parts = [model(x).square().mean() for x in batch(step, replica).chunk(2)]
            (sum(parts) / 2 / replicas).backward()
            losses[-1].append(torch.stack(parts).detach())
        optimizer.step()
    return losses


# -- by name, in both directions -----------------------------------------------------------------------------------


def from_plain(weights: Any, content: Any, steps: int, early: bool) -> tuple[Any, Any, Any]:
    model, optimizer = wrapped(uneven(1))
    model.load_state_dict(weights)
    if not early:  # pieces are there already
        train_step(model, batch(99, 0))
        optimizer.zero_grad()
    kept = copy.deepcopy(content)
    optimizer.load_state_dict(content)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in content["param_groups"]]
    losses = train(model, optimizer, 3, 3 + steps)
    assert same(content, kept)
    return losses, {n: p.detach().clone() for n, p in model.local_named_parameters()}, optimizer.state_dict()


@pytest.mark.parametrize("early", [True, False])
def test_plain_state_into_shards_and_back(pool2: RankPool, early: bool) -> None:
    """FF-13: two groups whose members alternate; moments are those of one process, by name, in both directions."""
    module = uneven()
    optimizer = two_groups(module, OPTIMIZERS["adamw"])
    train_alone(module, optimizer, 0, 3, 2)
    weights, content = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    results = pool2.run(from_plain, weights, content, 2, early, config=SHARDED)
    losses = train_alone(module, optimizer, 3, 5, 2)
    for rank, (found, after, state) in enumerate(results):
        for step in range(2):
            torch.testing.assert_close(found[step], losses[step][rank], rtol=1e-5, atol=1e-7)
        for name, value in module.named_parameters():
            torch.testing.assert_close(after[name], value.detach(), rtol=1e-5, atol=1e-7)
        wanted = optimizer.state_dict()
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in wanted["param_groups"]]
        assert [g["lr"] for g in state["param_groups"]] == [g["lr"] for g in wanted["param_groups"]]
        assert state["state"].keys() == wanted["state"].keys()
        for index, values in wanted["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(state["state"][index][key], value, rtol=1e-4, atol=1e-7)
        other = uneven(2)
        other.load_state_dict(after, strict=False)
        again = two_groups(other, OPTIMIZERS["adamw"])
        again.load_state_dict(state)
        twin, twin_optimizer = copy.deepcopy(module), two_groups(uneven(3), OPTIMIZERS["adamw"])
        twin_optimizer = two_groups(twin, OPTIMIZERS["adamw"])
        twin_optimizer.load_state_dict(copy.deepcopy(wanted))
        one, two = train_alone(other, again, 5, 7, 2), train_alone(twin, twin_optimizer, 5, 7, 2)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


# -- every form ------------------------------------------------------------------------------------------------------


def forms(form: str, early: bool, only_first: bool) -> tuple[Any, Any]:
    """Train on; take a dict; load it into a fresh optimizer; go on. What went on, and what was never interrupted."""
    model, optimizer = wrapped(uneven())
    train(model, optimizer, 0, 2)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    gathered = optimizer.local_state_dict()
    own = optimizer.local_state_dict(gather_if_shard=False)
    content = {"full": optimizer.state_dict(), "gathered": gathered, "own": own}[form]
    assert isinstance(gathered["state"], list) is (smp.rdp_rank() == 0)
    assert isinstance(own["state"], dict)
    assert len(gathered["state"]) == (smp.rdp_size() if smp.rdp_rank() == 0 else len(own["state"]))
    content = copy.deepcopy(content)
    straight = train(model, optimizer, 2, 4)
    straight.append({n: p.detach().clone() for n, p in model.local_named_parameters()})
    straight.append(optimizer.state_dict())
    smp.shutdown()
    smp.init(SHARDED)
    model, optimizer = wrapped(uneven(5))
    if not early:
        train(model, optimizer, 7, 8)
    model.load_state_dict(weights)
    if smp.rdp_rank() == 0 or not only_first:
        optimizer.load_state_dict(content)
    resumed = train(model, optimizer, 2, 4)
    resumed.append({n: p.detach().clone() for n, p in model.local_named_parameters()})
    resumed.append(optimizer.state_dict())
    return straight, resumed


FORMS = [
    ("full", True, False), ("full", False, True), ("gathered", True, True), ("gathered", False, True),
    ("own", True, False), ("own", False, False), ("full", True, True),
]  # fmt: skip


@pytest.mark.parametrize(("form", "early", "only_first"), FORMS)
def test_training_goes_on_from_every_form(pool2: RankPool, form: str, early: bool, only_first: bool) -> None:
    """early: before the first step.   only_first: loaded on rdp_rank 0 alone."""
    for straight, resumed in pool2.run(forms, form, early, only_first, config=SHARDED, timeout_s=120):
        assert same(straight, resumed)


def refused() -> None:
    model, optimizer = wrapped(uneven())
    train(model, optimizer, 0, 1)
    own = optimizer.local_state_dict(gather_if_shard=False)
    others = smp.allgather(own, smp.RDP_GROUP)[1 - smp.rdp_rank()]
    with pytest.raises(UsageError, match="this shard of the optimizer state has elements"):
        optimizer.load_state_dict(others)
    before = [t.clone() for t in tensors(list(optimizer.state.values()))]
    assert same(before, list(tensors(list(optimizer.state.values()))))
    if smp.rdp_rank() == 1:
        with pytest.raises(UsageError, match="has 1 shards, this rank is rdp_rank 1"):
            optimizer.load_state_dict({**own, "state": [own["state"]], "_smp_spans": [own["_smp_spans"]]})
    if smp.rdp_rank() == 0:
        optimizer.load_state_dict(own)
    with pytest.raises(UsageError, match="with a shard of the state on 1 of 2 replicas"):
        train_step(model, batch(1, smp.dp_rank()))


def test_shards_that_do_not_fit_are_refused(pool2: RankPool) -> None:
    pool2.run(refused, config=SHARDED)


def unsharded_refuses(content: Any) -> None:
    _, optimizer = wrapped(uneven())
    with pytest.raises(UsageError, match="aren't sharded here"):
        optimizer.load_state_dict(content)


def one_shard() -> Any:
    model, optimizer = wrapped(uneven())
    train(model, optimizer, 0, 1)
    return optimizer.local_state_dict(gather_if_shard=False)


def test_a_shard_is_refused_where_nothing_is_sharded(pool2: RankPool) -> None:
    shards = pool2.run(one_shard, config=SHARDED)
    pool2.run(unsharded_refuses, shards[0], config=DDP)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(path: str, steps: int) -> tuple[Any, Any]:
    model, optimizer = wrapped(uneven())
    train(model, optimizer, 0, 2)
    smp.save_checkpoint(path, "two", model=model, optimizer=optimizer)
    losses = train(model, optimizer, 2, 2 + steps)
    return losses, optimizer.state_dict()


def resumed(path: str, steps: int, early: bool, bucket_cap_mb: float = SMALL_BUCKETS) -> tuple[Any, Any]:
    model = smp.DistributedModel(uneven(3), bucket_cap_mb=bucket_cap_mb)
    optimizer = smp.DistributedOptimizer(two_groups(model, OPTIMIZERS["adamw"]))
    if not early:
        train(model, optimizer, 5, 6)
    smp.resume_from_checkpoint(path)
    losses = train(model, optimizer, 2, 2 + steps)
    return losses, optimizer.state_dict()


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("early", [True, False])
def test_a_checkpoint_goes_on_bit_for_bit(
    request: pytest.FixtureRequest, tmp_path: Path, dp: int, early: bool
) -> None:
    """FF-15, FF-16 at the same layout: sizes that leave ranks with nothing, a parameter without gradient or state."""
    pool: RankPool = request.getfixturevalue(f"pool{dp}")
    wanted = pool.run(saved, str(tmp_path), 2, config=SHARDED)
    names = {p.name for p in (tmp_path / "two_partial").glob("optimizer_*.pt")}
    assert names == {f"optimizer_0_0_{rank}.pt" for rank in range(dp)}
    for content in (torch.load(tmp_path / "two_partial" / name, weights_only=True) for name in names):
        assert content["_smp_is_partial"] is True
    check_manifest(tmp_path / "two_partial")
    for one, other in zip(wanted, pool.run(resumed, str(tmp_path), 2, early, config=SHARDED), strict=True):
        assert same(one, other)


def check_manifest(folder: Path) -> None:
    """Every moment is described whole: its pieces don't overlap and leave nothing out."""
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), where="test")
    shapes = {n: tuple(p.shape) for n, p in uneven().named_parameters()}
    moments = [e for e in manifest.entries if e.role == "optimizer" and e.state == "exp_avg"]
    assert {e.name for e in moments} == {n for n in shapes if "unused" not in n and n != "frozen"}
    for entry in moments:
        assert entry.shape == shapes[entry.name]
        ends = [0]
        for span in sorted(part.span for part in entry.slices if part.span is not None):
            assert span[0] == ends[-1]
            ends.append(span[1])
        assert ends[-1] == torch.Size(entry.shape).numel()
    image = next(e for e in moments if e.name == "image")
    assert {part.strides for part in image.slices} == {uneven().image.stride()}


def resumed_with_other_buckets(path: str) -> None:
    with pytest.raises((UsageError, CheckpointError), match="this shard of the optimizer state has elements"):
        resumed(path, 1, True, 25)


def test_other_pieces_than_saved_are_refused(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(saved, str(tmp_path), 0, config=SHARDED)
    pool2.run(resumed_with_other_buckets, str(tmp_path), config=SHARDED)
