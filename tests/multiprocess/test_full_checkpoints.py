"""Full checkpoints: one file of the whole model, out of any layout and into any other, and never lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import reference
import shardwright.torch as smp
from any_layout import SAVED_AT, STEPS, Layout, config, expected, layout_name, pool_of, train, whole_masters, wrap
from harness import RankPool
from shardwright.checkpoint import stream
from shardwright.checkpoint.torch_stream import StreamedTorchFile
from shardwright.errors import CheckpointError, CheckpointNotFoundError

# ------------------------------------------------------------------ on the ranks


def save_in_the_middle(path: str, name: str = "gpt2") -> list[float]:
    made, model, optimizer = wrap(name)
    train(made, model, optimizer, 0, SAVED_AT)
    smp.save_checkpoint(path, "mid", partial=False, model=model, optimizer=optimizer, user_content={"step": SAVED_AT})
    return train(made, model, optimizer, SAVED_AT, STEPS)


def go_on(path: str, name: str = "gpt2", tag: str | None = None) -> list[float]:
    made, model, optimizer = wrap(name, seed=1)
    content = smp.resume_from_checkpoint(path, tag=tag, partial=False)
    return train(made, model, optimizer, content["step"], STEPS)


@pytest.fixture(scope="module")
def pool1() -> Any:
    with RankPool(1) as pool:
        yield pool


# ------------------------------------------------------------------ any layout (FF-17, full)

QUICK = [((2, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 1, 1)), ((2, 1, 1), (2, 1, 2))]
HEAVY = [((2, 1, 2), (1, 1, 4)), ((2, 1, 2), (4, 1, 1)), ((4, 1, 1), (1, 1, 2)), ((1, 1, 4), (2, 1, 1))]


@pytest.mark.parametrize(
    ("before", "after"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.heavy) for pair in HEAVY)],
    ids=layout_name,
)
def test_training_goes_on_in_another_layout(
    request: pytest.FixtureRequest, tmp_path: Path, before: Layout, after: Layout
) -> None:
    truth = expected()[SAVED_AT:]
    for loss in pool_of(request, before).run(save_in_the_middle, str(tmp_path), config=config(before), timeout_s=120):
        assert loss == pytest.approx(truth, rel=1e-5)
    for loss in pool_of(request, after).run(go_on, str(tmp_path), config=config(after), timeout_s=120):
        assert loss == pytest.approx(truth, rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("partial", [True, False])
def test_replicas_become_slices(pool4: RankPool, tmp_path: Path, partial: bool) -> None:
    """FF-17: pp 2 x dp 2 to pp 2 x tp 2. A script marks its modules whatever the degrees."""
    truth = expected()[SAVED_AT:]
    pool4.run(save_marked, str(tmp_path), partial, True, config=config((2, 1, 2)), timeout_s=120)
    for loss in pool4.run(go_on_marked, str(tmp_path), partial, config=config((2, 2, 1)), timeout_s=120):
        assert loss == pytest.approx(truth, rel=1e-4)
    pool4.run(save_marked, str(tmp_path), partial, False, config=config((2, 1, 2)), timeout_s=120)
    for reason in pool4.run(refuse_marked, str(tmp_path), partial, config=config((2, 2, 1)), timeout_s=120):
        assert "mark the same modules for tensor parallelism" in reason


def wrap_marked(seed: int, marked: bool = True) -> tuple[Any, Any, Any]:
    made = models.make("gpt2", seed=seed)
    smp.set_tensor_parallelism(made.model, marked)
    model = smp.DistributedModel(made.model)
    return made, model, smp.DistributedOptimizer(reference.adamw(list(model.parameters())))


def save_marked(path: str, partial: bool, marked: bool) -> None:
    made, model, optimizer = wrap_marked(0, marked)
    train(made, model, optimizer, 0, SAVED_AT)
    smp.save_checkpoint(path, "mid", partial=partial, model=model, optimizer=optimizer, user_content={"step": SAVED_AT})


def go_on_marked(path: str, partial: bool) -> list[float]:
    made, model, optimizer = wrap_marked(1)
    content = smp.resume_from_checkpoint(path, partial=partial)
    return train(made, model, optimizer, content["step"], STEPS)


def refuse_marked(path: str, partial: bool) -> str:
    wrap_marked(1)
    with pytest.raises(CheckpointError) as caught:
        smp.resume_from_checkpoint(path, partial=partial)
    return str(caught.value)


def test_tensor_parallel_slices_are_joined_and_cut_again(
    request: pytest.FixtureRequest, pool2: RankPool, tmp_path: Path
) -> None:
    """Slices of GPT-2's distributed form, 2 x 2 to 1 x 2, optimizer state included."""
    pool4: RankPool = request.getfixturevalue("pool4")
    truth = expected()[SAVED_AT:]
    for loss in pool4.run(save_in_the_middle, str(tmp_path), config=config((2, 2, 1)), timeout_s=120):
        assert loss == pytest.approx(truth, rel=1e-4)
    for loss in pool2.run(go_on, str(tmp_path), config=config((1, 2, 1)), timeout_s=120):
        assert loss == pytest.approx(truth, rel=1e-4)
    plain = models.make("gpt2", seed=2).model
    plain.load_state_dict(torch.load(tmp_path / "mid"), strict=True)  # in transformers' own names
    assert plain.transformer.wte.weight is plain.lm_head.weight


