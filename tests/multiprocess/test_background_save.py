"""Saving in the background: what is written is what was there at the call, and nothing fails unseen."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import shardwright.torch as smp
from any_layout import SAVED_AT, STEPS, config, expected, train, wrap
from harness import RankPool
from launched import Launched
from shardwright.checkpoint import background, torch_stream
from shardwright.checkpoint.storage import steps
from shardwright.errors import CheckpointError, UsageError


def save_and_train_on(path: str) -> list[float]:
    made, model, optimizer = wrap()
    if not model.partitioned:
        with pytest.raises(UsageError, match="before the model is partitioned"):
            smp.prepare_background_save(model, optimizer)
    train(made, model, optimizer, 0, 1)
    smp.prepare_background_save(model, optimizer)
    train(made, model, optimizer, 1, 2)
    background._end_preparing()
    prepared = {key: buffer.data_ptr() for key, buffer in background.staging._buffers.items()}
    smp.save_checkpoint(path, "first", model=model, optimizer=optimizer, user_content={"step": 2}, blocking=False)
    train(made, model, optimizer, 2, SAVED_AT)
    kept = {key: buffer.data_ptr() for key, buffer in background.staging._buffers.items() if key in prepared}
    assert kept == prepared
    assert any("exp_avg" in key for key in prepared)
    smp.save_checkpoint(path, "mid", model=model, optimizer=optimizer, user_content={"step": SAVED_AT}, blocking=False)
    return train(made, model, optimizer, SAVED_AT, STEPS)


def go_on(path: str, tag: str) -> list[float]:
    made, model, optimizer = wrap(seed=1)
    content = smp.resume_from_checkpoint(path, tag)
    return train(made, model, optimizer, content["step"], STEPS)


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_what_was_there_at_the_call_is_what_resumes(pool2: RankPool, tmp_path: Path, sharded: bool) -> None:
    """Buffers serve two saves; training goes on before either is on the disk."""
    settings = config((1, 1, 2) if sharded else (2, 1, 1), shard_optimizer_state=sharded)
    whole = pool2.run(save_then_wait, str(tmp_path), config=settings, timeout_s=120)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first_partial", "mid_partial", "newest"]
    assert (tmp_path / "newest").read_text() == "mid_partial"
    for tag, step in (("mid", SAVED_AT), ("first", 2)):
        resumed = pool2.run(go_on, str(tmp_path), tag, config=settings, timeout_s=120)
        assert [losses[SAVED_AT - step :] for losses in resumed] == whole
    assert whole[0] == pytest.approx(expected()[SAVED_AT:], rel=1e-5)


def save_then_wait(path: str) -> list[float]:
    losses = save_and_train_on(path)
    background.finish()
    return losses


def save_whole_twice(path: str) -> tuple[str, str]:
    """The same full checkpoint at once and in the background, while training goes on; then one that fails."""
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 2)
    smp.save_checkpoint(path, "now", partial=False, model=model, optimizer=optimizer, user_content={"step": 2})
    told = {"model": model, "optimizer": optimizer, "user_content": {"step": 2}}
    smp.save_checkpoint(path, "later", partial=False, blocking=False, **told)
    train(made, model, optimizer, 2, 4)
    optimizer.param_groups[0]["lr"] *= 2
    background.finish()

    def full(operation: str, where: str) -> None:
        if operation == "write" and "optimizer_later" in where:
            raise OSError(28, "No space left on device")

    with steps.watched(full):
        smp.save_checkpoint(path, "later", partial=False, blocking=False, **told)
        with pytest.raises(CheckpointError) as caught:
            smp.resume_from_checkpoint(path, partial=False)
    return str(caught.value), Path(path, "newest").read_text()


def test_a_full_checkpoint_in_the_background_is_of_the_call(pool2: RankPool, tmp_path: Path) -> None:
    for reason, newest in pool2.run(save_whole_twice, str(tmp_path), config=config((2, 1, 1)), timeout_s=120):
        assert "'later' in the background" in reason
        assert "No space left" in reason
        assert newest == "later"
    names = [f"{kind}{tag}{end}" for kind, end in (("", ""), ("manifest_", ".json"), ("optimizer_", ""), ("rng_", ""), ("user_content_", ""))
             for tag in ("later", "now")]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "newest"])
    for kind in ("", "optimizer_", "user_content_"):
        one, other = (torch.load(tmp_path / f"{kind}{tag}", weights_only=True) for tag in ("now", "later"))
        assert one.keys() == other.keys()
        pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def fail_on_rank_one(path: str) -> tuple[str, str]:
    """The disk refuses one rank's second file; the next save says so on both, and then works."""
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 1)
    smp.save_checkpoint(path, "good", model=model, optimizer=optimizer)
    real = torch_stream.write_file

    def refuse(file: Path, *args: Any, **options: Any) -> Any:
        if "optimizer_1" in file.name:
            raise OSError(28, "No space left on device", str(file))
        return real(file, *args, **options)

    torch_stream.write_file = refuse
    try:
        smp.save_checkpoint(path, "bad", model=model, optimizer=optimizer, blocking=False)
        train(made, model, optimizer, 1, 2)
        with pytest.raises(CheckpointError) as caught:
            smp.save_checkpoint(path, "next", model=model, optimizer=optimizer)
    finally:
        torch_stream.write_file = real
    newest = Path(path, "newest").read_text()
    smp.save_checkpoint(path, "next", model=model, optimizer=optimizer)
    return str(caught.value), newest


def fail_without_room_for_a_word(path: str) -> tuple[str, float, str]:
    """Rank 1 can't write a single byte any more, so neither a note that says so."""
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 1)
    smp.save_checkpoint(path, "good", model=model, optimizer=optimizer)

    def full(operation: str, where: str) -> None:
        if operation == "write" and smp.rank() == 1:
            raise OSError(28, "No space left on device")

    with steps.watched(full):
        smp.save_checkpoint(path, "bad", model=model, optimizer=optimizer, blocking=False)
        started_s = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            background.finish()
    waited_s = time.monotonic() - started_s
    listed = " ".join(sorted(os.listdir(path)))
    smp.barrier()
    smp.save_checkpoint(path, "next", model=model, optimizer=optimizer)
    return str(caught.value), waited_s, listed


def test_a_rank_that_cannot_even_say_so_holds_up_nobody(pool2: RankPool, tmp_path: Path) -> None:
    """On a full disk there is no room for the note to rank 0."""
    for reason, waited_s, listed in pool2.run(fail_without_room_for_a_word, str(tmp_path), config=config((2, 1, 1)), timeout_s=90):
        assert "'bad_partial' in the background" in reason
        assert "rank 1" in reason
        assert waited_s < 30
        assert listed == "good_partial newest"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good_partial", "newest", "next_partial"]


def test_a_failure_is_raised_by_the_next_save_on_all_ranks(pool2: RankPool, tmp_path: Path) -> None:
    for reason, newest in pool2.run(fail_on_rank_one, str(tmp_path), config=config((2, 1, 1)), timeout_s=60):
        assert "No space left" in reason
        assert "'bad_partial' in the background" in reason
        assert newest == "good_partial"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good_partial", "newest", "next_partial"]


SCRIPT = """
import os, signal, sys, time
import torch
import shardwright.torch as smp
from shardwright.checkpoint import torch_stream

smp.init({"ddp": True, "microbatches": 1, "log_level": "warning"})
model = smp.DistributedModel(torch.nn.Linear(8, 8))

@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

train_step(model, torch.ones(2, 8))
real = torch_stream.write_file

def slow(path, *args, **options):
    time.sleep(1.0)
    if sys.argv[1] == "die" and smp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, *args, **options)

torch_stream.write_file = slow
smp.save_checkpoint("checkpoints", "one", model=model, blocking=False)
print("returned", flush=True)
if sys.argv[1] == "die":
    train_step(model, torch.ones(2, 8))
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["end", "die"])
def test_the_end_of_a_process_waits_for_its_save_but_not_for_the_dead(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    with Launched(tmp_path, "--nproc", "2", "train.py", how) as job:
        code = job.process.wait(120)
        assert job.stdout.count("returned") == 2, job.stderr
        assert not job.processes()
    found = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    if how == "end":
        assert code == 0, job.stderr
        assert found == ["newest", "one_partial"]
    else:
        assert code != 0
        assert "one_partial" not in found


def test_staging_reuses_its_buffers_and_keeps_ties() -> None:
    staging = background.Staging()
    weight = torch.arange(4.0)
    first = staging.copy({"a": weight, "b": weight, "n": [1, weight[:2]]})
    assert first["a"] is first["b"]
    weight.mul_(2)
    assert first["a"].tolist() == [0, 1, 2, 3]
    second = staging.copy({"a": weight, "b": weight, "n": [1, weight[:2]]})
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [0, 2, 4, 6]
    other: Tensor = staging.copy({"a": torch.zeros(5)})["a"]
    assert other.shape == (5,)
