"""`torch.amp.GradScaler` for a model that is spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives


class GradScaler(torch.amp.GradScaler):
    """A scaler for autocast whose decision to skip a step is shared by all ranks that update parts of the model.

    The arguments are those of `torch.cuda.amp.GradScaler`, and so is the use: `scale` in the step function, then, on
    every rank, `unscale_` if gradients are to be clipped, `step` and `update`.
    Collectives: one all-reduce of a flag over MP_GROUP (over the world with sharded state) where gradients
    are looked at: in `unscale_`, or else in `step`.
    device: of the scale; by default this process's kind of device.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | None = None,
    ) -> None:
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's own, and then the flags of all ranks; a rank without any gradient has none of its own."""
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not context.is_initialized():
            return found
        world = context.world()
        flag = torch.zeros(1, dtype=torch.float32, device=world.device)
        for own in found.values():
            flag = torch.maximum(flag, own.to(flag.device))
        sharded = world.config.shard_optimizer_state or world.table.degrees.sdp > 1
        axis: Axis = "world" if sharded else "mp"
        collectives.all_reduce(flag, axis, op="max")
        devices: list[Any] = list(found) or [world.device]
        return {device: flag.to(device) for device in devices}
