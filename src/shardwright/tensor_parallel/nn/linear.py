"""`DistributedLinear`, and the holder of a sliced weight that larger modules use."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from torch import Tensor

from shardwright.errors import UsageError
from shardwright.sharding.slices import Units
from shardwright.tensor_parallel.module import (
    DistributedModule,
    Init,
    check_divisible,
    keeps_hidden_sliced,
    normal,
    prescaled_batch,
    uniform,
)
from shardwright.tensor_parallel.nn.functional import row_linear
from shardwright.transport import differentiable as comm


def linear_init(in_features: int, initializer_range: float, use_normal: bool) -> tuple[Init, Init]:
    """Return how weight and bias of a linear layer begin: as in `nn.Linear`, or normal and zero."""
    if use_normal:
        return normal(initializer_range), 0.0
    bound = 1 / math.sqrt(in_features) if in_features else 0.0
    return uniform(bound), uniform(bound)


class SlicedLinear(DistributedModule):
    """Holds a sliced weight (and bias) for the module it is in, which does the computing.

    split: "column": rows of the weight and the bias; "row": columns of the weight, and the bias if hidden states
    are kept sliced; None: nothing.   units: of the split dim, which are never cut.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        split: Literal["column", "row"] | None,
        units: Units = Units(),  # noqa: B008 - frozen
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        init, init_bias = linear_init(in_features, initializer_range, use_normal_initialization)
        dim = {"column": 0, "row": 1, None: None}[split]
        self.add_parameter("weight", (out_features, in_features), init, dim, units)
        if not bias:
            self.register_parameter("bias", None)
        elif split == "column":
            self.add_parameter("bias", (out_features,), init_bias, 0, units)
        else:
            sliced = split == "row" and keeps_hidden_sliced()
            self.add_parameter("bias", (out_features,), init_bias, 0 if sliced else None)

    def forward(self, input: Tensor) -> Tensor:
        raise UsageError("a slice of a linear layer can't be called by itself", remedy="call the module around it")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class DistributedLinear(DistributedModule):
    """`nn.Linear` whose input features are split over the tp ranks.

    weight: [out_features, in_features / tp].   bias: [out_features], replicated (nested in memory mode: sliced).
    Called by: every rank of the tp group. Collectives: an all-to-all of the input (none with
    `prescaled_batch`), and a reduce-scatter (all-reduce) of the output; in backward the reverse.
    nested: input and output are hidden states of the mode, not own samples.
    Raises: ConfigError if the tp degree doesn't divide `in_features` (nested in memory mode: nor `out_features`).
    """

    indivisible: ClassVar[bool] = True
    weight: Tensor
    bias: Tensor | None

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
        check_divisible("in_features", in_features)
        self.in_features = in_features
        self.out_features = out_features
        self.nested = nested
        self.sliced = keeps_hidden_sliced()
        self.prescaled = prescaled_batch()
        sliced_out = nested and self.sliced
        if sliced_out:
            check_divisible("out_features", out_features)
        init, init_bias = linear_init(in_features, initializer_range, use_normal_initialization)
        self.add_parameter("weight", (out_features, in_features), init, 1)
        if bias:
            self.add_parameter("bias", (out_features,), init_bias, 0 if sliced_out else None)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        if self.nested:
            x = input if self.sliced else comm.own_hidden(input)
            return row_linear(x, self.weight, self.bias, leave="hidden" if self.sliced else "whole")
        if self.prescaled:
            return row_linear(comm.own_hidden(input), self.weight, self.bias, leave="whole")
        if input.dim() == 1:  # one sample without a batch dim
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return row_linear(comm.batch_to_hidden(input), self.weight, self.bias, leave="batch")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
