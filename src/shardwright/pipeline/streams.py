"""Random streams of microbatches: each has its own, equal on all ranks of the pipeline group.

Glue may draw from Python's, NumPy's and torch's generators; since microbatches take turns in an order that
differs between ranks, each takes its streams along. Units and placed ops run on streams derived from (seed,
microbatch, call), see `topology.rng.forked`; plain torch ops need torch's generators only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._device

from shardwright.pipeline.overlay import Overlay
from shardwright.topology import rng


class Streams:
    """Process-wide state of one microbatch's glue: its generators, settings that its code may have changed, and
    attributes of modules that it assigned.

    In order: `begin` when the microbatch starts, then `leave` and `enter` around every wait. The caller of
    the step leaves before the first microbatch begins, and enters after the last one.
    """

    def __init__(self, seed: int = 0, overlay: Overlay | None = None, microbatch: int = 0) -> None:
        self._seed = seed
        self._overlay = overlay
        self._microbatch = microbatch
        self._state: rng.RngState | None = None
        self._settings: tuple[Any, ...] = ()

    def begin(self, caller: Streams) -> None:
        rng.seed_all(self._seed)
        _apply(caller._settings)
        self._show()

    def leave(self) -> None:
        self._state = rng.capture()
        self._settings = _settings()

    def enter(self) -> None:
        assert self._state is not None
        rng.restore(self._state)
        _apply(self._settings)
        self._show()

    def _show(self) -> None:
        if self._overlay is not None:
            self._overlay.show(self._microbatch)


def _settings() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch.get_float32_matmul_precision(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        torch.utils._device.CURRENT_DEVICE,
    )


def _apply(settings: tuple[Any, ...]) -> None:
    if settings == _settings():
        return
    cuda = torch.backends.cuda
    torch.set_default_dtype(settings[0])
    cuda.enable_flash_sdp(settings[1])
    cuda.enable_mem_efficient_sdp(settings[2])
    cuda.enable_math_sdp(settings[3])
    cuda.enable_cudnn_sdp(settings[4])
    torch._C._set_sdp_priority_order(list(settings[5]))
    torch.set_float32_matmul_precision(settings[6])
    torch.use_deterministic_algorithms(settings[7][0], warn_only=settings[7][1])
    torch.utils._device.CURRENT_DEVICE = settings[8]
