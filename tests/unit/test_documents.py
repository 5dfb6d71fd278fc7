"""What documents show: code that compiles, names and keys that exist, links that lead somewhere, tables that are up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright.torch as smp
from shardwright.config.legacy import ALIASES
from shardwright.config.schema import SETTINGS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def code_of(path: Path) -> Iterator[ast.Module]:
    for block in _BLOCK.findall(path.read_text(encoding="utf-8")):
        yield ast.parse(block)


@documents
def test_code_uses_names_that_exist(path: Path) -> None:
    for tree in code_of(path):
        for node in ast.walk(tree):
            dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"smp(\.\w+)+", dotted):
                target: object = smp
                for name in dotted.split(".")[1:]:
                    target = getattr(target, name)


@documents
def test_settings_in_code_are_keys(path: Path) -> None:
    for tree in code_of(path):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "smp.init" and node.args:
                keys = {ast.literal_eval(key) for key in getattr(node.args[0], "keys", ()) if key is not None}
                assert keys <= SETTINGS.keys() | ALIASES.keys()


@documents
def test_links_lead_somewhere(path: Path) -> None:
    missing = [link for link in _LINK.findall(path.read_text(encoding="utf-8")) if not (path.parent / link).exists()]
    assert missing == []


def test_written_documents_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
