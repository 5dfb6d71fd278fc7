"""Saves in an object store: what is there at each moment, what fails, and what is tried again."""

from __future__ import annotations

import errno
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import layout, storage
from shardwright.checkpoint.storage import RemotePath, attempts, steps
from shardwright.checkpoint.storage.attempts import StorageError
from shardwright.errors import CheckpointError

ONE, OTHER = "1" * 32, "2" * 32


@pytest.fixture
def root() -> Iterator[RemotePath]:
    place = storage.place(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(place, RemotePath)
    yield place
    if place.fs.exists(place.key):
        place.fs.rm(place.key, recursive=True)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waiting takes no time; how long it would have."""
    found: list[float] = []
    monkeypatch.setattr(attempts.time, "sleep", found.append)
    return found


def write(root: RemotePath, save_id: str, content: bytes = b"x") -> RemotePath:
    """A file of a save that has not ended."""
    saving = storage.of(root).saving(root, "t_partial", save_id)
    file = storage.of(root).create(saving / "model_0_0.pt")
    file.write(content)
    file.finish()
    return saving


def manifest(save_id: str) -> bytes:
    from shardwright.checkpoint.layout import Layout
    from shardwright.checkpoint.manifest import Manifest

    return Manifest("t", save_id, 1, Layout(1, 1, 1), {}, {}, (), data_folder=save_id).to_bytes()


def names(place: RemotePath) -> list[str]:
    return [path.name for path in place.iterdir()]


def test_paths_and_urls() -> None:
    assert storage.place("file:///tmp/x") == Path("/tmp/x")
    assert storage.place("/tmp/x") == Path("/tmp/x")
    assert storage.absolute("x") == str(Path.cwd() / "x")
    assert storage.absolute("file:///tmp/x") == "/tmp/x"
    assert storage.absolute("memory://a/b/") == "memory://a/b"
    with pytest.raises(CheckpointError, match=r"nosuch://x can't be opened.*\n?.*install"):
        storage.place("nosuch://x")
    with pytest.raises(CheckpointError, match="path is a int"):
        storage.place("<int>")


def test_a_place_travels_to_another_process(root: RemotePath) -> None:
    assert pickle.loads(pickle.dumps(root / "a")) == root / "a"


def test_reading_in_the_words_of_pathlib(root: RemotePath) -> None:
    store = storage.of(root)
    store.put(root / "a" / "b.json", b"0123456789")
    assert (root / "a").is_dir()
    assert not (root / "a").is_file()
    assert (root / "a" / "b.json").is_file()
    assert not (root / "none").exists()
    assert list((root / "none").iterdir()) == []
    assert names(root) == ["a"]
    assert [p.name for p in (root / "a").glob("*.json")] == ["b.json"]
    path = root / "a" / "b.json"
    assert (path.name, path.suffix, path.parent, path.stat().st_size) == ("b.json", ".json", root / "a", 10)
    assert store.sizes(root / "a") == {"b.json": 10}
    assert path.read_range(2, 5) == b"234"
    with path.open() as file:
        assert file.seek(-3, 2) == 7
        assert file.read() == b"789"
    with pytest.raises(FileNotFoundError):
        (root / "none").read_bytes()
    with pytest.raises(EOFError, match="ends at 10, expected at least 12"):
        path.read_range(8, 12)


def test_a_save_is_valid_with_its_manifest_and_replaces_the_one_before(root: RemotePath) -> None:
    store = storage.of(root)
    first = write(root, ONE, b"one")
    assert not (root / "t_partial" / layout.MANIFEST).exists()
    store.commit(first, root / "t_partial", manifest(ONE), unique=ONE)
    assert names(root / "t_partial") == [ONE, layout.MANIFEST]
    second = write(root, OTHER, b"other")
    assert (first / "model_0_0.pt").read_bytes() == b"one"  # nothing of the first save was touched
    store.commit(second, root / "t_partial", manifest(OTHER), unique=OTHER)
    assert names(root / "t_partial") == [OTHER, layout.MANIFEST]


def test_leftovers_go_and_the_valid_save_stays(root: RemotePath) -> None:
    store = storage.of(root)
    store.commit(write(root, ONE), root / "t_partial", manifest(ONE), unique=ONE)
    write(root, OTHER)
    interrupted = storage.of(root).saving(root, "u_partial", OTHER)
    store.put(interrupted / "model_0_0.pt", b"x")
    store.put(root / f"{layout.WORK_PREFIX}saving-x", b"x")
    store.put(root / "others_partial" / "photo.jpg", b"x")
    store.clean_leftovers(root, unique=OTHER)
    assert names(root) == ["others_partial", "t_partial"]
    assert names(root / "t_partial") == [ONE, layout.MANIFEST]


def test_a_manifest_that_is_damaged_makes_nobody_delete(root: RemotePath) -> None:
    store = storage.of(root)
    write(root, ONE)
    write(root, OTHER)
    store.put(root / "t_partial" / layout.MANIFEST, b"{")
    store.clean_leftovers(root, unique=OTHER)
    assert names(root / "t_partial") == [ONE, OTHER, layout.MANIFEST]


def test_a_removed_checkpoint_loses_its_manifest_first(root: RemotePath) -> None:
    store = storage.of(root)
    store.commit(write(root, ONE), root / "t_partial", manifest(ONE), unique=ONE)
    seen: list[tuple[str, list[str]]] = []
    with steps.watched(lambda operation, where: seen.append((operation, names(root / "t_partial")))):
        store.remove(root / "t_partial", unique=OTHER)
    assert seen == [("delete", [ONE])]
    assert not (root / "t_partial").exists()


class Failing:
    """A request that fails some times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.calls = times, error, 0

    def __call__(self, operation: str, where: str) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error


def test_what_fails_in_passing_is_tried_again(root: RemotePath, waits: list[float]) -> None:
    failing = Failing(2, ConnectionResetError("reset by peer"))
    with steps.watched(failing):
        storage.of(root).put(root / "f", b"x")
    assert (root / "f").read_bytes() == b"x"
    assert failing.calls == 3
    assert 0.3 < waits[0] < 0.7 < waits[1] < 1.3


@pytest.mark.parametrize(
    ("error", "calls", "remedy"),
    [
        (ConnectionResetError("reset by peer"), 4, "check the endpoint"),
        (PermissionError(errno.EACCES, "Access Denied"), 1, "check the credentials"),
        (OSError(errno.ENOSPC, "quota"), 1, "free some of the quota"),
    ],
)
def test_what_fails_for_good_names_place_operation_and_remedy(
    root: RemotePath, error: Exception, calls: int, remedy: str
) -> None:
    failing = Failing(9, error)
    with steps.watched(failing), pytest.raises(StorageError, match="could not write it") as caught:
        storage.of(root).put(root / "f", b"x")
    assert failing.calls == calls
    assert str(root / "f") in str(caught.value)
    assert remedy in caught.value.remedy
    again: Any = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.remedy) == (str(caught.value), caught.value.remedy)


def test_how_often_comes_from_the_environment(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attempts.ATTEMPTS_ENV, "1")
    failing = Failing(1, TimeoutError())
    with steps.watched(failing), pytest.raises(StorageError):
        storage.of(root).put(root / "f", b"x")
    monkeypatch.setenv(attempts.ATTEMPTS_ENV, "often")
    with pytest.raises(CheckpointError, match="SHARDWRIGHT_STORAGE_ATTEMPTS is 'often'"):
        storage.of(root).put(root / "f", b"x")
