"""What attention and output layers have in common: norms around them, and the residual."""

from __future__ import annotations

from torch import Tensor

from shardwright.errors import ConfigError


def check_norms(pre_layernorm: bool, post_layernorm: bool, residual: bool = True) -> None:
    """Raise ConfigError unless there is a norm before or after; one whose residual is added elsewhere is free."""
    if residual and not (pre_layernorm or post_layernorm):
        raise ConfigError(
            "'pre_layernorm' and 'post_layernorm' are both False", remedy="set at least one of them to True"
        )


def add_residual(hidden: Tensor, residual: Tensor, in_fp32: bool) -> Tensor:
    """Add the residual, in float32 if asked for; the result has the dtype of the residual."""
    if in_fp32:
        return (hidden.float() + residual.float()).to(residual.dtype)
    return residual + hidden
