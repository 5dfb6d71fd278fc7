"""Which device this process computes on, and which backends carry its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.errors import ConfigError
from shardwright.topology.environment import SHARE_DEVICE


@dataclass(frozen=True)
class DeviceChoice:
    """A device, with the backend string for `torch.distributed`.

    shared: several ranks use one device, so that messages go through host memory.
    """

    device: torch.device
    backend: str
    shared: bool = False

    @property
    def has_nccl(self) -> bool:
        """True if device tensors travel by NCCL."""
        return "nccl" in self.backend


def choose_device(
    local_rank: int, local_size: int, environ: Mapping[str, str], *, dist_backend: str = "auto"
) -> DeviceChoice:
    """Return CUDA with NCCL when it can be used, else the CPU with gloo.

    dist_backend: the configuration key `ddp_dist_backend`; "gloo" keeps CUDA tensors off NCCL.
    Raises: ConfigError if a host has more processes than devices and sharing wasn't asked for.
    """
    if not torch.cuda.is_available():
        return DeviceChoice(torch.device("cpu"), "gloo")
    num_devices = torch.cuda.device_count()
    shared = environ.get(SHARE_DEVICE, "0") not in ("", "0") and local_size > 1
    if local_rank >= num_devices and not shared:
        raise ConfigError(
            f"this host runs {local_size} processes but has {num_devices} CUDA device(s); "
            f"local rank {local_rank} has none",
            remedy=f"start at most {num_devices} processes per host, set CUDA_VISIBLE_DEVICES= to compute on "
            f"the CPU, or set {SHARE_DEVICE}=1 to let ranks share a device (slow, for tests)",
        )
    device = torch.device("cuda", local_rank % num_devices)
    use_nccl = not shared and dist_backend != "gloo" and dist.is_nccl_available()
    return DeviceChoice(device, "cpu:gloo,cuda:nccl" if use_nccl else "gloo", shared)
