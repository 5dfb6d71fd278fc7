"""What tests of commands share: calling the command line in this process, and small checkpoints of a world of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwright.torch as smp
import small_checkpoints
from shardwright.cli.main import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwright ckpt ...`: the exit code and what was printed."""

    def call(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(["ckpt", *map(str, arguments)])
        printed = capsys.readouterr()
        code = end.value.code
        return (code if isinstance(code, int) else 0), printed.out + printed.err

    return call


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "fp32" and "bf16", each with a partial checkpoint "two" and a full one "whole" of the same state, and "losses.json" of the
    two steps that came after."""
    root = tmp_path_factory.mktemp("small")
    for name, more in (("fp32", {}), ("bf16", {"bf16": True})):
        smp.init({"microbatches": 2, "log_level": "warning", **more})
        losses = small_checkpoints.save(root / name)
        (root / name / "losses.json").write_text(json.dumps(losses))
        smp.shutdown()
    return root
