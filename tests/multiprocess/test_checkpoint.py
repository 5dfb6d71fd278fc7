"""Saving and resuming over several ranks: exact when all goes well, nothing lost when it doesn't."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_ranks as ranks
from harness import RankFailure, RankPool, run_ranks
from hostile_files import MakesFolder, plant
from shardwright.checkpoint import integrity, layout

TWO_STAGES = {"pipeline_parallel_degree": 2}
TWO_BY_TWO = {"pipeline_parallel_degree": 2, "ddp": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def run(pool: RankPool, function: Any, *args: Any, config: dict[str, Any], **options: Any) -> list[Any]:
    """Call a function of `checkpoint_ranks` on every rank, with keyword arguments."""
    return pool.run(ranks.with_options, function.__name__, args, options, config=config)


def newest(path: Path) -> str:
    return (path / "newest").read_text()


def checkpoints(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith("_partial"))


def same_on_all(told: list[Any]) -> tuple[str, str]:
    """All ranks raised, and the same."""
    assert len(set(told)) == 1, told
    assert told[0] != ("", ""), "nothing was raised"
    return told[0]


# -- exact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(pool2: RankPool, path: Path, lazy: bool) -> None:
    straight = run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    resumed = run(pool2, ranks.resume_and_train, str(path), options={"lazy": lazy}, config=TWO_STAGES)
    for one, other in zip(straight, resumed, strict=True):
        assert other.pop("content") == {"epoch": 3, "rank": 0}
        assert other.pop("restored")
        assert one == other


def test_replicas_and_stages_together(pool4: RankPool, path: Path) -> None:
    straight = run(pool4, ranks.train_and_save, str(path), config=TWO_BY_TWO)
    names = os.listdir(path / "step_2_partial")
    assert sorted(names) == sorted(
        [
            "model_0_0.pt",
            "model_1_0.pt",
            "optimizer_0_0.pt",
            "optimizer_1_0.pt",
            *(f"rng_{rank}.pt" for rank in range(4)),
            "user_content.pt",
            "partition_info.pt",
            "manifest.json",
        ]
    )
    resumed = run(pool4, ranks.resume_and_train, str(path), tag="step_2_partial", config=TWO_BY_TWO)
    # Model and optimizer come from replica 0, random streams from each rank's own file.
    assert [r["random"] for r in resumed] != [resumed[0]["random"]] * 4
    for rank in (0, 1):
        assert {**straight[rank], "content": {"epoch": 3, "rank": 0}, "restored": True} == resumed[rank]


def test_a_world_of_one(path: Path) -> None:
    with RankPool(1) as pool:
        straight = run(pool, ranks.train_and_save, str(path), config={})
        assert "partition_info.pt" not in os.listdir(path / "step_2_partial")
        resumed = run(pool, ranks.resume_and_train, str(path), config={})
    assert resumed == [{**straight[0], "content": {"epoch": 3, "rank": 0}, "restored": False}]


def test_every_rank_gets_its_own_random_state_back(pool4: RankPool, path: Path) -> None:
    """FF-27."""
    results = run(pool4, ranks.random_streams, str(path), config=TWO_BY_TWO)
    assert all(straight == resumed for straight, resumed in results)
    assert len({tuple(straight) for straight, _ in results}) == 4


def test_random_state_goes_along_into_another_layout(pool2: RankPool, pool4: RankPool, path: Path) -> None:
    """FF-27 over layouts: places that were there have their state; replicas that are new differ where the old ones did."""
    two_replicas = {"ddp": True}
    saved = run(pool4, ranks.draws, str(path / "four"), False, config=TWO_BY_TWO)
    fewer = run(pool2, ranks.draws, str(path / "four"), True, config=two_replicas)
    assert fewer == [saved[0], saved[2]]  # pp 0 of each replica
    saved = run(pool2, ranks.draws, str(path / "two"), False, config=two_replicas)
    more = run(pool4, ranks.draws, str(path / "two"), True, config=two_replicas)
    assert more[:2] == saved
    assert len({tuple(drawn[:2]) for drawn in more}) == 4
    assert len({drawn[2] for drawn in more}) == 1


def test_a_rank_opens_its_own_files_only(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    assert run(pool2, ranks.resume_counting_reads, str(path), config=TWO_STAGES) == [
        [f"model_{rank}_0.pt", f"optimizer_{rank}_0.pt", f"rng_{rank}.pt", "user_content.pt"]
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("frozen", [0, 1])
def test_stages_and_parameters_without_state(pool2: RankPool, path: Path, frozen: int) -> None:
    options = {"frozen_stage": frozen, "without_gradient": ["blocks.0.bias", "blocks.3.bias"]}
    straight = run(pool2, ranks.train_and_save, str(path), options=options, config=TWO_STAGES)
    resumed = run(pool2, ranks.resume_and_train, str(path), options=options, config=TWO_STAGES)
    assert straight[frozen]["optimizer"] == {}
    for one, other in zip(straight, resumed, strict=True):
        assert "blocks.0.bias" not in other["optimizer"]
        assert one == {k: v for k, v in other.items() if k not in ("content", "restored")}


def test_the_manifest_says_where_everything_lies(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    folder = path / "step_2_partial"
    assert integrity.verify(folder) == []
    read = integrity.read_manifest(folder)
    assert (read.tag, read.layout.pp, read.layout.rdp) == ("step_2", 2, 1)
    assert read.versions["torch"] == torch.__version__
    assert read.ties == (("blocks.0.weight", "blocks.1.weight"),)
    assert read.param_groups[0] == ("blocks.0.weight", "blocks.2.weight", "blocks.3.weight")
    assert read.partition is not None
    assert read.partition["stage_of"]["blocks.2"] == 1
    assert not any("scratch" in entry.name for entry in read.entries)  # not persistent
    assert sum(entry.role == "model" for entry in read.entries) == 12
    for entry in read.entries:
        for piece in entry.slices:
            content = torch.load(folder / piece.file, weights_only=True, mmap=True)
            for step in piece.key:
                content = content[step]
            assert tuple(content.shape) == piece.shape
            assert str(content.dtype) == f"torch.{entry.dtype}"
    old = torch.load(folder / "partition_info.pt", weights_only=True)
    assert (old["partition"]["blocks.3"], old["pp_size"], old["tp_size"]) == (1, 2, 1)
    optimizer = torch.load(folder / "optimizer_0_0.pt", weights_only=True)
    assert optimizer["_smp_is_partial"]
    assert optimizer["param_names"][0] == "blocks.0.weight"


def test_user_content_may_be_absent_or_an_empty_file(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), user_content=None, config=TWO_STAGES)
    resumed = run(pool2, ranks.resume_and_train, str(path), config=TWO_STAGES)
    assert [r["content"] for r in resumed] == [{}, {}]


# -- a rank dies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "rank", "moment", "then"),
    [
        ("step_3", 1, "writing", "step_2"),
        ("step_3", 0, "before the manifest", "step_2"),
        ("step_3", 0, "before the rename", "step_2"),
        ("step_3", 0, "before newest", "step_2"),
        ("step_3", 0, "before the deletion", "step_3"),
        ("step_2", 0, "exchanged", "step_2"),
        ("step_2", 0, "moved aside", "step_2"),
    ],
)
def test_killed_at_any_moment_the_named_checkpoint_loads(
    pool2: RankPool, path: Path, tag: str, rank: int, moment: str, then: str
) -> None:
    """FF-20 a; more moments in `test_checkpoint_chaos`."""
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    with pytest.raises(RankFailure):
        run_ranks(2, ranks.die_while_saving, str(path), tag, rank, moment, config=TWO_STAGES, timeout_s=60)
    assert newest(path) == f"{then}_partial"
    for name in checkpoints(path):
        assert integrity.verify(path / name) == [], "a final name holds an unfinished checkpoint"
    resumed = run(pool2, ranks.resume_and_train, str(path), config=TWO_STAGES)
    assert all(r["step"] > 0 for r in resumed)
    # The next save leaves no trace of the dead one.
    run(pool2, ranks.train_and_save, str(path), tag="step_5", config=TWO_STAGES)
    assert not [name for name in os.listdir(path) if name.startswith(".") or name.endswith(".previous")]
    assert newest(path) == "step_5_partial"
    assert all(integrity.verify(path / name) == [] for name in checkpoints(path))


# -- the disk refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "name", "code"),
    [
        (1, "model", errno.ENOSPC),
        (0, "optimizer", errno.EIO),
        (0, "user_content", errno.EDQUOT),
        (1, "optimizer", errno.EROFS),
        (0, "manifest", errno.EACCES),
    ],
)
def test_a_failing_disk_is_told_to_every_rank(
    pool2: RankPool, path: Path, rank: int, name: str, code: int
) -> None:
    """FF-20 b, c where mounting is not allowed."""
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    results = run(pool2, ranks.save_with_failing_disk, str(path), rank, name, code, config=TWO_STAGES)
    kind, text = same_on_all([first for first, _, _ in results])
    assert "CheckpointError" in kind
    assert os.strerror(code) in text
    assert f"world rank {rank}" in text
    assert f"{name}" in text
    assert results[0][1] == ("step_2_partial", "newest step_2_partial")  # nothing is left of the failed one
    assert [last for _, _, last in results] == [("", "")] * 2  # and the next save works
    assert newest(path) == "step_4_partial"


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return probe.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few hundred kilobytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)]
    if not can_mount() or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system; the same fault is injected in the test above")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_really_full_disk(pool2: RankPool, small_disk: Path) -> None:
    """FF-20 b."""
    run(pool2, ranks.train_and_save, str(small_disk), config=TWO_STAGES)
    filler = small_disk / "filler"
    free = os.statvfs(small_disk)
    filler.write_bytes(b"x" * max((free.f_bavail - 3) * free.f_bsize, 0))
    _, text = same_on_all(run(pool2, ranks.save_error, str(small_disk), "step_3", config=TWO_STAGES))
    assert "No space left on device" in text
    assert newest(small_disk) == "step_2_partial"
    assert sorted(os.listdir(small_disk)) == ["filler", "newest", "step_2_partial"]
    resumed = run(pool2, ranks.resume_and_train, str(small_disk), config=TWO_STAGES)
    assert [r["step"] for r in resumed] == [4, 4]
    filler.unlink()
    assert run(pool2, ranks.save_error, str(small_disk), "step_3", config=TWO_STAGES) == [("", "")] * 2


def test_a_read_only_disk(pool2: RankPool, small_disk: Path) -> None:
    """FF-20 c."""
    run(pool2, ranks.train_and_save, str(small_disk), config=TWO_STAGES)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    _, text = same_on_all(run(pool2, ranks.save_error, str(small_disk), "step_3", config=TWO_STAGES))
    assert "Read-only file system" in text
    assert [r["step"] for r in run(pool2, ranks.resume_and_train, str(small_disk), config=TWO_STAGES)] == [
        4,
        4,
    ]


def test_a_file_in_the_way(pool2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    _, text = same_on_all(run(pool2, ranks.save_error, str(tmp_path / "file" / "sub"), config=TWO_STAGES))
    assert "Not a directory" in text


# -- ranks disagree, leftovers, rotation ------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_the_leftover_of_an_interrupted_save_is_replaced(pool4: RankPool, path: Path, blocking: bool) -> None:
    """FF-21: the folder of the tag exists and holds one rank's file only."""
    leftover = path / "step_4_partial"
    leftover.mkdir(parents=True)
    (leftover / "model_0_0.pt").write_bytes(b"half")
    run(pool4, ranks.train_and_save, str(path), tag="step_4", blocking=blocking, config=TWO_BY_TWO)
    assert integrity.verify(leftover) == []
    assert sorted(os.listdir(path)) == ["newest", "step_4_partial"]
    assert len(run(pool4, ranks.resume_and_train, str(path), tag="step_4", config=TWO_BY_TWO)) == 4


