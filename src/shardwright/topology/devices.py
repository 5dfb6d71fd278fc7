"""Which device this process computes on, and which backends carry its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.emulation import install as emulation
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

    A launcher may let each process see only its own device: that is then the first, whatever the local rank.
    dist_backend: the configuration key `ddp_dist_backend`; "gloo" keeps CUDA tensors off NCCL.
    Raises: ConfigError, on every rank of the host, if it has more processes than devices and sharing wasn't
    asked for.
    """
    backend = choose_backend(environ, dist_backend=dist_backend)
    if not _has_cuda():
        return DeviceChoice(torch.device("cpu"), backend)
    num_devices = torch.cuda.device_count()
    shared = _may_share(environ) and local_size > num_devices
    own_only = num_devices == 1 and "," not in environ.get("CUDA_VISIBLE_DEVICES", ",")
    if local_size > num_devices and not shared and not own_only:
        raise ConfigError(
            f"this host runs {local_size} processes but has {num_devices} CUDA device(s)",
            remedy=f"start at most {num_devices} processes per host, set CUDA_VISIBLE_DEVICES= to compute on "
            f"the CPU, or set {SHARE_DEVICE}=1 to let ranks share a device (slow, for tests)",
        )
    return DeviceChoice(torch.device("cuda", local_rank % num_devices), backend, shared)


def choose_backend(environ: Mapping[str, str], *, dist_backend: str = "auto") -> str:
    """Return the backend string: CPU tensors always go by gloo, CUDA tensors by NCCL where it can be used."""
    use_nccl = (
        _has_cuda()
        and dist.is_nccl_available()
        and dist_backend != "gloo"
        and not _may_share(environ)
    )
    return "cpu:gloo,cuda:nccl" if use_nccl else "gloo"


def _has_cuda() -> bool:
    return torch.cuda.is_available() and not emulation.active


def _may_share(environ: Mapping[str, str]) -> bool:
    return environ.get(SHARE_DEVICE, "0") not in ("", "0")
