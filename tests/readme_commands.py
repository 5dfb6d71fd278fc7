"""Run the commands that a document shows, as a reader would.

A fenced block counts if the line before it is a comment:

    <!-- runnable -->        a block of shell commands: run it
    <!-- file: train.py -->  any block: write it to that file first

All blocks of a document run in order, in one fresh folder, with this Python's environment first on the PATH.
The first command that fails ends the run. Usage: readme_commands.py README.md [more.md ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 300
_BLOCK = re.compile(
    r"^<!-- (?P<kind>runnable|file: (?P<name>\S+)) -->\n+```[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One marked block; `file` is None for commands."""

    text: str
    file: str | None


def find_blocks(document: str) -> list[Block]:
    """Return the marked blocks of a document, in order."""
    return [Block(match["text"], match["name"]) for match in _BLOCK.finditer(document)]


def run_document(path: Path) -> None:
    """Run a document's blocks; raises CalledProcessError or TimeoutExpired for the first that fails."""
    blocks = find_blocks(path.read_text(encoding="utf-8"))
    if not any(block.file is None for block in blocks):
        raise SystemExit(f"{path} has no block marked <!-- runnable -->")
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks:
            if block.file is not None:
                target = Path(folder, block.file)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
                continue
            print(f"-- {path}:\n{block.text}", flush=True)
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env={**os.environ, "PATH": search_path},
                check=True,
                timeout=LIMIT_S,
            )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run_document(Path(name))
