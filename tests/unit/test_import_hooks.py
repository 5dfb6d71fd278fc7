"""Actions that wait for a module: before it is imported, while it is, and after."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from shardwright.import_hooks import when_imported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path


def test_before_and_after_the_import(folder: Path) -> None:
    (folder / "awaited_a.py").write_text("VALUE = 3\n")
    seen: list[int] = []
    when_imported("awaited_a", lambda: seen.append(sys.modules["awaited_a"].VALUE))
    num_finders = len(sys.meta_path)
    assert seen == []
    assert importlib.import_module("awaited_a").VALUE == 3
    assert seen == [3]
    assert len(sys.meta_path) == num_finders - 1
    when_imported("awaited_a", lambda: seen.append(4))
    assert seen == [3, 4]


def test_during_the_import(folder: Path) -> None:
    """The module imports, directly or not, who waits for it: the action comes when the whole of it is there."""
    (folder / "awaited_b.py").write_text("import waiter_b\nLAST = 5\n")
    (folder / "waiter_b.py").write_text(
        "import sys\nfrom shardwright.import_hooks import when_imported\nseen = []\n"
        "when_imported('awaited_b', lambda: seen.append(sys.modules['awaited_b'].LAST))\nassert seen == []\n"
    )
    module = importlib.import_module("awaited_b")
    assert sys.modules["waiter_b"].seen == [5]
    assert type(module.__spec__) is ModuleSpec


def test_nothing_happens_when_the_import_fails(folder: Path) -> None:
    (folder / "awaited_c.py").write_text(
        "from shardwright.import_hooks import when_imported\nwhen_imported('awaited_c', lambda: 1 / 0)\nraise OSError\n"
    )
    with pytest.raises(OSError):
        importlib.import_module("awaited_c")


def test_a_module_in_a_package_and_one_that_is_not_there(folder: Path) -> None:
    (folder / "awaited_d").mkdir()
    (folder / "awaited_d" / "__init__.py").write_text("")
    (folder / "awaited_d" / "inner.py").write_text("")
    seen: list[str] = []
    when_imported("awaited_d.inner", lambda: seen.append("inner"))
    when_imported("awaited_e", lambda: seen.append("e"))
    importlib.import_module("awaited_d.inner")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited_e")
    assert seen == ["inner"]
