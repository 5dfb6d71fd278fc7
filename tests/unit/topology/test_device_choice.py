"""Which device and which backends a process gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright.errors import ConfigError
from shardwright.topology.devices import choose_device


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 4)


def pretend(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def test_no_device_means_cpu_and_gloo(monkeypatch) -> None:
    pretend(monkeypatch, 0)
    choice = choose_device(3, 4, {})
    assert (choice.device, choice.backend, choice.has_nccl) == (torch.device("cpu"), "gloo", False)


@pytest.mark.usefixtures("four_devices")
def test_each_local_rank_has_its_device_with_nccl() -> None:
    choice = choose_device(3, 4, {})
    assert (choice.device, choice.backend) == (torch.device("cuda", 3), "cpu:gloo,cuda:nccl")
    assert not choice.shared


@pytest.mark.usefixtures("four_devices")
def test_nccl_can_be_declined() -> None:
    assert choose_device(0, 4, {}, dist_backend="gloo").backend == "gloo"


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("local_rank", [0, 4])
def test_too_few_devices_are_an_error_on_every_rank(local_rank: int) -> None:
    with pytest.raises(ConfigError, match="runs 5 processes but has 4 CUDA"):
        choose_device(local_rank, 5, {})


def test_ranks_may_share_a_device_if_asked(monkeypatch) -> None:
    pretend(monkeypatch, 1)
    choice = choose_device(1, 2, {"SHARDWRIGHT_SHARE_DEVICE": "1"})
    assert (choice.device, choice.backend, choice.shared) == (torch.device("cuda", 0), "gloo", True)
    with pytest.raises(ConfigError, match="SHARDWRIGHT_SHARE_DEVICE=1"):
        choose_device(1, 2, {"SHARDWRIGHT_SHARE_DEVICE": "0"})


def test_a_launcher_may_show_each_process_its_own_device_only(monkeypatch) -> None:
    pretend(monkeypatch, 1)
    assert choose_device(3, 4, {"CUDA_VISIBLE_DEVICES": "3"}).device == torch.device("cuda", 0)
