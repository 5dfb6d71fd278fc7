"""`DistributedLinear`, and the holder of a sliced weight that larger modules use."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shardwright.tensor_parallel.module import DistributedModule


class DistributedLinear(DistributedModule):
    """`nn.Linear` whose input features are split over the tp ranks.

    weight: [out_features, in_features / tp].   bias: [out_features], replicated.
    """

    indivisible: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        nested: bool = False,
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError
