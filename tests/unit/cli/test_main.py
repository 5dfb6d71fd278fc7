"""The command line's table, and what it says when a part is missing."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

import shardwright
from shardwright.cli import main as cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == shardwright.__version__


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "paint", cli.Command("shardwright.cli.nowhere", "Not there."))
    with pytest.raises(SystemExit, match=r"shardwright paint: .*no module 'shardwright.cli.nowhere'"):
        cli.main(["paint"])


def test_our_errors_are_printed_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--nproc", "3", "--pp", "2", "train.py"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: the world has 3 processes")


def test_a_dry_run_prints_the_torchrun_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--dry-run", "--pp", "2", "train.py", "--pp", "3"])
    assert end.value.code == 0
    assert capsys.readouterr().out.endswith("torchrun --nproc-per-node=2 --standalone train.py --pp 3\n")


def test_a_configuration_file_must_be_an_object(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--config", f"{tmp_path}/none.json", "train.py"])
    assert end.value.code == 2
    assert "none.json can't be read" in capsys.readouterr().err


def test_the_command_line_starts_without_torch_and_quickly() -> None:
    """A fresh interpreter: help within the time that a user notices, and no PyTorch in it."""
    code = (
        "import sys\n"
        "from shardwright.cli.main import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    used_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time: tests run beside others.
        used_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used_s) < 0.5, used_s
