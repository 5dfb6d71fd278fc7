"""Linear layers fused with the communication around them: forward, and backward written by hand.

Column: the weight's rows (output features) are split, every rank needs the whole input. Row: the weight's
columns (input features) are split, every rank has a partial output.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; for sliced hidden states Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2, with the hidden dim in place of the sequence.

What fusing saves: gradients of several projections of one input add up in the matrix product; communication
runs beside the product of the weight's gradient; the gathered input is not kept but gathered again; and
hidden states are never transposed for a collective, for a product over slices of the weight writes (reads)
each rank's part where it belongs. What is cheap to compute again isn't kept either: in memory mode the output
of a norm before a column linear (its normalised input is kept by the norm), and of an activation before a row
linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.transport import differentiable as comm
from shardwright.transport.workspace import workspace

Leave = Literal["whole", "hidden", "batch"]
"""What a row linear does with its partial output: sum it everywhere; keep a slice of the hidden dim of the sum;
keep this rank's samples of the sum."""

Compute = Callable[..., Tensor]

Source = tuple[Tensor, Tensor, "Tensor | None"]
"""Normalised input, weight and bias of a norm: what its output is computed from again."""


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    sliced: bool,
    source: Source | None = None,
) -> tuple[Tensor, ...]:
    """Multiply one input by the rows of several weights that this rank holds.

    Called by: every rank of the tp group.
    Collectives: `sliced` (memory): all-gather forward; all-gather and reduce-scatter backward. Else: none
        forward, one all-reduce of the gradient of x backward.
    x: [..., H], equal on all ranks; with `sliced` [..., H / tp].   weights: [out_i / tp, H] each.
    source: with `sliced`: what x is computed from again in backward, in place of being kept.
    Returns: [..., out_i / tp] for each weight.
    """
    x, weights, biases = _autocast(x, weights, biases)
    results: tuple[Tensor, ...]
    if sliced and comm.size() > 1:
        results = _ColumnSliced.apply(x, *(source or (None, None, None)), *weights, *biases)
    else:
        results = _ColumnWhole.apply(x, len(weights), *weights, *biases)
    return results


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, leave: Leave) -> Tensor:
    """Multiply this rank's input features by its columns of the weight, add up over the ranks, add the bias.

    Called by: every rank of the tp group.
    Collectives: "whole": one all-reduce forward, none backward; "hidden", "batch": one reduce-scatter forward,
        one all-gather backward.
    x: [..., K / tp].   weight: [H, K / tp].   bias: [H], with "hidden" [H / tp].
    Returns: "whole" [..., H], equal on all ranks; "hidden" [..., H / tp]; "batch" [B, ..., H] of [tp * B, ...].
    The bias's gradient is that of the scaled batch in each case.
    """
    x, (weight,), (bias,) = _autocast(x, [weight], [bias])
    result: Tensor
    if comm.size() == 1 or leave == "whole":
        result = _RowWhole.apply(x, weight, bias)
    elif leave == "batch":
        result = _RowBatch.apply(x, weight, bias)
    else:
        result = _RowHidden.apply(None, weight, bias, x)
    return result


def row_linear_of(
    compute: Compute, inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, *, sliced: bool
) -> Tensor:
    """Like `row_linear` with x = compute(*inputs), "hidden" or "whole".

    compute: cheap mathematics without randomness or communication. With `sliced` its result isn't kept but
        computed again in backward.
    """
    if not sliced or comm.size() == 1:
        return row_linear(compute(*inputs), weight, bias, leave="hidden" if sliced else "whole")
    _, (weight,), (bias,) = _autocast(inputs[0], [weight], [bias])
    result: Tensor = _RowHidden.apply(compute, weight, bias, *inputs)
    return result


