"""With stages, tensors are read in the first step: what happened to the files since they were chosen is found there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardwright.torch as smp
from any_layout import config, train, wrap
from checkpoint_ranks import caught
from harness import RankPool

STAGES = config((2, 1, 1))
REPLICAS = config((1, 1, 2), shard_optimizer_state=True)


def save_twice(path: str) -> list[float]:
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, 1)
    smp.save_checkpoint(path, "first", model=model, optimizer=optimizer, user_content={"step": 1})
    train(made, model, optimizer, 1, 2)
    smp.save_checkpoint(path, "second", model=model, optimizer=optimizer, user_content={"step": 2})
    return train(made, model, optimizer, 2, 4)


def strike(path: str, name: str, how: str) -> None:
    file = Path(path, "second_partial", name)
    if how == "deleted":
        file.unlink()
    elif how == "flipped":
        with file.open("r+b") as opened:
            middle = file.stat().st_size // 2
            opened.seek(middle)
            byte = opened.read(1)[0]
            opened.seek(middle)
            opened.write(bytes([byte ^ 1]))
    elif how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "replaced":
        shutil.copy(Path(path, "first_partial", name), f"{file}.new")
        os.replace(f"{file}.new", file)


def resume_struck(path: str, names: list[str], how: str, strict: bool) -> Any:
    """Strike between the resume and the first step. Returns: what the step raises, and whoever asks for the weights then;
    the losses.
    """
    made, model, optimizer = wrap("mlp", seed=1)
    assert smp.resume_from_checkpoint(path, strict=strict) == {"step": 2}
    smp.barrier()
    if smp.rank() == 0:
        for name in names:
            strike(path, name, how)
    smp.barrier()
    losses: list[float] = []
    told = caught(lambda: losses.extend(train(made, model, optimizer, 2, 4)))
    return told[1], caught(model.local_state_dict)[1] if told[1] else "", losses


def struck(pool: RankPool, path: Path, name: str, how: str, strict: bool = True) -> list[Any]:
    """The same with a copy of a folder."""
    shutil.copytree(path, path.parent / "copy")
    told = pool.run(resume_struck, str(path.parent / "copy"), [name], how, strict, config=STAGES, timeout_s=120)
    shutil.rmtree(path.parent / "copy")
    return told


@pytest.mark.parametrize("saved", [STAGES, REPLICAS], ids=["same layout", "another one"])
def test_damage_between_resume_and_the_first_step(pool2: RankPool, tmp_path: Path, saved: dict[str, Any]) -> None:
    """Every rank names file and block, and no step runs. What is mapped may be deleted or replaced."""
    path = tmp_path / "saved"
    straight = pool2.run(save_twice, str(path), config=saved, timeout_s=120)
    same = saved is STAGES
    file = "model_1_0.pt" if same else "optimizer_0_0_1.pt"
    flipped, cut = f"{file} is flipped: bytes 0 to ", f"{file} is cut: it ends at byte " if same else f"{file} is flipped: not a readable archive"
    for how, strict, problem in (("flipped", True, flipped), ("flipped", False, flipped), ("cut", True, cut)):
        for text, again, losses in struck(pool2, path, file, how, strict):
            assert "checkpoint 'second_partial' has been damaged since it was chosen" in text
            assert problem in text
            assert "resume from another checkpoint" in text
            assert "overwritten in part" in again
            assert losses == []
    for how in ("nothing", "deleted", "replaced"):
        for rank, (text, again, losses) in enumerate(struck(pool2, path, file, how)):
            if same or how == "nothing":
                assert (text, losses) == ("", pytest.approx(straight[rank], rel=0 if same else 1e-5, abs=0))
            else:
                assert file in text
                assert "overwritten in part" in again
                assert losses == []
