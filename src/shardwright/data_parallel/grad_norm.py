"""The norm of all gradients of a model whose parameters lie on several ranks, and clipping by it.

Each rank adds up the gradients that it counts, the sums meet over an axis, and every rank gets the same number: the one
that one process with the whole model would get. Data-parallel replicas hold equal gradients after their reduction, so
nothing is exchanged between them, unless each holds pieces of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.data_parallel.buckets import flat_memory, is_dense
from shardwright.data_parallel.optimizer_state import Piece
from shardwright.errors import ShardwrightError, UsageError
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives


@dataclass(frozen=True, eq=False)
class HeldGradient:
    """A gradient that this rank holds: of a whole parameter (or slice of one over tp ranks), or of a piece of it.

    parameter: the model's own.   gradient: shaped like the parameter, or one-dimensional like the piece; it may belong to
    another tensor that stands for the parameter, such as an fp32 master.
    """

    parameter: Tensor
    gradient: Tensor
    piece: Piece | None = None


CountedHere = Callable[[HeldGradient], Tensor | None]

# fp32 sums of a thousand squares are good to 1e-8; on a CPU one sum over ten million is off by 4e-4.
_ROW = 1024


class NonFiniteGradientError(ShardwrightError, RuntimeError):
    """The gradient norm is infinite or not a number."""


def gradients_of(parameters: Iterable[Parameter]) -> list[HeldGradient]:
    """The gradients of whole parameters, each once, of those that have one."""
    unique = {id(p): p for p in parameters}
    return [HeldGradient(p, p.grad) for p in unique.values() if p.grad is not None]


@torch.no_grad()
def global_grad_norm(
    gradients: Iterable[HeldGradient],
    *,
    norm_type: float = 2.0,
    axis: Axis = "pp",
    counted_here: CountedHere | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of all gradients of the model, equal on every rank.

    Called by: every rank of the axis after the gradients have been reduced, also ranks without any gradient.
    Collectives: one all-reduce of one number over `axis`.
    gradients: what this rank holds.   norm_type: 2.0, another positive order, or inf.
    axis: over which the model is spread: "pp"; "mp" with tensor parallelism; "world" if replicas hold pieces.
    counted_here: the part of a gradient that this rank counts, None for nothing: of what is equal on several ranks
        of the axis one counts it.
    Returns: a number as fp32 tensor on this rank's device. Sums run in fp64 beyond 1024 elements.
    Raises: NonFiniteGradientError on every rank if asked for and the norm is infinite or NaN.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise UsageError(f"norm_type is {norm_type:g}, expected a positive number or inf")
    counted = [held.gradient if counted_here is None else counted_here(held) for held in gradients]
    norms = _partial_norms([g for g in counted if g is not None], norm_type, context.world().device)
    total = _largest(norms, axis) if math.isinf(norm_type) else _combined(norms, norm_type, axis)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteGradientError(
            f"the gradient norm of order {norm_type:g} is {total.item()}, so gradients cannot be clipped",
            remedy="look for an overflow in the loss, or pass error_if_nonfinite=False",
        )
    return total.float()


@torch.no_grad()
def clip_grad_norm_(
    gradients: Iterable[HeldGradient],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    axis: Axis = "pp",
    counted_here: CountedHere | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients by one common factor so that their global norm is at most `max_norm`.

    Called by and collectives: as `global_grad_norm`. The factor is max_norm / (norm + 1e-6) where that is below 1,
    as in torch.nn.utils.clip_grad_norm_; gradients that are counted elsewhere are scaled too.
    Returns: the norm before clipping, equal on every rank.
    """
    held = list(gradients)
    norm = global_grad_norm(
        held, norm_type=norm_type, axis=axis, counted_here=counted_here, error_if_nonfinite=error_if_nonfinite
    )
    factor = max_norm / (norm + 1e-6)
    if norm.device.type == "cpu" and factor >= 1:
        return norm  # on a GPU the question would stop the stream; there the factor is clamped
    factor = factor.clamp(max=1.0)
    for entry in held:
        entry.gradient.mul_(factor.to(entry.gradient.device))
    return norm


def _partial_norms(gradients: list[Tensor], order: float, device: torch.device) -> Tensor:
    """Norms of pieces of the gradients, as one fp64 vector; empty pieces add nothing."""
    rows: list[Tensor] = []
    pieces: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        flat = _flat(gradient)
        dtype = torch.float64 if flat.dtype is torch.float64 else torch.float32
        # On a CPU a long sum in fp32 loses digits (see _ROW); a GPU sums as a tree anyway.
        whole = flat.numel() // _ROW * _ROW if flat.device.type == "cpu" else 0
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), order, dim=1, dtype=dtype))
        if flat.numel() > whole:
            pieces.setdefault(dtype, []).append(flat[whole:])
    for dtype, tensors in pieces.items():
        rows.append(torch.stack([n.to(device) for n in torch._foreach_norm(tensors, order, dtype)]))
    return torch.cat(
        [torch.zeros(1, dtype=torch.float64, device=device), *(r.to(device).double() for r in rows)]
    )


def _flat(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    flat = flat_memory(gradient) if is_dense(gradient) else gradient.reshape(-1)
    return flat.abs() if flat.is_complex() else flat


def _combined(norms: Tensor, order: float, axis: Axis) -> Tensor:
    total = norms.pow(order).sum()
    collectives.all_reduce(total, axis, op="sum")
    return total.pow(1.0 / order)


def _largest(norms: Tensor, axis: Axis) -> Tensor:
    """Return the maximum over the axis. NaN, which a maximum over ranks may lose, is sent apart."""
    broken = norms.isnan().any()
    pair = torch.stack([norms.nan_to_num(nan=0.0, posinf=math.inf).max(), broken.double()])
    collectives.all_reduce(pair, axis, op="max")
    return torch.where(pair[1] > 0, math.nan, pair[0])
