"""Layer normalisation under the name that scripts sort their weight decay groups by."""

from __future__ import annotations

import torch


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, which is fused already.

    Own class, because scripts ask `isinstance(module, FusedLayerNorm)`; subclass, because frameworks ask
    `isinstance(module, torch.nn.LayerNorm)`. Called by: any rank. Collectives: none.
    """
