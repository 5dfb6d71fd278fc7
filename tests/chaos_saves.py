"""Saves that are interrupted: jobs of a training that is killed, or refused by the disk, again and again.

    python tests/chaos_saves.py SEED CHAINS SAVES_PER_CHAIN

A chain is one folder of checkpoints and one layout. Each of its jobs resumes from what `newest` names, and saves once,
under a new tag or the last one; during that save something may happen. Every tensor that a save writes is filled with the
number of the save, so that whatever mixes two saves shows. After each job this process, which runs no job itself, looks
at the folder (`Chain.check`). The seed decides all but the moments of kills from outside.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import engine_ranks as ranks
import sdp_ranks
import shardwright.torch as smp
from engine_ranks import TWO_REPLICAS, TWO_STAGES
from failing_files import Faults, How, installed
from forked_ranks import Job, mark
from shardwright.checkpoint import background, inspection, integrity, layout
from shardwright.checkpoint.storage import local
from shardwright.errors import CheckpointNotFoundError, ShardwrightError

WAITS = {"timeout_s": 60, "startup_timeout_s": 120, "log_level": "error"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, TWO_STAGES),
    "sharded": (2, {**TWO_REPLICAS, "shard_optimizer_state": True}),
    "one": (1, {"microbatches": 2}),
    "sdp": (2, sdp_ranks.config(2, 2)),
}
REFUSALS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@dataclass(frozen=True)
class Save:
    """What one job does. number: what tensors are filled with.   resumed_from: of the save that must come back.

    plain: on a file system that can't exchange two names, nor give a file two.
    fault: None, "operation" (`at`, on rank `victim`), or "moment" (after `delay_s`, rank `victim` or, if that is None,
    all).
    """

    number: int
    tag: str
    again: bool
    kind: str
    keep: int | None
    plain: bool
    resume: tuple[int, bool] | None
    fault: str | None
    victim: int | None
    at: tuple[str, int]
    how: How
    code: int
    delay_s: float

    @property
    def sort(self) -> tuple[str, bool]:
        """Saves of one sort take the same steps, or nearly so."""
        return self.kind, self.again

    @property
    def may_not_delete(self) -> bool:
        """Is a deletion refused? That is logged, and left for the next save: no reason to call this one failed."""
        return self.fault == "operation" and self.how == "error" and self.at[0].split()[0] in ("unlink", "rmdir")

    def __str__(self) -> str:
        what = {"operation": f"{self.how} at {self.at}", "moment": f"kill after {self.delay_s:.3f} s"}
        who = "all ranks" if self.victim is None else f"rank {self.victim}"
        fault = f", {what[self.fault]} of {who}" if self.fault else ""
        return f"save {self.number} as {self.tag!r}, {self.kind}, keep {self.keep}{', plain' if self.plain else ''}{fault}"


# ------------------------------------------------------------------ on the ranks


def work(root: str, save: Save) -> tuple[list[str], str]:
    """Resume, save; returns the steps of the save here, and what was raised."""
    model = smp.DistributedModel(ranks.net(save.number))
    if smp.pp_size() > 1:
        ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    if save.resume is not None:
        number, partial = save.resume
        looked: list[None] = []
        content = smp.resume_from_checkpoint(root, partial=partial)
        assert content["number"] == number, f"resumed from {content}, expected {number}"
        model.register_post_partition_hook(lambda model, optimizer: looked.append(all_are(number, weights(model))))
    ranks.train_step(model, ranks.data(save.number))
    if save.resume is not None:
        assert looked
        all_are(number, states(optimizer))
    optimizer.step()
    fill(save.number, model, optimizer)
    struck = save.fault == "operation" and smp.rank() == save.victim
    faults = Faults(Path(root), save.at if struck else None, save.how, save.code)
    error = ""
    if save.plain:
        make_plain()
    smp.barrier()
    mark(f"saving-{smp.rank()}")
    with installed(faults):
        try:
            save_once(root, save, model, optimizer)
        except ShardwrightError as raised:
            error = f"{type(raised).__name__}: {raised}"
    steps = faults.steps.copy()
    if error:
        assert error.startswith("CheckpointError"), error
        assert any(os.strerror(code) in error for code in REFUSALS), error
        if smp.rank() == 0:
            check_after_refusal(Path(root), save)
        smp.barrier()
        fill(save.number, model, optimizer)
        save_once(root, save, model, optimizer)  # the next one, in the same processes, is whole and cleans up
    return steps, error


def make_plain() -> None:
    def link(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    os.link = link
    local._exchange = lambda one, other: False


def check_after_refusal(root: Path, save: Save) -> None:
    """All that is there is whole, and `newest` names the checkpoint before or this one."""
    found = inspection.checkpoints(root)
    assert not [problem for c in found for problem in integrity.harmful(inspection.verify(c))]
    named = [number_of(root, c.name) for c in found if c.is_newest]
    before = [] if save.resume is None else [save.resume[0]]
    assert named in ([save.number], before), f"newest is of {named}, before {before}"


def save_once(root: str, save: Save, model: Any, optimizer: Any) -> None:
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "user_content": {"number": save.number}}
    if save.kind == "full":
        smp.save_checkpoint(root, save.tag, partial=False, **options)
        return
    smp.save_checkpoint(
        root, save.tag, num_kept_partial_checkpoints=save.keep, blocking=save.kind != "background", **options
    )
    if save.kind == "background":
        ranks.train_step(model, ranks.data(save.number + 1))
        fill(save.number, model, optimizer, 0.5)
        background.finish()
        fill(save.number, model, optimizer)


def weights(model: Any) -> list[torch.Tensor]:
    """This rank's tensors of the model."""
    return [value for value in model.local_state_dict().values() if isinstance(value, torch.Tensor)]


