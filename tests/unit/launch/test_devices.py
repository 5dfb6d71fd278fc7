"""Counting accelerators without PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.launch import devices


@pytest.fixture
def four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("-1", 0), ("0,2", 2), ("0,-1,2", 1), ("MIG-a,MIG-b,MIG-c", 3)]
)
def test_visible_devices_decide(four_devices: Path, visible: str | None, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.count_accelerators(environ, four_devices) == count


def test_none_without_device_files(tmp_path: Path) -> None:
    assert devices.count_accelerators({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_none_when_pytorch_has_no_cuda(four_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert devices.count_accelerators({}, four_devices) == 0