@pytest.mark.parametrize("num_saves", [12, pytest.param(50, marks=pytest.mark.heavy)])
def test_rotation_has_one_deleter_and_never_a_gap(pool4: RankPool, path: Path, num_saves: int) -> None:
    """FF-22."""
    path.mkdir()
    gaps: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        started = False
        while not stop.wait(0.005):
            try:
                whole = [
                    n for n in checkpoints(path) if not integrity.harmful(integrity.inspect(path / n)[1])
                ]
            except FileNotFoundError:
                continue  # deleted between listing and looking; the next look decides
            started = started or bool(whole)
            if started and not whole:
                gaps.append(" ".join(os.listdir(path)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        first, *others = run(pool4, ranks.save_again_and_again, str(path), num_saves, config=TWO_BY_TWO)
    finally:
        stop.set()
        watcher.join()
    assert gaps == []
    assert not [step for steps in others for step in steps], "another rank than 0 moves or deletes"
    newest_moves = [i for i, step in enumerate(first) if step == "move newest"]
    deletions = [i for i, step in enumerate(first) if step == f"delete s{len(newest_moves) - 2}_partial"]
    assert len(newest_moves) == num_saves
    assert deletions
    assert deletions[0] > newest_moves[-1], "the old one goes when the new one is named"
    last = f"s{num_saves - 1}_partial"
    assert sorted(os.listdir(path)) == ["newest", last]
    assert newest(path) == last
    assert integrity.verify(path / last) == []


def test_kept_checkpoints(pool2: RankPool, path: Path) -> None:
    for number in range(4):
        run(
            pool2,
            ranks.train_and_save,
            str(path),
            tag=f"s{number}",
            num_kept_partial_checkpoints=2,
            config=TWO_STAGES,
        )
    assert checkpoints(path) == ["s2_partial", "s3_partial"]
    _, text = same_on_all(
        run(pool2, ranks.save_error, str(path), num_kept_partial_checkpoints=0, config=TWO_STAGES)
    )
    assert "num_kept_partial_checkpoints is 0" in text


@pytest.mark.parametrize(
    ("rank_function", "shown"),
    [
        (ranks.save_with_own_tag, ["'s0' on rank 0", "'s1' on rank 1"]),
        (ranks.save_with_own_clock, ["run-10:00:00' on rank 0", "run-10:00:01' on rank 1"]),
        (ranks.save_with_own_folder, ["cwd0/relative' on rank 0", "cwd1/relative' on rank 1"]),
        (
            ranks.resume_with_own_options,
            ["load_sharded_optimizer_state: True on rank 0 | False on rank 1", "has translate_function: False on rank 0"],
        ),
        (ranks.save_and_resume_disagree, ["save_checkpoint on rank 0", "resume_from_checkpoint on rank 1"]),
    ],
)
def test_ranks_that_disagree_are_shown_their_values(
    pool2: RankPool, path: Path, rank_function: Any, shown: list[str]
) -> None:
    """FF-23."""
    _, text = same_on_all(run(pool2, rank_function, str(path), config=TWO_STAGES))
    for part in shown:
        assert part in text
    assert not list(path.rglob("*.pt"))


def test_only_one_rank_saves(path: Path) -> None:
    """FF-24 a: within the timeout every rank ends with an error, and rank 0's names who is missing."""
    config = {**TWO_STAGES, "timeout_s": 5, "startup_timeout_s": 10}
    with RankPool(2) as pool:
        outcomes = pool.outcomes(ranks.save_on_rank_zero_alone, str(path), config=config, grace_s=30)
    assert all(outcome.error is not None and outcome.seconds < 40 for outcome in outcomes), outcomes
    assert "still running" not in str(outcomes)
    assert "rank 1" in str(outcomes[0].error)
    assert "save_checkpoint (every rank of the world must call it)" in str(outcomes[0].error)


# -- what is asked for isn't there, or isn't right ---------------------------------------------------------


def test_what_is_not_there_is_reported_on_every_rank(pool2: RankPool, path: Path) -> None:
    """FF-02: FileNotFoundError with folder, tag and kind."""

    def told(**options: Any) -> str:
        kind, text = same_on_all(run(pool2, ranks.resume_error, str(path), config=TWO_STAGES, **options))
        assert "FileNotFoundError" in kind
        assert str(path) in text
        return text

    path.mkdir()
    assert "no file 'newest'" in told()
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    text = told(tag="step_7")
    assert "no partial checkpoint 'step_7_partial'" in text
    assert "step_2_partial" in text
    text = told(tag="step_2", partial=False)
    assert "no full checkpoint 'step_2'" in text
    assert "step_2_partial" in text


def test_a_full_checkpoint_is_told_from_a_partial_one(pool2: RankPool, path: Path) -> None:
    path.mkdir()
    torch.save({}, path / "full.pt")
    assert (
        "full checkpoint 'full.pt'"
        in same_on_all(run(pool2, ranks.resume_error, str(path), tag="full.pt", config=TWO_STAGES))[1]
    )


def test_too_early(pool2: RankPool, path: Path) -> None:
    assert (
        "before the model is wrapped"
        in same_on_all(run(pool2, ranks.resume_without_wrapping, str(path), config=TWO_STAGES))[1]
    )
    assert (
        "before the model is partitioned"
        in same_on_all(run(pool2, ranks.save_unpartitioned, str(path), config=TWO_STAGES))[1]
    )


def test_weights_never_come_without_the_optimizer_unless_asked(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.save_model_only, str(path), config=TWO_STAGES)
    _, text = same_on_all(run(pool2, ranks.resume_error, str(path), config=TWO_STAGES))
    assert "no optimizer state" in text
    assert "load_optimizer=False" in text
    for spelling in ("load_optimizer", "load_optimizer_states"):
        run(pool2, ranks.resume_and_train, str(path), config=TWO_STAGES, **{spelling: False})


def test_another_model_is_refused_by_name(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    _, text = same_on_all(run(pool2, ranks.resume_wider_model, str(path), config=TWO_STAGES))
    assert "'blocks.0.weight' saved [5, 5], present [6, 6]" in text


# -- damage -----------------------------------------------------------------------------------------------


def damage(folder: Path, name: str, how: str) -> None:
    file = folder / name
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[-10:]
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model_1_0.pt", "flipped"),
        ("optimizer_0_0.pt", "cut"),
        ("user_content.pt", "missing"),
        ("manifest.json", "cut"),
        ("manifest.json", "missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_or_skipped(pool2: RankPool, path: Path, name: str, how: str) -> None:
    run(pool2, ranks.train_and_save, str(path), tag="good", config=TWO_STAGES)
    run(pool2, ranks.train_and_save, str(path), tag="bad", config=TWO_STAGES)
    damage(path / "bad_partial", name, how)
    _, text = same_on_all(run(pool2, ranks.resume_error, str(path), "bad", config=TWO_STAGES))
    assert name in text
    resumed = run(pool2, ranks.resume_and_train, str(path), config=TWO_STAGES)
    assert [r["step"] for r in resumed] == [4, 4]
    damage(path / "good_partial", name, how)
    kind, text = same_on_all(run(pool2, ranks.resume_error, str(path), config=TWO_STAGES))
    assert "FileNotFoundError" in kind
    assert "good_partial" in text
    assert "bad_partial" in text


def test_a_missing_random_state_is_an_error_or_with_strict_off_a_warning(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    damage(path / "step_2_partial", "rng_1.pt", "flipped")
    _, text = same_on_all(run(pool2, ranks.resume_error, str(path), "step_2", config=TWO_STAGES))
    assert "rng_1.pt" in text
    run(pool2, ranks.resume_and_train, str(path), "step_2", strict=False, config=TWO_STAGES)


def test_checksums_can_be_skipped(pool2: RankPool, path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    assert run(pool2, ranks.resume_counting_digests, str(path), False, config=TWO_STAGES) == [4, 4]
    assert run(pool2, ranks.resume_counting_digests, str(path), True, config=TWO_STAGES) == [1, 1]


# -- safe loading -----------------------------------------------------------------------------------------


def test_content_that_could_not_be_loaded_is_refused_at_save_time(pool2: RankPool, path: Path) -> None:
    _, text = same_on_all(run(pool2, ranks.save_opaque_content, str(path), config=TWO_STAGES))
    assert "checkpoint_ranks.Opaque" in text
    assert "SHARDWRIGHT_TRUST_CHECKPOINTS" in text
    assert os.listdir(path) == []
    run(pool2, ranks.save_opaque_content, str(path), True, config=TWO_STAGES)
    _, text = same_on_all(run(pool2, ranks.resume_error, str(path), config=TWO_STAGES))
    assert "user_content.pt holds checkpoint_ranks.Opaque" in text
    resumed = run(pool2, ranks.resume_and_train, str(path), trust=True, config=TWO_STAGES)
    assert [r["content"] for r in resumed] == [ranks.Opaque(3)] * 2


@pytest.mark.parametrize("name", ["user_content.pt", "model_1_0.pt", "rng_0.pt", "optimizer_0_0.pt"])
def test_a_hostile_file_runs_nothing(pool2: RankPool, path: Path, tmp_path: Path, name: str) -> None:
    """FF-35 a, with a manifest that was made to fit."""
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    folder, marker = path / "step_2_partial", tmp_path / "marker"
    plant(folder / layout.MANIFEST, name, marker)
    _, text = same_on_all(run(pool2, ranks.resume_error, str(path), config=TWO_STAGES))
    assert name in text
    assert "mkdir" in text
    assert not marker.exists()


def test_a_pickle_in_place_of_metadata_runs_nothing(pool2: RankPool, path: Path, tmp_path: Path) -> None:
    run(pool2, ranks.train_and_save, str(path), config=TWO_STAGES)
    marker = tmp_path / "marker"
    for name in ("partition_info.pt", "manifest.json"):
        (path / "step_2_partial" / name).write_bytes(pickle.dumps(MakesFolder(marker)))
        _, text = same_on_all(run(pool2, ranks.resume_error, str(path), "step_2", config=TWO_STAGES))
        assert name in text
    assert not marker.exists()
