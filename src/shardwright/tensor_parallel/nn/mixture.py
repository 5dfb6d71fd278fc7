"""`DistributedMixtureOutputLayer`: a router and gated experts in place of the output layer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.nn.options import Norm, SplitExperts


class DistributedMixtureOutputLayer(DistributedModule):
    """A router and gated experts, of which each token visits a few.

    Parameters: router.weight [experts, hidden], experts_gate and experts_up [experts, intermediate, hidden],
    experts_down [experts, hidden, intermediate], pre_layernorm, layernorm.
    split_experts: "intermediate": every rank holds a slice of each expert; "experts": a rank holds whole
        experts; None: every rank holds all of them.
    normalize_router: the weights of a token's experts are scaled to sum to one.
    """

    indivisible: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "silu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        num_experts: int = 8,
        experts_per_token: int = 2,
        normalize_router: bool = True,
        split_experts: SplitExperts | None = "intermediate",
        norm: Norm = "layernorm",
        residual: bool = True,
        nested: bool = False,
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError
