"""The original's form of sharded data parallelism, written while training goes on and into an object store."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import reconstruction
import shardwright.torch as smp
from checkpoint_ranks import caught
from engine_ranks import same
from harness import RankPool
from s3_server import S3Server
from sdp_ranks import config
from sharded_models import train_steps, wrapped
from shardwright.checkpoint import background
from shardwright.checkpoint.storage import steps


def save_everywhere(roots: list[str]) -> dict[str, Any]:
    """The same state at once and in the background. Of the second nothing is written before training has gone on."""
    model, optimizer = wrapped(0)
    train_steps(model, optimizer, 0, 2)
    saved = model.state_dict()
    told = {"model": model, "optimizer": optimizer, "user_content": {"step": 2}}
    trained = threading.Event()

    def wait(operation: str, where: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert trained.wait(120)

    for root in roots:
        smp.save_checkpoint(root, "at_once", **told)
    with steps.watched(wait):
        for number, root in enumerate(roots):
            smp.save_checkpoint(root, "later", blocking=False, **told)
            if number + 1 < len(roots):  # the next save waits for this one
                trained.set()
                background.finish()
                trained.clear()
        train_steps(model, optimizer, 2, 4)
        trained.set()
        background.finish()
    return {"saved": saved, "weights": model.state_dict(), "state": optimizer.local_state_dict(gather_if_shard=False)}


def resume(root: str) -> dict[str, Any]:
    model, optimizer = wrapped(1)
    assert smp.resume_from_checkpoint(root, "later") == {"step": 2}
    train_steps(model, optimizer, 2, 4)
    return {"weights": model.state_dict(), "state": optimizer.local_state_dict(gather_if_shard=False)}


def downloaded(server: S3Server, prefix: str, root: Path) -> Path:
    """The objects below a prefix as files; a save's own folder is left out of their names."""
    for key in server.keys(prefix + "/"):
        parts = key.split("/")
        path = root.joinpath(*(part for part in parts[1:] if len(part) != 32))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.get(key))
    return root


@pytest.mark.parametrize("kind", [pytest.param(None, marks=pytest.mark.heavy), "bf16"])
def test_training_goes_on_while_shards_are_written(pool2: RankPool, server: S3Server, tmp_path: Path, kind: str | None) -> None:
    prefix, local = uuid.uuid4().hex[:8], tmp_path / "local"
    settings = config(2, 2, **({kind: True} if kind else {}))
    options = {"config": settings, "environment": server.environment, "timeout_s": 240}
    roots = [str(local), f"s3://{server.bucket}/{prefix}"]
    straight = pool2.run(save_everywhere, roots, **options)
    for root in (local, downloaded(server, prefix, tmp_path / "remote")):
        for file in sorted((root / "at_once_partial").glob("*.pt")):
            one, other = (torch.load(root / folder / file.name, weights_only=False) for folder in ("at_once_partial", "later_partial"))
            pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
            assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs), file.name
        found = reconstruction.full_state_dict(root, "later_partial")
        assert found.keys() == straight[0]["saved"].keys() - {"again.weight"}
        for name, weight in found.items():
            assert torch.equal(weight.to(straight[0]["saved"][name].dtype), straight[0]["saved"][name]), name
    for root in roots:
        for run, other in zip(straight, pool2.run(resume, root, **options), strict=True):
            assert same(run["weights"], other["weights"])
            assert same(run["state"], other["state"])


def refused(root: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Rank 1's shard can't be written: at once, and in the background. Then it can."""
    model, optimizer = wrapped(0)
    train_steps(model, optimizer, 0, 2)
    told = {"model": model, "optimizer": optimizer, "user_content": {"step": 2}}
    smp.save_checkpoint(root, "good", **told)

    def refuse(operation: str, where: str) -> None:
        if operation == "write" and where.endswith("optimizer_1.pt"):
            raise OSError(28, "No space left on device")

    texts = []
    with steps.watched(refuse):
        texts.append(caught(smp.save_checkpoint, root, "bad", **told)[1])
        smp.save_checkpoint(root, "worse", blocking=False, **told)
        train_steps(model, optimizer, 2, 3)
        texts.append(caught(smp.save_checkpoint, root, "next", **told)[1])
    before = model.state_dict()
    train_steps(model, optimizer, 3, 4)
    assert smp.resume_from_checkpoint(root) == {"step": 2}
    train_steps(model, optimizer, 2, 3)
    smp.save_checkpoint(root, "later", blocking=False, **told)
    background.finish()
    return texts, before, model.state_dict()


def test_a_shard_that_cannot_be_written_is_told_to_all_ranks(pool2: RankPool, server: S3Server, tmp_path: Path) -> None:
    prefix = uuid.uuid4().hex[:8]
    for root in (str(tmp_path), f"s3://{server.bucket}/{prefix}"):
        told = pool2.run(refused, root, config=config(2, 2), environment=server.environment, timeout_s=240)
        assert told[0][0] == told[1][0]
        for text, call in zip(told[0][0], ("'bad_partial'", "'worse_partial' in the background"), strict=True):
            assert call in text
            assert "No space left on device" in text
            assert "optimizer_1.pt" in text
        assert all(same(before, after) for _, before, after in told)
    for names in ({path.name for path in tmp_path.iterdir()}, {key.split("/")[1] for key in server.keys(prefix + "/")}):
        assert names == {"good_partial", "later_partial", "newest"}
    assert server.unfinished_uploads() == []