def states(optimizer: Any) -> list[torch.Tensor]:
    """This rank's tensors of the optimizer."""
    found = [value for values in optimizer.state.values() for value in values.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


@torch.no_grad()
def fill(number: int, model: Any, optimizer: Any, more: float = 0.0) -> None:
    for tensor in weights(model) + states(optimizer):
        tensor.fill_(number + more)


def all_are(number: int, tensors: list[torch.Tensor]) -> None:
    assert tensors
    others = [tensor.flatten()[:3] for tensor in tensors if not bool((tensor == number).all())]
    assert not others, f"expected {number}, {len(others)} others, the first are {others[:3]}"


# ------------------------------------------------------------------ in the process that looks on


def number_of(root: Path, name: str) -> int:
    """The save that a checkpoint is of: whole, and every tensor of it."""
    checkpoint = inspection.find(root, name)
    problems = integrity.harmful(inspection.verify(checkpoint))
    assert not problems, f"{name}: {problems}"
    partial = checkpoint.kind == "partial"
    content = layout.USER_CONTENT if partial else f"user_content_{name}"
    reader = checkpoint.reader(trust=False)
    number: int = reader.value(content, ("number",))
    tensors = {f"{entry.name} {entry.state}": tensor for entry, tensor in inspection.whole_tensors(checkpoint)}
    if not partial:
        states = reader.value(f"optimizer_{name}", ("state",))
        tensors.update((f"{i} {key}", tensor) for i, state in states.items() for key, tensor in state.items())
    assert len(tensors) > 40
    for what, tensor in tensors.items():
        assert bool((tensor == number).all()), f"{name} is of save {number}, but {what}: {tensor}"
    return number


@dataclass
class Chain:
    """The jobs of one folder.

    newest: number and kind of the checkpoint that `newest` names.   tags: the number of each checkpoint, by name.
    """

    name: str
    root: Path
    draw: random.Random
    seen: Counter[str]
    steps: dict[Any, list[str]]
    newest: tuple[int, bool] | None = None
    tags: dict[str, int] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)

    def run(self, number: int) -> None:
        num_ranks, config = LAYOUTS[self.name]
        save = self.plan(number, num_ranks)
        self.history.append(str(save))
        with Job(num_ranks, work, str(self.root), save, config={**config, **WAITS}) as job:
            if save.fault == "moment":
                self._strike(job, save)
            ended = job.wait(120)
        struck = any(rank.killed for rank in ended)
        told = [rank.value for rank in ended if rank.value is not None]
        failures = [rank.error for rank in ended if rank.error is not None]
        assert struck or not failures, "\n".join(failures)
        assert not any("still running" in failure for failure in failures), "\n".join(failures)
        errors = {error for _, error in told}
        assert struck or len(errors) == 1, f"ranks were told different things: {errors}"
        for rank, (steps, error) in enumerate(told if not struck else []):
            if not error:
                self.steps[save.sort, rank > 0] = steps
        outcome = "killed" if struck else "refused" if errors != {""} else "whole"
        self.seen[outcome] += 1
        self.history[-1] += f": {outcome}"
        self.check(save, finished=not struck)

    def plan(self, number: int, num_ranks: int) -> Save:
        draw = self.draw
        kind = draw.choice(["blocking", "blocking", "background", "full"])
        names = [name for name in self.tags if (kind == "full") != name.endswith(layout.PARTIAL_SUFFIX)]
        again = bool(names) and draw.random() < 0.6
        tag = draw.choice(names).removesuffix(layout.PARTIAL_SUFFIX) if again else f"s{number}"
        how: How = draw.choice(["before", "before", "after", "half", "error"])
        victim = draw.choice([0, 0, *range(num_ranks)])
        save = Save(
            number, tag, again, kind, draw.choice([None, None, 2]), draw.random() < 0.3, self.newest, None, victim, ("", 0), how,
            draw.choice(REFUSALS), draw.uniform(0, 0.06),
        )  # fmt: skip
        if draw.random() < 0.15:
            return replace(save, fault="moment", victim=draw.choice([victim, None]))
        known = self.steps.get((save.sort, victim > 0))
        if not known:  # nothing happens to the first save of each sort
            return save
        what = draw.choice(sorted({step.split()[0] for step in known}))  # the few that rename count as much as the many writes
        step = draw.choice(sorted(step for step in set(known) if step.split()[0] == what))
        return replace(save, fault="operation", at=(step, draw.randrange(known.count(step))))

    def _strike(self, job: Job, save: Save) -> None:
        """Kill from outside, some time after the save has begun."""
        end_s = time.monotonic() + 120
        while not all(job.has_mark(f"saving-{rank}") for rank in job.processes):
            assert time.monotonic() < end_s, "the job doesn't begin to save"
            time.sleep(0.001)
        time.sleep(save.delay_s)
        if save.victim is None:
            job.kill()
        else:
            os.kill(job.processes[save.victim], 9)

    # -------------------------------------------------------------- what must be true

    def check(self, save: Save, *, finished: bool) -> None:
        """Whatever happened: all that has a final name is whole, nothing is lost, and `newest` names what it should."""
        found = {name: number_of(self.root, name) for name in self._names()}
        name = save.tag if save.kind == "full" else save.tag + layout.PARTIAL_SUFFIX
        for known, number in self.tags.items():
            allowed = {number, save.number} if known == name else {number}
            assert known in found or (save.keep and known.endswith(layout.PARTIAL_SUFFIX)), f"{known} is lost"
            assert found.get(known, number) in allowed, f"{known} holds {found[known]}, expected {allowed}"
        assert found.keys() <= {*self.tags, name}
        kept = [known for known in found if known.endswith(layout.PARTIAL_SUFFIX)]
        before = [known for known in self.tags if known.endswith(layout.PARTIAL_SUFFIX)]
        assert save.keep is None or len(kept) >= min(save.keep, len(before)), f"of {before} only {kept} are left"
        self.tags = found
        if finished:
            assert found.get(name) == save.number, f"{name} holds {found.get(name)}"
            if not save.may_not_delete:
                self._check_clean(save, kept)
        self._check_newest(save, name, finished=finished)
        if found and self.draw.random() < 0.3:
            self._check_damage(self.draw.choice(sorted(found)))

    def _names(self) -> list[str]:
        """What somebody who lists the folder takes for a checkpoint."""
        return [c.name for c in inspection.checkpoints(self.root)] if self.root.is_dir() else []

    def _check_clean(self, save: Save, kept: list[str]) -> None:
        left = [n for n in os.listdir(self.root) if n.startswith(layout.WORK_PREFIX) or n.endswith(layout.PREVIOUS_SUFFIX)]
        assert not left, f"a whole save leaves {left}"
        assert save.kind == "full" or save.keep is None or len(kept) <= save.keep

    def _check_newest(self, save: Save, name: str, *, finished: bool) -> None:
        try:
            named = (self.root / layout.NEWEST).read_text()
        except FileNotFoundError:
            assert self.newest is None, "newest is gone"
            assert not finished
            return
        assert named in self.tags, f"newest names {named!r}, of {list(self.tags)}"
        now = self.tags[named], named.endswith(layout.PARTIAL_SUFFIX)
        new = save.number, save.kind != "full"
        assert now == new or (not finished and now == self.newest), f"newest is of {now}, before {self.newest}, new {new}"
        self.newest = now

    def _check_damage(self, name: str) -> None:
        """One changed bit, cut end or missing file in a copy of a checkpoint is found, and called by its file."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(self.root, copy)
            checkpoint = inspection.find(copy, name)
            manifest = inspection.usable_manifest(checkpoint)
            mark = layout.MANIFEST if checkpoint.kind == "partial" else f"manifest_{name}.json"
            place = self.draw.choice([*manifest.files, mark])
            second = checkpoint.place / (place + layout.PREVIOUS_SUFFIX)
            if second.exists() and second.read_bytes() == (checkpoint.place / place).read_bytes():
                second.unlink()  # a link to the same file, before it was copied
            how = damage(checkpoint.place / place, self.draw)
            self.seen[f"damage: {how}"] += 1
            try:
                found = integrity.harmful(inspection.verify(inspection.find(copy, name)))
            except CheckpointNotFoundError:
                assert place == mark
                return
            assert found, f"verify finds nothing in {name} whose {place} is {how}"


def damage(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    how = draw.choice(["flipped", "cut", "grown", "gone"])
    if how == "gone":
        path.unlink()
        return how
    if how == "flipped":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[draw.randrange(len(content)) :]
    else:
        content += b"\0"
    path.write_bytes(content)
    return how


def main(seed: int, num_chains: int, saves_per_chain: int) -> None:
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    steps: dict[Any, list[str]] = {}
    for number in range(num_chains):
        draw = random.Random(f"{seed} {number}")
        name = list(LAYOUTS)[number % len(LAYOUTS)]
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            chain = Chain(name, Path(folder) / "checkpoints", draw, seen, steps)
            try:
                for save in range(1, saves_per_chain + 1):
                    chain.run(save)
            except BaseException:
                listing = [str(p.relative_to(folder)) for p in sorted(Path(folder).rglob("*"))]
                print(f"seed {seed}, chain {number} ({name}):", *chain.history, *listing, sep="\n  ")
                raise
    print(f"seed {seed}: {dict(seen)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
