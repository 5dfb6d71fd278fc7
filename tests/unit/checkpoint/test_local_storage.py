"""Publishing, replacing and cleaning up on a local disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwright.checkpoint import layout
from shardwright.checkpoint.storage import local as module
from shardwright.checkpoint.storage import steps

local = module.LocalStorage()


def make(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "f").write_text(content)
    return folder


@pytest.fixture(params=["exchange", "move aside"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "move aside":
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    return str(request.param)


def test_a_new_name(tmp_path: Path) -> None:
    local.publish(make(tmp_path / "temporary", "new"), tmp_path / "t_partial", unique="1")
    assert os.listdir(tmp_path) == ["t_partial"]


def test_an_existing_name_is_replaced(tmp_path: Path, way: str) -> None:
    make(tmp_path / "t_partial", "old")
    temporary = make(tmp_path / layout.saving_folder("t_partial", "1"), "new")
    local.publish(temporary, tmp_path / "t_partial", unique="1")
    assert (tmp_path / "t_partial" / "f").read_text() == "new"
    assert os.listdir(tmp_path) == ["t_partial"]


def test_exchange_is_there_on_this_system(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a", "a"), make(tmp_path / "b", "b")
    if not module._exchange(one, other):
        pytest.skip("this file system can't exchange")
    assert (one / "f").read_text() == "b"
    assert (other / "f").read_text() == "a"


def test_a_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "t_partial", "old")
    monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    with pytest.raises(FileNotFoundError):
        local.publish(tmp_path / "not there", tmp_path / "t_partial", unique="1")
    assert (tmp_path / "t_partial" / "f").read_text() == "old"


def test_leftovers_are_removed_and_an_interrupted_replacement_is_undone(tmp_path: Path) -> None:
    make(tmp_path / layout.saving_folder("t_partial", "dead"), "half")
    make(tmp_path / layout.deleting_folder("u_partial", "dead"), "half")
    (tmp_path / f"{layout.WORK_PREFIX}newest-dead").write_text("x")
    make(tmp_path / layout.previous_folder("t_partial"), "only copy")
    make(tmp_path / layout.previous_folder("v_partial"), "old")
    make(tmp_path / "v_partial", "new")
    make(tmp_path / "mine", "not a checkpoint")
    local.clean_leftovers(tmp_path, unique="1")
    assert sorted(os.listdir(tmp_path)) == ["mine", "t_partial", "v_partial"]
    assert (tmp_path / "t_partial" / "f").read_text() == "only copy"
    assert (tmp_path / "v_partial" / "f").read_text() == "new"


def test_text_is_replaced_in_one_step(tmp_path: Path) -> None:
    newest = tmp_path / "newest"
    local.replace_text(newest, "a_partial", unique="1")
    local.replace_text(newest, "b_partial", unique="2")
    assert newest.read_text() == "b_partial"

    def full(operation: str, where: str) -> None:
        if operation == "sync":
            raise OSError(errno.ENOSPC, "No space left on device")

    with steps.watched(full), pytest.raises(OSError, match="No space"):
        local.replace_text(newest, "c_partial", unique="3")
    assert newest.read_text() == "b_partial"
    assert os.listdir(tmp_path) == ["newest"]


def test_removing_what_is_gone_or_stubborn_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.remove(tmp_path / "gone", unique="1")
    folder = make(tmp_path / "t_partial", "x")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    local.remove(folder, unique="1")
    assert not folder.exists()  # it lost its name first, so nobody takes it for whole
