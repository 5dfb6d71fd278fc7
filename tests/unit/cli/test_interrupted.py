"""Commands that write are ended halfway: nothing half-written keeps a final name, and the next try takes away what was left."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import integrity, layout, storage
from shardwright.checkpoint.storage import RemotePath, steps

Run = Callable[..., tuple[int, str]]

COMMANDS: dict[str, tuple[str, ...]] = {
    "reshard": ("two", "{out}", "--tag", "new", "--rdp", "2", "--shard-optimizer-state"),
    "import": ("whole", "{out}", "--tag", "new"),
    "export": ("", "{out}/new", "--format", "dcp"),
}
NAMES = {"reshard": "new_partial", "import": "new", "export": "new"}


def arguments(command: str, saved: Path, out: object) -> list[str]:
    source, target, *rest = COMMANDS[command]
    return [command, str(saved / "fp32" / source), target.format(out=out), *rest]


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that isn't ignored here, as nohup leaves it."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.parametrize("command", ["reshard", "import"])
def test_a_signal_leaves_nothing(saved: Path, tmp_path: Path, run: Run, command: str, number: signal.Signals) -> None:
    reached: list[str] = []

    def end(operation: str, where: str) -> None:
        if operation == "write" and where.startswith(str(tmp_path)):
            reached.append(where)
            if len(reached) == 2:
                os.kill(os.getpid(), number)

    with steps.watched(end):
        code, text = run(*arguments(command, saved, tmp_path))
    assert code == 128 + number, text
    assert reached
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("command", ["reshard", "import"])
def test_a_full_disk_is_told_and_leaves_nothing(saved: Path, tmp_path: Path, run: Run, command: str) -> None:
    def full(operation: str, where: str) -> None:
        if operation == "write" and where.startswith(str(tmp_path)):
            raise OSError(28, "No space left on device")

    with steps.watched(full):
        code, text = run(*arguments(command, saved, tmp_path))
    assert code == 2
    assert text.startswith(f"OSError: ckpt {command}: [Errno 28] No space left on device: '{tmp_path}/")
    assert "there is room" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_killed_one_left_goes_with_the_next(saved: Path, tmp_path: Path, run: Run, command: str) -> None:
    name = NAMES[command]
    left, others = tmp_path / layout.saving_folder(name, "1" * 32), tmp_path / layout.saving_folder("else", "1" * 32)
    for folder in (left, others):
        folder.mkdir()
        (folder / "half").write_bytes(b"half")
    code, text = run(*arguments(command, saved, tmp_path))
    assert code == 0, text
    assert not left.exists()
    assert others.exists()
    assert (tmp_path / name).exists()


def test_a_conversion_into_a_store_begins_again(saved: Path, run: Run) -> None:
    """There the files of an unfinished checkpoint lie below its final name."""
    root: Any = storage.place(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(root, RemotePath)
    storage.of(root).put(root / "new_partial" / ("1" * 32) / "model_0_0.pt", b"half")
    code, text = run(*arguments("reshard", saved, root))
    assert code == 0, text
    assert not integrity.verify(root / "new_partial")
    code, text = run(*arguments("reshard", saved, root))
    assert (code, "exists" in text) == (2, True), text
    assert not integrity.verify(root / "new_partial")
    root.fs.rm(root.key, recursive=True)


def test_what_others_have_below_a_name_stays(saved: Path, run: Run) -> None:
    root: Any = storage.place(f"memory://{uuid.uuid4().hex}/run")
    mine = root / "new" / ("1" * 32) / "mine"
    storage.of(root).put(mine, b"mine")
    assert run(*arguments("import", saved, root))[0] == 2
    assert mine.read_bytes() == b"mine"
    root.fs.rm(root.key, recursive=True)
