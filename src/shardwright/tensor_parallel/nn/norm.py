"""Norms over the hidden dim: whole, and distributed over slices of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.tensor_parallel.module import DistributedModule, check_divisible, parameter_dtype, tp_size
from shardwright.tensor_parallel.nn.functional import Source, affine
from shardwright.tensor_parallel.nn.options import Norm
from shardwright.transport import differentiable as comm


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, which is fused already.

    Own class, because scripts ask `isinstance(module, FusedLayerNorm)`; subclass, because frameworks ask
    `isinstance(module, torch.nn.LayerNorm)`. Called by: any rank. Collectives: none.
    """


class RMSNorm(nn.Module):
    """Division by the root mean square over the last dim, in float32, times a weight. Collectives: none.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=parameter_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32; the weight multiplies in its own dtype."""
    normal = nn.functional.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return weight * normal.to(x.dtype)


class DistributedLayerNorm(DistributedModule, FusedLayerNorm):
    """Layer norm over hidden states sliced over their last dim; weight and bias are sliced alike.

    Called by: every rank of the tp group. Collectives: one all-gather of two numbers per token forward, one
    all-reduce of two numbers per token backward. normalized_shape: the full size.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        nn.Module.__init__(self)
        check_divisible("hidden_size", size)
        self.normalized_shape = (size,)
        self.eps = eps
        self.elementwise_affine = True
        self.add_parameter("weight", (size,), 1.0, dim=0)
        self.add_parameter("bias", (size,), 0.0, dim=0)

    def forward(self, input: Tensor) -> Tensor:
        if tp_size() == 1:
            return super().forward(input)
        return self.with_source(input)[0]

    def with_source(self, x: Tensor) -> tuple[Tensor, Source | None]:
        """Return the output, and what it can be computed from again (None with one rank)."""
        if tp_size() == 1:
            return self(x), None
        normed, normal = _LayerNormSliced.apply(x, self.weight, self.bias, self.eps)
        return normed, (normal, self.weight, self.bias)


class DistributedRMSNorm(DistributedModule):
    """RMS norm over hidden states sliced over their last dim; the weight is sliced alike.

    Collectives: one all-reduce of one number per token forward, one backward.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_divisible("hidden_size", size)
        self.size = size
        self.eps = eps
        self.add_parameter("weight", (size,), 1.0, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        if tp_size() == 1:
            return rms_norm(x, self.weight, self.eps)
        return self.with_source(x)[0]

    def with_source(self, x: Tensor) -> tuple[Tensor, Source | None]:
        """Return the output, and what it can be computed from again (None with one rank)."""
        if tp_size() == 1:
            return self(x), None
        normal: Tensor = _RMSSliced.apply(x, self.size, self.eps)
        return affine(normal, self.weight, None), (normal.detach(), self.weight, None)


def apply_norm(norm: nn.Module | None, x: Tensor) -> tuple[Tensor, Source | None]:
    """Apply a norm, if there is one, and return its output with the source that `column_linear` takes."""
    if norm is None:
        return x, None
    if isinstance(norm, (DistributedLayerNorm, DistributedRMSNorm)) and not _is_hooked(norm):
        return norm.with_source(x)
    return norm(x), None


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody wants to see the call, or what it returns."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def make_norm(kind: Norm, size: int, eps: float, *, sliced: bool) -> nn.Module:
    """Return a norm over hidden states that are whole, or sliced over the tp ranks."""
    dtype = parameter_dtype()
    if kind == "layernorm":
        return DistributedLayerNorm(size, eps) if sliced else FusedLayerNorm(size, eps, dtype=dtype)
    if kind == "rmsnorm":
        return DistributedRMSNorm(size, eps) if sliced else RMSNorm(size, eps)
    raise ValueError(f"'norm' is {kind!r}, expected 'layernorm' or 'rmsnorm'")


class _LayerNormSliced(torch.autograd.Function):
    """Slices are equally long, so means of means are means: total variance = mean of the ranks' variances +
    variance of their means (Chan et al. 1979), which loses no digits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1]).float()
        size = flat.shape[1] * comm.size()
        mean = flat.mean(-1)
        centred = flat - mean.unsqueeze(1)
        own = torch.stack((mean, torch.linalg.vecdot(centred, centred)))  # [2, N]
        means, squares = comm.gathered(own).unbind(1)  # [tp, N] each
        between, total_mean = torch.var_mean(means, 0, correction=0)
        variance = squares.sum(0).div_(size).add_(between)
        inverse = variance.add_(eps).rsqrt_().unsqueeze(1)
        normal = centred.add_((mean - total_mean).unsqueeze(1)).mul_(inverse)
        normal = normal.to(x.dtype).view(x.shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.mark_non_differentiable(normal)
        ctx.set_materialize_grads(False)
        ctx.bias_dtype = bias.dtype
        return affine(normal, weight, bias), normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse, weight = ctx.saved_tensors
        normal = normal.float().view(-1, normal.shape[-1])
        flat = grad.reshape(normal.shape).float()
        scale = weight.float()
        product = flat * normal
        sums = torch.stack((flat @ scale, product @ scale))  # [2, N]
        pending = comm.reduce_start(sums)
        of_weight = product.sum(0).to(weight.dtype)
        of_bias = flat.sum(0).to(ctx.bias_dtype)
        of_normal = torch.mul(flat, scale, out=product)
        pending.wait()
        first, second = sums.div_(normal.shape[1] * comm.size()).unsqueeze(2).unbind(0)
        of_x = of_normal.sub_(normal * second).sub_(first).mul_(inverse)  # products with [N, 1]: fast on a CPU
        return of_x.to(grad.dtype).view(grad.shape), of_weight, of_bias, None


class _RMSSliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float()
        squares = comm.reduced(torch.linalg.vecdot(flat, flat))
        inverse = squares.div_(size).add_(eps).rsqrt_().unsqueeze(1)
        normal = (flat * inverse).to(x.dtype)
        ctx.save_for_backward(normal, inverse)
        ctx.size = size
        return normal.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse = ctx.saved_tensors
        normal = normal.float()
        flat = grad.reshape(normal.shape).float()
        mean = comm.reduced(torch.linalg.vecdot(flat, normal)).div_(ctx.size).unsqueeze(1)
        of_x = (flat - normal * mean).mul_(inverse)
        return of_x.to(grad.dtype).view(grad.shape), None, None
