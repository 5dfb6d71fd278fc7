"""Which dtype has which role when a model runs in half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class PrecisionSettings(Protocol):
    """The configuration keys that decide."""

    @property
    def fp16(self) -> bool: ...

    @property
    def bf16(self) -> bool: ...


@dataclass(frozen=True)
class Policy:
    """The dtypes of a model in half precision.

    compute: of parameters, buffers and activations.   master: of the weights that the optimizer updates.
    scales_loss: the loss is scaled and overflows are looked for. bf16 has the range of fp32, so there the scale is 1
    and a gradient that is not finite is not skipped.
    """

    compute: torch.dtype
    scales_loss: bool
    master: torch.dtype = torch.float32


def policy_of(settings: PrecisionSettings) -> Policy | None:
    """The policy that the configuration asks for; None in full precision."""
    if settings.fp16:
        return Policy(torch.float16, scales_loss=True)
    if settings.bf16:
        return Policy(torch.bfloat16, scales_loss=False)
    return None
