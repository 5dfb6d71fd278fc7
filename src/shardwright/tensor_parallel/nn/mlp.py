"""`DistributedTransformerOutputLayer`: the feed-forward half of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from torch import Tensor, nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel import batch, randomness
from shardwright.tensor_parallel.module import DistributedModule, keeps_hidden_sliced
from shardwright.tensor_parallel.nn.functional import column_linear, row_linear, row_linear_of
from shardwright.tensor_parallel.nn.linear import SlicedLinear
from shardwright.tensor_parallel.nn.norm import apply_norm, make_norm
from shardwright.tensor_parallel.nn.options import Norm
from shardwright.tensor_parallel.nn.residual import add_residual, check_norms

Activation = Callable[[Tensor], Tensor]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


_TANH_GELU: Activation = partial(nn.functional.gelu, approximate="tanh")

ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": nn.functional.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_tanh": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "relu": nn.functional.relu,
    "quick_gelu": _quick_gelu,
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
}
"""Activations by the names that transformers gives them."""


def find_activation(name: str) -> Activation:
    """Return an activation by name. Raises: ConfigError with the names that are known."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"'activation' is {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class DistributedTransformerOutputLayer(DistributedModule):
    """dense1, activation, dense2, with norms, dropout and residual. Options: see options.py.

    Parameters: dense1, dense2 and with `gated` dense1_gate (.weight, .bias), pre_layernorm, layernorm.
    """

    indivisible: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        gated: bool = False,
        mlp_bias: bool = True,
        intermediate_dropout_prob: float = 0.0,
        norm: Norm = "layernorm",
        fused_bias_gelu: bool = False,
        fused_dropout: bool = False,
        residual: bool = True,
        nested: bool = False,
    ) -> None:
        super().__init__()
        check_norms(pre_layernorm, post_layernorm, residual)
        batch.check_hidden(hidden_size)
        self.sliced = keeps_hidden_sliced()
        self.hidden_dropout_prob = hidden_dropout_prob
        self.intermediate_dropout_prob = intermediate_dropout_prob
        self.activation = activation
        self._activate = find_activation(activation)
        self.fp32_residual_addition = fp32_residual_addition
        self.residual = residual
        self.nested = nested
        if not nested:
            self.enter = batch.EnterScaledBatch()
            self.leave = batch.LeaveScaledBatch()

        def column() -> SlicedLinear:
            return SlicedLinear(
                hidden_size,
                intermediate_size,
                mlp_bias,
                split="column",
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
            )

        self.pre_layernorm = (
            make_norm(norm, hidden_size, layernorm_epsilon, sliced=self.sliced) if pre_layernorm else None
        )
        self.dense1 = column()
        self.dense1_gate = column() if gated else None
        self.dense2 = SlicedLinear(
            intermediate_size,
            hidden_size,
            mlp_bias,
            split="row",
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
        )
        self.layernorm = make_norm(norm, hidden_size, layernorm_epsilon, sliced=self.sliced) if post_layernorm else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states to hidden states.

        Called by: every rank of the tp group. Collectives: those of `column_linear` and `row_linear`, of the
        norms in memory mode, and of the batch exchange unless nested.
        """
        if not self.nested:
            (hidden,) = self.enter(hidden)
        residual = hidden
        hidden, source = apply_norm(self.pre_layernorm, hidden)
        wide = column_linear(
            hidden,
            [layer.weight for layer in self._first],
            [layer.bias for layer in self._first],
            sliced=self.sliced,
            source=source,
        )
        weight, bias = self.dense2.weight, self.dense2.bias
        if self.training and self.intermediate_dropout_prob:
            dropped = randomness.dropout(self._combine(*wide), self.intermediate_dropout_prob, True, split=True)
            hidden = row_linear(dropped, weight, bias, leave="hidden" if self.sliced else "whole")
        else:
            hidden = row_linear_of(self._combine, wide, weight, bias, sliced=self.sliced)
        hidden = randomness.dropout(hidden, self.hidden_dropout_prob, self.training, split=self.sliced)
        if self.residual:
            hidden = add_residual(hidden, residual, self.fp32_residual_addition)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        return hidden if self.nested else self.leave(hidden)

    @property
    def _first(self) -> list[SlicedLinear]:
        return [self.dense1] if self.dense1_gate is None else [self.dense1_gate, self.dense1]

    def _combine(self, *wide: Tensor) -> Tensor:
        """[..., intermediate / tp] of one projection, or of gate and value."""
        opened = self._activate(wide[0])
        return opened if len(wide) == 1 else opened * wide[1]