@pytest.mark.parametrize(
    ("before", "after"), [((2, 1, 1), (1, 1, 1)), ((1, 1, 2), (2, 1, 1))], ids=layout_name
)
@pytest.mark.parametrize("more", [{"bf16": True}, {"fp16": True, "shard_optimizer_state": True}], ids=["bf16", "fp16-sharded"])
def test_masters_go_along(
    request: pytest.FixtureRequest, tmp_path: Path, before: Layout, after: Layout, more: dict[str, Any]
) -> None:
    """FF-29: one update is below the spacing of bf16, so weights without masters would stand still."""
    last = pool_of(request, before).run(save_masters, str(tmp_path), config=config(before, **more), timeout_s=120)
    saved = torch.load(tmp_path / "mid", weights_only=True)
    assert {t.dtype for t in saved.values()} == {torch.bfloat16 if "bf16" in more else torch.float16}, "of the model"
    assert saved.keys() == models.make("mlp").model.state_dict().keys(), "and no mark"
    for found in pool_of(request, after).run(load_masters, str(tmp_path), config=config(after, **more), timeout_s=120):
        assert found.keys() <= last[0].keys()
        assert found
        for name, (master, moment) in found.items():
            assert master.dtype is torch.float32
            assert torch.equal(master, last[0][name][0]), name
            assert torch.equal(moment, last[0][name][1]), name
            assert not torch.equal(master, master.bfloat16().float()), "the interesting case"


def save_masters(path: str) -> dict[str, tuple[Tensor, Tensor]]:
    made, model, optimizer = wrap("mlp")
    train(made, model, optimizer, 0, SAVED_AT)
    smp.save_checkpoint(path, "mid", partial=False, model=model, optimizer=optimizer)
    return whole_masters(optimizer)


def load_masters(path: str) -> dict[str, tuple[Tensor, Tensor]]:
    made, model, optimizer = wrap("mlp", seed=1)
    smp.resume_from_checkpoint(path, partial=False)
    train(made, model, optimizer, SAVED_AT, SAVED_AT + 1, update=False)
    return whole_masters(optimizer)


# ------------------------------------------------------------------ what lies there


def save_at_once(path: str, tag: str = "only", **options: Any) -> None:
    _, model, optimizer = wrap("mlp")
    smp.save_checkpoint(path, tag, partial=False, model=model, optimizer=optimizer, **options)


def test_files_and_their_names(pool2: RankPool, tmp_path: Path) -> None:
    """FF-21, full: what an interrupted job of another library left under these names is replaced."""
    for name in ("only", "optimizer_only"):
        (tmp_path / name).write_bytes(b"half")
    pool2.run(save_at_once, str(tmp_path), config=config((2, 1, 1)))
    assert sorted(os.listdir(tmp_path)) == ["manifest_only.json", "newest", "only", "optimizer_only", "rng_only", "user_content_only"]
    assert (tmp_path / "newest").read_text() == "only"
    content = torch.load(tmp_path / "only")
    assert content.keys() == models.make("mlp").model.state_dict().keys()
    assert len(pool2.run(weights_of_mlp, str(tmp_path), config=config((2, 1, 1)))) == 2


