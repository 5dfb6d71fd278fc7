"""A full checkpoint whose tag is saved again: whatever stops that, one of the two is whole."""

from __future__ import annotations

import errno
import json
import sys
import uuid
from pathlib import Path

import pytest
import torch

from failing_files import Faults, installed
from shardwright.checkpoint import full, full_files, layout
from shardwright.checkpoint.layout import Layout
from shardwright.errors import CheckpointNotFoundError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="paths of open files are found through /proc")
TAG = "t"
ONE = Layout(pp=1, tp=1, rdp=1, placement="cluster", shard_optimizer_state=False)


def save(root: Path, number: float, faults: Faults) -> None:
    """What rank 0 does."""
    with installed(faults):
        job = full._Save(root, TAG, full._prepare(root, TAG), trust=False)
        job.write(TAG, "model", {"w": torch.full((5,), number)})
        job.write(full_files.optimizer_file(TAG), "optimizer", {"state": {0: {"step": torch.tensor(number)}}})
        job.write_user_content({"number": number})
        job.publish((), (), (), ONE)


def number_of(root: Path) -> float:
    """Of the save that is whole: all files tell the same."""
    whole = full_files.whole_set(root, TAG, checksums=True)
    assert whole is not None, sorted(path.name for path in root.iterdir())
    manifest, paths = whole
    read = {record.role: torch.load(paths[name], weights_only=True) for name, record in manifest.files.items()}
    numbers = {float(read["model"]["w"][0]), float(read["optimizer"]["state"][0]["step"]), read["user_content"]["number"]}
    assert len(numbers) == 1, numbers
    return numbers.pop()


def test_a_tag_saved_again_is_whole_whatever_operation_fails(tmp_path: Path) -> None:
    """The chaos tests kill real processes at drawn operations; here each operation is refused once."""
    rehearsal = Faults(tmp_path / "rehearsal", None, "error", errno.EIO)
    for number in (1.0, 2.0):
        rehearsal.steps.clear()
        save(tmp_path / "rehearsal", number, rehearsal)
    steps = [(step, rehearsal.steps[:at].count(step)) for at, step in enumerate(rehearsal.steps)]
    assert sum(step.split()[0] in ("rename", "replace", "_exchange") for step, _ in steps) >= 4
    outcomes = set()
    for at in steps:
        root = tmp_path / uuid.uuid4().hex
        save(root, 1.0, Faults(root, None, "error", errno.EIO))
        try:
            save(root, 2.0, Faults(root, at, "error", errno.EIO))
            stopped = False
        except Exception:
            stopped = True
        left = number_of(root)
        assert stopped or left == 2.0, at
        outcomes.add((stopped, left))
        full_files.settle_leftovers(root)  # as a save of another tag does
        assert not [path for path in root.iterdir() if path.name.endswith(layout.PREVIOUS_SUFFIX)], at
        assert number_of(root) == left, at
        save(root, 3.0, Faults(root, None, "error", errno.EIO))
        assert number_of(root) == 3.0, at
        names = sorted(path.name for path in root.iterdir())
        assert not [name for name in names if name.startswith(layout.WORK_PREFIX) or name.endswith(layout.PREVIOUS_SUFFIX)], at
    assert outcomes >= {(True, 1.0), (True, 2.0)}


def test_what_stands_for_the_old_name_of_transformers(tmp_path: Path) -> None:
    """In this order, and only where the file of that name is not there."""
    for number in range(2):
        (tmp_path / f"part_{number}").touch()
    places = {
        "model.safetensors.index.json": ("part_0", "part_1"),
        "pytorch_model.bin.index.json": ("part_1",),
        "model.safetensors": ("model.safetensors",),
        "pytorch_model.bin": ("pytorch_model.bin",),
    }
    for name, parts in places.items():
        index = {"weight_map": {f"weight {part}": part for part in parts}}
        (tmp_path / name).write_text(json.dumps(index) if name.endswith("json") else "")
        assert [place.name for place in full_files.plain_files(tmp_path, "pytorch_model.bin")] == list(parts)
    with pytest.raises(CheckpointNotFoundError):
        full_files.plain_files(tmp_path, "other.bin")
