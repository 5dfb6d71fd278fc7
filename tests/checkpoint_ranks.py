"""What single ranks do in the checkpoint tests. Every function runs in a rank process after `init`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint_fakes import FakeModel, FakeOptimizer, fingerprint
from shardwright.checkpoint import background, integrity, load, save
from shardwright.checkpoint.load import resume_from_checkpoint
from shardwright.checkpoint.save import save_checkpoint
from shardwright.checkpoint.storage import local, steps
from shardwright.checkpoint.torch_file import TorchFile, Transfer
from shardwright.topology.context import world
from shardwright.transport.collectives import barrier
from shardwright.transport.objects import allgather_object


def with_options(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function of this module with keyword arguments, which the harness doesn't pass."""
    return globals()[name](*args, **options)


def new(**options: Any) -> tuple[FakeModel, FakeOptimizer]:
    """A fresh model and optimizer, with random streams that differ from rank to rank."""
    model = FakeModel(seed=world().coordinates.pp, lazy=options.pop("lazy", False))
    torch.manual_seed(1000 + world().rank)
    random.seed(2000 + world().rank)
    return model, FakeOptimizer(model, **options)


def caught(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Call and return what was raised: the name of its class, and its text."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return " ".join(kinds), str(error)
    return "", ""


def train_and_save(
    path: str, tag: str = "step_2", more: int = 2, options: dict[str, Any] | None = None, **saving: Any
) -> dict[str, Any]:
    """Two steps, a save, some steps more; returns what an uninterrupted run ends with."""
    model, optimizer = new(**(options or {}))
    optimizer.train(2)
    content = saving.pop("user_content", {"epoch": 3, "rank": world().rank})
    save_checkpoint(path, tag, model=model, optimizer=optimizer, user_content=content, **saving)
    optimizer.train(more)
    background.finish()
    return fingerprint(model, optimizer)


def resume_and_train(
    path: str, tag: str | None = None, more: int = 2, options: dict[str, Any] | None = None, **resuming: Any
) -> dict[str, Any]:
    """A new model and optimizer, resumed and trained on; partitioned only after the resume if "lazy"."""
    model, optimizer = new(**(options or {}))
    optimizer.train(1)  # whatever is there before is replaced
    content = resume_from_checkpoint(path, tag, model=model, optimizer=optimizer, **resuming)
    restored = model.restored is not None
    model.partition()
    optimizer.train(more)
    return {**fingerprint(model, optimizer), "content": content, "restored": restored}


def resume_error(path: str, tag: str | None = None, agreed: bool = True, **resuming: Any) -> tuple[str, str]:
    """agreed: do all ranks make this call?"""
    model, optimizer = new()
    before = fingerprint(model, optimizer)
    told = caught(resume_from_checkpoint, path, tag, **{"model": model, "optimizer": optimizer, **resuming})
    torch.manual_seed(1000 + world().rank)
    # Bytes are compared while they are read, so that damage may be found late; whatever else is wrong, is found before.
    assert not model.half_loaded or "damaged" in told[1] or "flipped" in told[1], "a resume stopped halfway"
    assert model.half_loaded or fingerprint(model, optimizer) == before, "a failed resume changed the model"
    if agreed:
        assert len(set(map(frozenset, allgather_object(model.half_loaded, "world")))) == 1, "ranks marked the model differently"
    return told


def resume_without_wrapping(path: str) -> tuple[str, str]:
    return caught(resume_from_checkpoint, path, model=None, optimizer=None)


def save_error(path: str, tag: str = "step_9", **saving: Any) -> tuple[str, str]:
    model, optimizer = new()
    optimizer.train(1)
    return caught(save_checkpoint, path, tag, model=model, optimizer=optimizer, **saving)


def save_unpartitioned(path: str) -> tuple[str, str]:
    model, optimizer = new(lazy=True)
    return caught(save_checkpoint, path, "t", model=model, optimizer=optimizer)


# -- faults -----------------------------------------------------------------------------------------------


def save_with_failing_disk(path: str, rank: int, name: str, code: int) -> list[tuple[str, str]]:
    """A save during which one file of one rank can't be written; then one that works, in the same process."""

    def full(operation: str, where: str) -> None:
        if (operation, world().rank) == ("write", rank) and Path(where).name.startswith(name):
            raise OSError(code, os.strerror(code))

    with steps.watched(full):
        first = save_error(path, "step_3")
    seen = (Path(path) / "newest").read_text(), sorted(os.listdir(path))
    barrier("world")
    return [first, (str(seen[0]), " ".join(seen[1])), save_error(path, "step_4")]


def die_while_saving(path: str, tag: str, rank: int, moment: str) -> None:
    """Kill a rank with SIGKILL at a moment of its save."""
    model, optimizer = new()
    optimizer.train(1)
    if world().rank == rank:
        _die_at(moment)
    save_checkpoint(path, tag, model=model, optimizer=optimizer, num_kept_partial_checkpoints=2)


def _die_at(moment: str) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "writing":  # a part is written, then the writer sleeps and is killed
        original = integrity.HashingWriter.write

        def write(self: Any, data: Any) -> int:
            if self.path.name.startswith("optimizer") and self.size_bytes > 500:
                self._file._file.flush()
                time.sleep(0.5)
                die()
            return original(self, data)

        integrity.HashingWriter.write = write  # type: ignore[method-assign]
    elif moment == "before the manifest":
        local.LocalStorage.put = die  # type: ignore[method-assign]
    elif moment == "before the rename":
        local.LocalStorage.publish = die  # type: ignore[method-assign]
    elif moment == "before newest":
        local.LocalStorage.replace_text = die  # type: ignore[method-assign]
    elif moment == "before the deletion":
        save.prune = die
    elif moment in ("exchanged", "moved aside"):  # the same tag again: the old copy isn't deleted yet
        if moment == "moved aside":
            local._exchange = lambda one, other: False
            os.rename = _second_call_is(os.rename, die)
        else:
            local.LocalStorage.remove = die  # type: ignore[method-assign]


def _second_call_is(first: Any, second: Any) -> Any:
    calls = []

    def call(*args: Any) -> None:
        calls.append(args)
        (first if len(calls) == 1 else second)(*args)

    return call


# -- single faults of the field list -----------------------------------------------------------------------


def save_with_own_tag(path: str) -> tuple[str, str]:
    return save_error(path, f"s{world().rank}")


def save_with_own_clock(path: str) -> tuple[str, str]:
    return save_error(f"{path}/run-10:00:0{world().rank}", "t")


def save_with_own_folder(path: str) -> tuple[str, str]:
    own = Path(path) / f"cwd{world().rank}"
    own.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(own)
    try:
        return save_error("relative", "t")
    finally:
        os.chdir(before)


def resume_with_own_options(path: str) -> tuple[str, str]:
    first = world().rank == 0
    return resume_error(path, load_sharded_optimizer_state=first, translate_function=None if first else dict)


def save_on_rank_zero_alone(path: str) -> None:
    if world().rank == 0:
        model, optimizer = new()
        save_checkpoint(path, "t", model=model, optimizer=optimizer)
    barrier("world")


def save_and_resume_disagree(path: str) -> tuple[str, str]:
    return save_error(path) if world().rank == 0 else resume_error(path, agreed=False)


def save_again_and_again(path: str, num_saves: int) -> list[str]:
    """Keep one checkpoint; each rank sleeps at random before a save; once a file is put into an old one.

    Returns: what this rank moved and deleted.
    """
    seen: list[str] = []

    def watch(operation: str, where: str) -> None:
        if operation in ("move", "exchange", "delete"):
            seen.append(f"{operation} {Path(where).name}")

    with steps.watched(watch):
        _save_again_and_again(path, num_saves)
    return seen


def _save_again_and_again(path: str, num_saves: int) -> None:
    model, optimizer = new()
    sleeps = random.Random(world().rank)
    for number in range(num_saves):
        optimizer.train(1)
        time.sleep(sleeps.uniform(0, 0.05))
        if number == num_saves // 2 and world().rank == 0:
            (Path(path) / f"s{number - 1}_partial" / "extra.txt").write_text("mine")
        save_checkpoint(path, f"s{number}", model=model, optimizer=optimizer, num_kept_partial_checkpoints=1)


def random_streams(path: str) -> tuple[list[float], list[float]]:
    """What each rank draws after a save, and after resuming in a process whose streams are all alike."""
    model, optimizer = new()
    save_checkpoint(path, "r", model=model, optimizer=optimizer)
    straight = [*torch.rand(2).tolist(), random.random()]
    torch.manual_seed(0)
    random.seed(0)
    resume_from_checkpoint(path, model=model, optimizer=optimizer)
    return straight, [*torch.rand(2).tolist(), random.random()]


def draws(path: str, resume: bool) -> list[float]:
    """What this rank draws after saving, or after resuming."""
    model, optimizer = new()
    if resume:
        random.seed(0)
        torch.manual_seed(0)
        resume_from_checkpoint(path, model=model, optimizer=optimizer)
    else:
        random.seed(7)  # alike on all ranks
        save_checkpoint(path, "r", model=model, optimizer=optimizer)
    return [*torch.rand(2).tolist(), random.random()]


def resume_counting_reads(path: str) -> list[str]:
    """The names of the files that this rank reads to resume."""
    read: list[str] = []
    original = load.safe_loading.read_file

    def counting(file: Path, **options: Any) -> Any:
        read.append(file.name)
        return original(file, **options)

    load.safe_loading.read_file = counting
    try:
        model, optimizer = new()
        resume_from_checkpoint(path, model=model, optimizer=optimizer)
    finally:
        load.safe_loading.read_file = original
    return sorted(read)


def resume_counting_digests(path: str, skip: bool) -> int:
    """How many files this rank hashes to resume, wholly or by blocks."""
    hashed: list[Path] = []
    original, original_check = integrity.file_digest, TorchFile.check

    def counting(file: Path) -> str:
        hashed.append(file)
        return original(file)

    def counting_check(self: TorchFile, transfers: Sequence[Transfer]) -> list[Transfer]:
        hashed.append(self._path)
        return original_check(self, transfers)

    integrity.file_digest = counting
    TorchFile.check = counting_check  # type: ignore[method-assign]
    if skip:
        os.environ[integrity.SKIP_CHECKSUMS_ENV] = "1"
    try:
        model, optimizer = new()
        resume_from_checkpoint(path, model=model, optimizer=optimizer)
    finally:
        integrity.file_digest = original
        TorchFile.check = original_check  # type: ignore[method-assign]
        os.environ.pop(integrity.SKIP_CHECKSUMS_ENV, None)
    return len(set(hashed))


def save_model_only(path: str) -> None:
    model, _ = new()
    save_checkpoint(path, "weights", model=model)


def resume_wider_model(path: str) -> tuple[str, str]:
    model = FakeModel(width=6)
    return caught(resume_from_checkpoint, path, model=model, optimizer=FakeOptimizer(model))


@dataclass
class Opaque:
    """A type that safe loading doesn't know."""

    value: int


def save_opaque_content(path: str, trust: bool = False) -> tuple[str, str]:
    return save_error(path, "o", user_content=Opaque(3), trust=trust)