def weights_of_mlp(path: str) -> dict[str, Tensor]:
    _, model, _ = wrap("mlp", seed=1)
    smp.resume_from_checkpoint(path, partial=False)
    return dict(model.state_dict())


def weights_after_resume(path: str, tag: str, **options: Any) -> dict[str, Tensor]:
    _, model, _ = wrap("gpt2", seed=1)
    assert smp.resume_from_checkpoint(path, tag, partial=False, **options) == {}
    whole: dict[str, Tensor] = model.state_dict()
    return {name: tensor.clone() for name, tensor in whole.items()}


def check_weights(pool: RankPool, layout: Layout, path: Path, tag: str) -> None:
    want = models.make("gpt2").model.state_dict()
    for got in pool.run(weights_after_resume, str(path), tag, config=config(layout)):
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_a_state_dict_that_the_script_wrote(pool2: RankPool, tmp_path: Path) -> None:
    torch.save(models.make("gpt2").model.state_dict(), tmp_path / "fullmodel.pt")
    (tmp_path / "user_content_fullmodel.pt").touch()  # empty, a marker
    check_weights(pool2, (2, 1, 1), tmp_path, "fullmodel.pt")


def fine_tune_delayed(path: str) -> tuple[dict[str, Tensor], int]:
    """Rank 0 writes the weights; all ranks build the model without any, and resume. Also the largest part that was real."""
    if smp.rank() == 0:
        torch.save(models.make("gpt2").model.state_dict(), f"{path}/fullmodel.pt")
    with smp.delay_param_initialization():
        made = models.make("gpt2", seed=1)
    assert all(p.is_meta for p in made.model.parameters())
    model = smp.DistributedModel(made.model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    smp.resume_from_checkpoint(path, "fullmodel.pt", partial=False)
    train(made, model, optimizer, 0, 1)
    held = sum(p.numel() for p in model.local_parameters())
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, held


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 2)], ids=layout_name)
def test_fine_tuning_without_a_whole_model_on_any_rank(pool2: RankPool, tmp_path: Path, layout: Layout) -> None:
    want = models.make("gpt2").model.state_dict()
    whole = sum(p.numel() for p in models.make("gpt2").model.parameters())
    results = pool2.run(fine_tune_delayed, str(tmp_path), config=config(layout))
    for got, held in results:
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert held <= whole
    assert sum(held for _, held in results) == whole * layout[2]


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_what_transformers_saves_stands_for_its_old_name(
    pool2: RankPool, tmp_path: Path, max_shard_size: str
) -> None:
    made: Any = models.make("gpt2").model
    made.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    check_weights(pool2, (2, 1, 1), tmp_path, "pytorch_model.bin")


def resume_error(path: str, tag: str | None, kind: type[Exception]) -> str:
    wrap("mlp")
    with pytest.raises(kind) as caught:
        smp.resume_from_checkpoint(path, tag, partial=False)
    return str(caught.value)


@pytest.mark.parametrize("tag", [None, "other", "pytorch_model.bin"])
def test_what_is_not_there_is_an_error_on_every_rank(pool2: RankPool, tmp_path: Path, tag: str | None) -> None:
    (tmp_path / "step_3_partial").mkdir()
    for reason in pool2.run(resume_error, str(tmp_path), tag, CheckpointNotFoundError, config=config((2, 1, 1))):
        assert str(tmp_path) in reason
        assert "step_3_partial" in reason