def _autocast(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """Cast as autocast would cast the operands of a linear layer: it can't see into our functions."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weights, biases
    dtype = torch.get_autocast_dtype(kind)
    return (
        x.to(dtype),
        [weight.to(dtype) for weight in weights],
        [None if bias is None else bias.to(dtype) for bias in biases],
    )


def affine(normal: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a norm makes of its normalised input."""
    if bias is None:
        return weight * normal
    return torch.addcmul(bias.float(), normal.float(), weight.float()).to(normal.dtype)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _layers(tensors: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights and then their biases, as pairs."""
    num = len(tensors) // 2
    for weight, bias in zip(tensors[:num], tensors[num:], strict=True):
        assert weight is not None
        yield weight, bias


def _sum_of_products(pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor | None = None) -> Tensor:
    """Add up matrix products without temporaries."""
    (a, b), *rest = pairs
    total = torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    for a, b in rest:
        total.addmm_(a, b)
    return total


def _columns(weight: Tensor) -> list[Tensor]:
    """The columns of a weight that multiply each rank's slice of the hidden dim, as views."""
    return list(weight.split(weight.shape[1] // comm.size(), dim=1))


def _rows(weight: Tensor) -> list[Tensor]:
    return list(weight.split(weight.shape[0] // comm.size(), dim=0))


class _ColumnWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *tensors[:num])
        flat = _flat(x)
        return tuple(_multiply(flat, weight, bias).view(*x.shape[:-1], -1) for weight, bias in _layers(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs, num = ctx.needs_input_grad, len(weights)
        flats = [_flat(grad) for grad in grads]
        grad_x, pending = None, None
        if needs[0]:
            grad_x = _sum_of_products(list(zip(flats, weights, strict=True)))
            pending = comm.reduce_start(grad_x)
        flat = _flat(x)
        of_weights = [torch.mm(g.t(), flat) if needs[2 + i] else None for i, g in enumerate(flats)]
        of_biases = [g.sum(0) if needs[2 + num + i] else None for i, g in enumerate(flats)]
        if pending is not None:
            pending.wait()
        return None if grad_x is None else grad_x.view(x.shape), None, *of_weights, *of_biases


class _ColumnSliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normal: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        kept = (x, None, None) if normal is None else (normal, scale, shift)
        ctx.save_for_backward(*kept, *tensors[: len(tensors) // 2])
        ctx.shape, ctx.dtype, ctx.again = x.shape, x.dtype, normal is not None
        parts, pending = comm.gather_start(_flat(x), into="gathered")
        pending.wait()
        results = []
        for weight, bias in _layers(tensors):
            first, *others = zip(parts.unbind(0), _columns(weight), strict=True)
            total = _multiply(first[0], first[1], bias)
            for part, columns in others:
                total.addmm_(part, columns.t())
            results.append(total.view(*x.shape[:-1], -1))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale, shift, *weights = ctx.saved_tensors
        needs, num = (ctx.needs_input_grad[0], None, *ctx.needs_input_grad[4:]), len(weights)
        flats = [_flat(grad) for grad in grads]
        flat = _flat(affine(kept, scale, shift).to(ctx.dtype) if ctx.again else kept)
        needs_weights = any(needs[2 : 2 + num])
        parts, gathering = comm.gather_start(flat, into="gathered") if needs_weights else (None, None)
        grad_x, scattering = None, None
        if needs[0]:
            of_parts = workspace("partial", (comm.size(), *flat.shape), flat)
            for rank, out in enumerate(of_parts.unbind(0)):
                _sum_of_products([(g, _columns(w)[rank]) for g, w in zip(flats, weights, strict=True)], out)
        if gathering is not None:
            gathering.wait()
        if needs[0]:
            grad_x, scattering = comm.scatter_start(of_parts)
        of_weights: list[Tensor | None] = [None] * num
        if parts is not None:
            whole = workspace("joined", (len(flat), len(parts) * flat.shape[1]), flat)
            whole.view(len(flat), len(parts), -1).copy_(parts.transpose(0, 1))
            of_weights = [torch.mm(g.t(), whole) if needs[2 + i] else None for i, g in enumerate(flats)]
        of_biases = [g.sum(0) if needs[2 + num + i] else None for i, g in enumerate(flats)]
        if scattering is not None:
            scattering.wait()
        of_x = None if grad_x is None else grad_x.view(ctx.shape)
        return of_x, None, None, None, *of_weights, *of_biases


class _RowWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        total = comm.reduced(torch.mm(_flat(x), weight.t()))
        if bias is not None:
            total.add_(bias)
        return total.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return _row_backward(ctx.needs_input_grad, x, weight, _flat(grad))


def _row_backward(needs: Sequence[bool], x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (
        torch.mm(grad, weight).view(x.shape) if needs[0] else None,
        torch.mm(grad.t(), _flat(x)) if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


class _RowHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute | None, weight: Tensor, bias: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *inputs)
        ctx.compute = compute
        x = inputs[0] if compute is None else compute(*inputs).to(weight.dtype)
        flat = _flat(x)
        parts = workspace("partial", (comm.size(), flat.shape[0], weight.shape[0] // comm.size()), flat)
        for out, rows in zip(parts.unbind(0), _rows(weight), strict=True):
            torch.mm(flat, rows.t(), out=out)
        total = comm.scattered(parts)
        if bias is not None:
            total.add_(bias)
        return total.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        _, needs_weight, needs_bias, *needs = ctx.needs_input_grad
        parts, pending = comm.gather_start(_flat(grad), into="gathered")
        of_bias = _flat(grad).sum(0) if needs_bias else None
        x = inputs[0]
        if ctx.compute is not None:
            inputs = [tensor.detach().requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                x = ctx.compute(*inputs).to(weight.dtype)
        flat = _flat(x.detach())
        pending.wait()
        grads = parts.unbind(0)
        of_inputs: Sequence[Tensor | None] = [None] * len(inputs)
        if any(needs):
            of_x = _sum_of_products(list(zip(grads, _rows(weight), strict=True))).view(x.shape)
            of_inputs = [of_x] if ctx.compute is None else torch.autograd.grad(x, inputs, of_x)
        of_weight = None
        if needs_weight:
            of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            for g, out in zip(grads, _rows(of_weight), strict=True):
                torch.mm(g.t(), flat, out=out)
        return None, of_weight, of_bias, *of_inputs


class _RowBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        partial = torch.mm(_flat(x), weight.t())
        total = comm.scattered(partial.view(comm.size(), -1, weight.shape[0]))
        if bias is not None:
            total.add_(bias)
        return total.view(x.shape[0] // comm.size(), *x.shape[1:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = comm.gathered(_flat(grad)).flatten(0, 1)
        return _row_backward(ctx.needs_input_grad, x, weight, whole)
