"""Listing, choosing and deleting the checkpoints of a folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from shardwright.checkpoint import choice, folder, layout
from shardwright.checkpoint.layout import Layout
from shardwright.checkpoint.manifest import FileRecord, Manifest
from shardwright.errors import CheckpointError, CheckpointNotFoundError


def make(root: Path, tag: str, finished: int, *, file: str = "rng_0.pt") -> Path:
    """A complete checkpoint of one empty file, finished at a given second."""
    place = root / layout.partial_folder(tag)
    place.mkdir()
    (place / file).write_bytes(b"")
    manifest = Manifest(tag, "id", finished, Layout(1, 1, 1), {}, {file: FileRecord(0, "", "rng", 0)}, ())
    (place / layout.MANIFEST).write_bytes(manifest.to_bytes())
    os.utime(place / layout.MANIFEST, (finished, finished))
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, "b", 20)
    make(tmp_path, "a", 30)
    make(tmp_path, "c", 10)
    (tmp_path / layout.NEWEST).write_text("a_partial")
    return tmp_path


def test_only_checkpoints_are_listed(root: Path) -> None:
    (root / "photos_partial").mkdir()
    (root / "file_partial").write_text("x")
    (root / "full").write_text("x")
    (root / "foreign_partial").mkdir()
    (root / "foreign_partial" / "model_0_0.pt").write_text("x")
    listed = {kept.folder: kept.complete for kept in folder.partial_checkpoints(root)}
    assert listed == {"a_partial": True, "b_partial": True, "c_partial": True, "foreign_partial": False}


def test_a_later_extra_file_does_not_make_a_checkpoint_younger(root: Path) -> None:
    (root / "c_partial" / "notes.txt").write_text("x")
    folder.prune(root, newest="a_partial", keep=2, unique="1")
    assert sorted(os.listdir(root)) == ["a_partial", "b_partial", "newest"]


def test_without_a_tag_the_one_in_newest_is_taken(root: Path) -> None:
    (root / layout.NEWEST).write_text("c_partial\n")
    assert choice.choose(root, None, {}).name == "c_partial"
    (root / layout.NEWEST).write_text("c")
    assert choice.choose(root, None, {}).name == "c_partial"


def test_incomplete_ones_are_skipped_with_a_message(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "a_partial" / "rng_0.pt").unlink()
    logging.getLogger("shardwright").propagate = True
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert choice.choose(root, None, {}).name == "b_partial"
    assert "skipping" in caplog.text
    assert "a_partial: rng_0.pt is missing" in caplog.text
    assert "instead of 'a_partial'" in caplog.text


@pytest.mark.parametrize("text", ["gone_partial", "", "\x00garbage", "../elsewhere_partial"])
def test_a_newest_that_names_nothing_falls_back_to_the_latest(root: Path, text: str) -> None:
    (root / layout.NEWEST).write_text(text)
    assert choice.choose(root, None, {}).name == "a_partial"


def test_a_replaced_checkpoint_is_found_under_its_other_name(root: Path) -> None:
    os.rename(root / "a_partial", root / layout.previous_folder("a_partial"))
    for tag in (None, "a", "a_partial"):
        chosen = choice.choose(root, tag, {})
        assert (chosen.name, chosen.folder.name) == ("a_partial", "a_partial.previous")


def test_nothing_complete_lists_why(root: Path) -> None:
    skipped = {"b_partial": "flipped on rank 3", "c_partial": "cut"}
    (root / "a_partial" / layout.MANIFEST).unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"a_partial.*never finished") as caught:
        choice.choose(root, None, skipped)
    assert "flipped on rank 3" in caught.value.what


def test_by_name_there_is_no_second_choice(root: Path) -> None:
    (root / "a_partial" / "rng_0.pt").write_bytes(b"longer")
    with pytest.raises(CheckpointError, match=r"rng_0\.pt is grown: 6 bytes, expected 0"):
        choice.choose(root, "a", {})
    with pytest.raises(CheckpointNotFoundError, match=r"'z_partial'") as caught:
        choice.choose(root, "z", {})
    assert "a_partial (incomplete), b_partial, c_partial" in str(caught.value.remedy)
