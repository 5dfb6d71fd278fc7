"""`DistributedMixtureOutputLayer`: a router and gated experts in place of the output layer."""

from __future__ import annotations

import math
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel import batch, randomness
from shardwright.tensor_parallel.module import (
    DistributedModule,
    Init,
    keeps_hidden_sliced,
    normal,
    tp_size,
    uniform,
)
from shardwright.tensor_parallel.nn.linear import SlicedLinear
from shardwright.tensor_parallel.nn.mlp import find_activation
from shardwright.tensor_parallel.nn.norm import make_norm
from shardwright.tensor_parallel.nn.options import Norm, SplitExperts
from shardwright.tensor_parallel.nn.residual import add_residual, check_norms
from shardwright.transport import differentiable as comm

_CUT_DIMS: Final[dict[SplitExperts | None, tuple[int | None, int | None]]] = {
    "intermediate": (1, 2),
    "experts": (0, 0),
    None: (None, None),
}
"""Which dim of gate and up, and of down, is split."""


class DistributedMixtureOutputLayer(DistributedModule):
    """A router and gated experts, of which each token visits a few.

    Parameters: router.weight [experts, hidden], experts_gate and experts_up [experts, intermediate, hidden],
    experts_down [experts, hidden, intermediate], pre_layernorm, layernorm.
    split_experts: "intermediate": every rank holds a slice of each expert; "experts": a rank holds whole
        experts; None: every rank holds all of them.
    normalize_router: the weights of a token's experts are scaled to sum to one.
    """

    indivisible: ClassVar[bool] = True
    experts_gate: Tensor
    experts_up: Tensor
    experts_down: Tensor

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
        check_norms(pre_layernorm, post_layernorm, residual)
        batch.check_hidden(hidden_size)
        if not 1 <= experts_per_token <= num_experts:
            raise ConfigError(f"'experts_per_token' is {experts_per_token}, expected 1 to {num_experts}")
        if split_experts == "experts" and num_experts < tp_size():
            raise ConfigError(
                f"'num_experts' is {num_experts}, expected at least 'tensor_parallel_degree' ({tp_size()}) to "
                "split by experts",
                remedy="split_experts='intermediate'",
            )
        self.sliced = keeps_hidden_sliced()
        self.hidden_dropout_prob = hidden_dropout_prob
        self.activation = activation
        self._activate = find_activation(activation)
        self.fp32_residual_addition = fp32_residual_addition
        self.residual = residual
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.normalize_router = normalize_router
        self.split_experts = split_experts
        self.nested = nested
        if not nested:
            self.enter = batch.EnterScaledBatch()
            self.leave = batch.LeaveScaledBatch()
        self.pre_layernorm = (
            make_norm(norm, hidden_size, layernorm_epsilon, sliced=self.sliced) if pre_layernorm else None
        )
        self.router = SlicedLinear(
            hidden_size,
            num_experts,
            False,
            split="row" if self.sliced else None,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
        )

        def init(fan_in: int) -> Init:
            return normal(initializer_range) if use_normal_initialization else uniform(1 / math.sqrt(fan_in))

        wide, narrow = _CUT_DIMS[split_experts]
        self.add_parameter("experts_gate", (num_experts, intermediate_size, hidden_size), init(hidden_size), wide)
        self.add_parameter("experts_up", (num_experts, intermediate_size, hidden_size), init(hidden_size), wide)
        self.add_parameter(
            "experts_down", (num_experts, hidden_size, intermediate_size), init(intermediate_size), narrow
        )
        first = 0
        if split_experts == "experts":
            first = self.shard_specs()["experts_gate"].ranges[comm.position()][0]
        self.first_expert = first
        self.layernorm = make_norm(norm, hidden_size, layernorm_epsilon, sliced=self.sliced) if post_layernorm else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states to hidden states.

        Called by: every rank of the tp group. Collectives: as the output layer's; and for the router one
            all-reduce of a few numbers per token, backward, in memory mode forward, too.
        """
        if not self.nested:
            (hidden,) = self.enter(hidden)
        residual = hidden
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        shares, chosen = self._route(hidden)
        hidden = self._leave(self._mix(self._enter(hidden), shares, chosen))
        hidden = randomness.dropout(hidden, self.hidden_dropout_prob, self.training, split=self.sliced)
        if self.residual:
            hidden = add_residual(hidden, residual, self.fp32_residual_addition)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        return hidden if self.nested else self.leave(hidden)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's shares of its experts, and which these are: [..., experts per token] both."""
        scores = nn.functional.linear(hidden, self.router.weight)
        if self.sliced:  # products of slices
            scores = comm.sum_over_ranks(scores)
        shares, chosen = torch.topk(scores.float().softmax(-1), self.experts_per_token, dim=-1)
        if self.normalize_router:
            shares = shares / shares.sum(-1, keepdim=True)
        if self.split_experts is not None:  # each rank multiplies them with its part of the experts' outputs
            shares = comm.copy_to_ranks(shares)
        return shares.to(hidden.dtype), chosen

    def _enter(self, hidden: Tensor) -> Tensor:
        """Hidden states as the experts need them: whole. Experts that are split give partial gradients."""
        if self.split_experts is None:
            return comm.gather_hidden(hidden) if self.sliced else hidden
        return comm.gather_hidden_for_partial(hidden) if self.sliced else comm.copy_to_ranks(hidden)

    def _leave(self, mixed: Tensor) -> Tensor:
        if self.split_experts is None:
            return comm.own_hidden(mixed) if self.sliced else mixed
        return comm.scatter_hidden(mixed) if self.sliced else comm.sum_over_ranks(mixed)

    def _mix(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Sum of this rank's experts' (parts of) outputs, each times its share."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        shares, chosen = shares.flatten(0, -2), chosen.flatten(0, -2)
        experts = list(
            zip(*(w.unbind(0) for w in (self.experts_gate, self.experts_up, self.experts_down)), strict=True)
        )
        mixed = torch.zeros_like(tokens)
        if comm.is_silent(tokens):  # which tokens an expert gets isn't known: all of them to some experts
            for slot, weights in enumerate(experts[: self.experts_per_token]):
                mixed = mixed + self._expert(tokens, *weights) * shares[:, slot, None]
            return mixed.view(hidden.shape)
        for expert, weights in enumerate(experts):
            token, place = torch.where(chosen == self.first_expert + expert)
            output = self._expert(tokens[token], *weights) * shares[token, place].unsqueeze(1)
            mixed.index_add_(0, token, output.to(mixed.dtype))
        return mixed.view(hidden.shape)

    def _expert(self, tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        opening = self._activate(nn.functional.linear(tokens, gate))
        return nn.functional.linear(opening * nn.functional.linear(tokens, up), down)