def test_changed_and_cut_files_are_refused(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(save_at_once, str(tmp_path), config=config((2, 1, 1)))
    whole = (tmp_path / "only").read_bytes()
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    for damaged in (bytes(flipped), whole[:-100]):
        (tmp_path / "only").write_bytes(damaged)
        for reason in pool2.run(resume_error, str(tmp_path), "only", CheckpointError, config=config((2, 1, 1))):
            assert "'only' is damaged: only is" in reason
            assert "holds no other full one" in reason


def save_on_a_full_disk(path: str) -> list[str]:
    """Rank 0 can't write the second tensor that comes; then a save that works, with a translation that looks at values.

    All ranks meet after every tensor.
    """
    stream._MEETING_BYTES = 1
    _, model, optimizer = wrap("mlp")
    real, added = StreamedTorchFile.add, []

    def add(file: StreamedTorchFile, tensor: Tensor) -> Any:
        added.append(tensor)
        if len(added) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, tensor)

    StreamedTorchFile.add = add  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as caught:
            smp.save_checkpoint(path, "only", partial=False, model=model, optimizer=optimizer)
    finally:
        StreamedTorchFile.add = real  # type: ignore[method-assign]

    def shouted(content: dict[str, Any]) -> dict[str, Any]:
        assert all(tensor.isfinite().all() for tensor in content.values()), "not before they are there"
        return {name.upper(): tensor for name, tensor in content.items()}

    smp.state.module_manager.translate_functions.append((shouted, shouted))
    smp.save_checkpoint(path, "loud", partial=False, model=model)
    stream._MEETING_BYTES = 1 << 30
    return [str(caught.value), *sorted(os.listdir(path))]


def test_a_full_disk_while_tensors_come_and_a_translation_that_needs_them_all(pool2: RankPool, tmp_path: Path) -> None:
    for reason, *left in pool2.run(save_on_a_full_disk, str(tmp_path), config=config((2, 1, 1))):
        assert "No space left" in reason
        assert left == ["loud", "manifest_loud.json", "newest", "rng_loud", "user_content_loud"]
    want = models.make("mlp").model.state_dict()
    found = torch.load(tmp_path / "loud")
    assert all(torch.equal(found[name.upper()], tensor) for name, tensor in want.items())


# ------------------------------------------------------------------ interrupted saves


class Killed(BaseException):
    """Stands for the end of the process: no handler of the library may undo or finish anything."""


def interrupted_save(path: str, at: int) -> bool:
    """Save the same tag again with other weights, and stop before the renaming, linking or deleting number `at`."""
    _, model, _ = wrap("mlp", seed=3)
    count = 0
    real: dict[str, Callable[..., Any]] = {"replace": os.replace, "link": os.link, "unlink": os.unlink}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > at:
                raise Killed
            return real[name](*args, **options)

        return call

    for name in real:
        setattr(os, name, counted(name))
    try:
        smp.save_checkpoint(path, "only", partial=False, model=model)
    except Killed:
        return False
    finally:
        for name, function in real.items():
            setattr(os, name, function)
    return True


def which_seed(path: str) -> int:
    _, model, _ = wrap("mlp", seed=7)
    smp.resume_from_checkpoint(path, partial=False)
    weight = next(iter(model.state_dict().values()))
    return next(s for s in (0, 3) if torch.equal(weight, next(iter(models.make("mlp", seed=s).model.state_dict().values()))))


def test_a_save_that_ends_at_any_moment_leaves_a_whole_checkpoint(pool1: RankPool, tmp_path: Path) -> None:
    first = tmp_path / "first"
    pool1.run(save_at_once, str(first), config=config((1, 1, 1)))
    seen = []
    for at in range(60):
        path = tmp_path / f"again_{at}"
        shutil.copytree(first, path)
        finished = pool1.run(interrupted_save, str(path), at, config=config((1, 1, 1)))[0]
        seen.append(pool1.run(which_seed, str(path), config=config((1, 1, 1)))[0])
        # the next save cleans up, and is whole
        pool1.run(save_at_once, str(path), config=config((1, 1, 1)))
        assert pool1.run(which_seed, str(path), config=config((1, 1, 1))) == [0]
        assert not [name for name in os.listdir(path) if "previous" in name or name.startswith(".")]
        if finished:
            break
    else:
        pytest.fail("the save never got through")
    assert seen == sorted(seen), "old, then new"
    assert seen[0] == 0
    assert seen[-1] == 3
