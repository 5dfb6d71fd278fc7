"""Which checkpoints go."""

from __future__ import annotations

import pytest

from shardwright.checkpoint.retention import Kept, check_count, surplus
from shardwright.errors import CheckpointError

FOLDERS = [Kept("c", 30, True), Kept("a", 10, True), Kept("b", 20, True)]


def test_the_oldest_go_first() -> None:
    assert surplus(FOLDERS, newest="c", keep=1) == ["a", "b"]
    assert surplus(FOLDERS, newest="c", keep=2) == ["a"]
    assert surplus(FOLDERS, newest="c", keep=3) == []
    assert surplus(FOLDERS, newest="c", keep=9) == []


def test_none_keeps_all() -> None:
    assert surplus(FOLDERS, newest="c", keep=None) == []


def test_the_one_in_newest_stays_even_if_it_is_the_oldest() -> None:
    assert surplus(FOLDERS, newest="a", keep=1) == ["b", "c"]


def test_incomplete_ones_never_push_out_a_complete_one() -> None:
    folders = [*FOLDERS, Kept("broken", 40, False)]
    assert surplus(folders, newest="c", keep=2) == ["broken", "a"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", True])
def test_a_senseless_number_is_refused(keep: object) -> None:
    with pytest.raises(CheckpointError, match="num_kept_partial_checkpoints"):
        check_count(keep)  # type: ignore[arg-type]
