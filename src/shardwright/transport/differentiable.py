"""Collectives over the tensor parallel ranks with their backward, written by hand.

Two layers. Plain functions (`reduced`, `gathered`, `scattered`, `exchanged`) communicate and know nothing of
autograd; backward formulas of fused operations call them. Differentiable functions pair them.

Note [Equal or partial]: a gradient is either *equal* on all tp ranks (of a tensor that is equal on all), or
each rank holds a *partial* one and the sum counts. Every function here says which it takes and gives. Region
borders follow Shoeybi et al. 2019, arXiv:1909.08053, and for sliced states Korthikanti et al. 2022,
arXiv:2205.05198.

Samples of the scaled batch are grouped by rank: those of tp rank 0 come first.

On fake and meta tensors, and within `shapes_only`, nothing is sent: results have the right shape and no
meaning. Called by: every rank of the tp group, in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from shardwright.errors import ShapeError
from shardwright.topology import context
from shardwright.transport import collectives
from shardwright.transport.workspace import workspace

Move = Callable[[Tensor], Tensor]

_MOST_DIMS = 8
_depth_of_shapes_only = 0


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, nothing is sent and results only have the right shape: for a forward that one rank runs alone.

    Called by: any rank, alone; from one thread at a time.
    """
    global _depth_of_shapes_only
    _depth_of_shapes_only += 1
    try:
        yield
    finally:
        _depth_of_shapes_only -= 1


def only_shapes_count() -> bool:
    """Return whether this is within `shapes_only`."""
    return _depth_of_shapes_only > 0


def is_silent(tensor: Tensor) -> bool:
    """Return whether collectives on this tensor send nothing."""
    return _depth_of_shapes_only > 0 or isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def size() -> int:
    """Return the tensor parallel degree; 1 before `init`."""
    return len(context.world().groups.ranks("tp")) if context.is_initialized() else 1


def position() -> int:
    """Return this rank's own place in its tp group."""
    return context.world().coordinates.tp if context.is_initialized() else 0


class _Done:
    """A collective over one rank, or none at all."""

    def wait(self) -> None: ...


Waiting = collectives.Pending | _Done
"""Something whose `wait` must be called before the result is read."""

_DONE = _Done()


# -- plain -------------------------------------------------------------------------------------------------


def reduce_start(tensor: Tensor, op: collectives.Op = "sum") -> Waiting:
    """Start replacing a contiguous tensor by the sum over the ranks."""
    if size() == 1 or is_silent(tensor):
        return _DONE
    return collectives.all_reduce(tensor, "tp", op, async_op=True) or _DONE


def reduced(tensor: Tensor, op: collectives.Op = "sum") -> Tensor:
    """Replace a contiguous tensor by the sum (maximum) over the ranks, in place, and return it."""
    reduce_start(tensor, op).wait()
    return tensor


def gather_start(tensor: Tensor, *, into: str | None = None) -> tuple[Tensor, Waiting]:
    """Start collecting all ranks' tensors into a new one, or into a workspace: [tp, *tensor.shape]."""
    if size() == 1:
        return tensor.detach().unsqueeze(0), _DONE
    shape = (size(), *tensor.shape)
    output = tensor.new_empty(shape) if into is None else workspace(into, shape, tensor)
    if is_silent(tensor):
        return output, _DONE
    return output, collectives.all_gather_into(output, tensor.contiguous(), "tp", async_op=True) or _DONE


def gathered(tensor: Tensor) -> Tensor:
    """Return all ranks' tensors: [tp, *tensor.shape]. With one rank: a view."""
    output, pending = gather_start(tensor)
    pending.wait()
    return output


def scatter_start(tensor: Tensor) -> tuple[Tensor, Waiting]:
    """Start summing over the ranks, keeping tensor[tp rank] of the sum."""
    if size() == 1:
        return tensor.detach()[0], _DONE
    output = tensor.new_empty(tensor.shape[1:])
    if is_silent(tensor):
        return output, _DONE
    tensor = tensor.contiguous()
    shares = workspace("shares", tensor.shape, tensor)
    pending = collectives.reduce_scatter_into(output, tensor, "tp", shares=shares, async_op=True)
    return output, pending or _DONE


def scattered(tensor: Tensor) -> Tensor:
    """Return tensor[tp rank] of the sum over the ranks. tensor: [tp, ...]. With one rank: a view."""
    output, pending = scatter_start(tensor)
    pending.wait()
    return output


def exchanged(tensor: Tensor) -> Tensor:
    """Send tensor[r] to rank r; return what came, by rank. tensor: [tp, ...]. With one rank: a view."""
    if size() == 1:
        return tensor.detach()
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if not is_silent(tensor):
        collectives.all_to_all_into(output, tensor.contiguous(), "tp")
    return output


def exchanged_pieces(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Send pieces[r] to rank r; return what came, by rank, in these shapes. Pieces may differ in size."""
    if size() == 1:
        return [pieces[0].detach()]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    source = torch.cat([piece.reshape(-1) for piece in pieces])
    output = source.new_empty(sum(sizes))
    if not is_silent(source):
        collectives.all_to_all_into(output, source, "tp", sizes, [piece.numel() for piece in pieces])
    return [part.view(*shape) for part, shape in zip(output.split(sizes), shapes, strict=True)]


# -- how dims are laid out -----------------------------------------------------------------------------------


def _split_last(tensor: Tensor) -> Tensor:
    """[..., H] -> [tp, ..., H / tp], as a view."""
    return tensor.view(*tensor.shape[:-1], size(), tensor.shape[-1] // size()).movedim(-2, 0)


def _join_last(parts: Tensor) -> Tensor:
    """[tp, ..., h] -> [..., tp * h], a copy."""
    return parts.movedim(0, -2).reshape(*parts.shape[1:-1], parts.shape[0] * parts.shape[-1])


def _own_last(tensor: Tensor) -> Tensor:
    """[..., H] -> [..., H / tp], this rank's part, contiguous."""
    length = tensor.shape[-1] // size()
    return tensor.narrow(-1, position() * length, length).contiguous()


def _own_batch(tensor: Tensor) -> Tensor:
    """[tp * B, ...] -> [B, ...], this rank's samples, a view."""
    length = tensor.shape[0] // size()
    return tensor.narrow(0, position() * length, length)


def _gather_batch(tensor: Tensor) -> Tensor:
    return gathered(tensor).flatten(0, 1)


def _gather_last(tensor: Tensor) -> Tensor:
    return _join_last(gathered(tensor))


def _scatter_batch(tensor: Tensor) -> Tensor:
    return scattered(tensor.contiguous().unflatten(0, (size(), -1)))


def _scatter_last(tensor: Tensor) -> Tensor:
    return scattered(_split_last(tensor.contiguous()).contiguous())


def _to_hidden(tensor: Tensor) -> Tensor:
    """[B, ..., H] -> [tp * B, ..., H / tp]."""
    return exchanged(_split_last(tensor.contiguous()).contiguous()).flatten(0, 1)


def _to_batch(tensor: Tensor) -> Tensor:
    """[tp * B, ..., H / tp] -> [B, ..., H]."""
    return _join_last(exchanged(tensor.contiguous().unflatten(0, (size(), -1))))


def _summed(tensor: Tensor) -> Tensor:
    return reduced(tensor.clone(memory_format=torch.contiguous_format))


def _own_batch_copied(tensor: Tensor) -> Tensor:
    return _own_batch(tensor).clone()  # not a view: callers may change it in place


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _unchanged(grad: Tensor) -> Tensor:
    return grad


# -- differentiable ------------------------------------------------------------------------------------------


class _Pair(torch.autograd.Function):
    """One plain function forward, another one on the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class _SharedSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, full_size: int, start: int) -> Tensor:
        ctx.dim, ctx.full_size, ctx.start = dim, full_size, start
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape = list(grad.shape)
        length, shape[ctx.dim] = shape[ctx.dim], ctx.full_size
        whole = grad.new_zeros(shape)
        mine = whole.narrow(ctx.dim, ctx.start, length)
        mine.copy_(grad)
        reduced(whole)
        return mine.contiguous(), None, None, None


class _PiecesToBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        ctx.lengths = lengths
        own = [tensor.shape[0] // size(), *tensor.shape[1:-1]]
        pieces = tensor.contiguous().unflatten(0, (size(), -1)).unbind(0)
        return torch.cat(exchanged_pieces(pieces, [(*own, length) for length in lengths]), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shape = (*grad.shape[:-1], ctx.lengths[position()])
        return torch.cat(exchanged_pieces(grad.split(ctx.lengths, -1), [shape] * size())), None


class _GatherPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        ctx.lengths = lengths
        longest = max(lengths)
        if tensor.shape[-1] < longest:
            tensor = torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1]))
        parts = gathered(tensor).unbind(0)
        return torch.cat([part.narrow(-1, 0, n) for part, n in zip(parts, lengths, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.split(ctx.lengths, -1)[position()].contiguous(), None


def _apply(function: type[torch.autograd.Function], tensor: Tensor, *others: Any) -> Tensor:
    if size() == 1:
        return tensor
    result: Tensor = function.apply(tensor, *others)
    return result


def copy_to_ranks(tensor: Tensor) -> Tensor:
    """Use an equal tensor on every rank in its own way. Gradient: partial in, equal out (one all-reduce)."""
    return _apply(_Pair, tensor, _same, _summed)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add up partial tensors (one all-reduce). Gradient: equal in, equal out."""
    return _apply(_Pair, tensor, _summed, _unchanged)


def check_same_shape(tensor: Tensor) -> None:
    """Raise ShapeError, on every rank, if the ranks' tensors differ in shape.

    gloo ends the process when they do. One small all-gather; none on fake tensors, and none with NCCL, where reading its
    result would stop the stream (there `timeout_s` ends the wait).
    """
    if size() == 1 or is_silent(tensor) or (tensor.is_cuda and context.world().devices.has_nccl):
        return
    mine = torch.tensor([tensor.dim(), *tensor.shape, *(0,) * _MOST_DIMS][:_MOST_DIMS])
    found = gathered(mine).tolist()
    shapes = [dims[1 : 1 + dims[0]] for dims in found]
    if any(shape != shapes[0] for shape in shapes):
        by_rank = ", ".join(f"{shape} on tp rank {rank}" for rank, shape in enumerate(shapes))
        raise ShapeError(
            f"tensor parallel ranks bring batches of different shapes: {by_rank}",
            remedy="pad them to one shape and drop the last, smaller batch (drop_last=True), or let all ranks read the"
            " same batch with prescaled_batch",
        )


def gather_batch(tensor: Tensor) -> Tensor:
    """[B, ...] -> [tp * B, ...] (one all-gather). Gradient: equal in, this rank's own samples' out."""
    check_same_shape(tensor)
    return _apply(_Pair, tensor, _gather_batch, _own_batch)


def own_batch(tensor: Tensor) -> Tensor:
    """[tp * B, ...], equal -> [B, ...], this rank's samples. Gradient: equal out (one all-gather)."""
    return _apply(_Pair, tensor, _own_batch_copied, _gather_batch)


def scatter_batch(tensor: Tensor) -> Tensor:
    """[tp * B, ...], partial -> [B, ...] of the sum (one reduce-scatter). Gradient: equal out (all-gather)."""
    return _apply(_Pair, tensor, _scatter_batch, _gather_batch)


def own_hidden(tensor: Tensor) -> Tensor:
    """[..., H], equal -> [..., H / tp]. Gradient: equal out (one all-gather)."""
    return _apply(_Pair, tensor, _own_last, _gather_last)


def gather_hidden(tensor: Tensor) -> Tensor:
    """[..., H / tp] -> [..., H] (one all-gather). Gradient: equal in, this rank's slice out."""
    return _apply(_Pair, tensor, _gather_last, _own_last)


def gather_hidden_for_partial(tensor: Tensor) -> Tensor:
    """[..., H / tp] -> [..., H] (one all-gather). Gradient: partial in, slice of the sum out (reduce-scatter)."""
    return _apply(_Pair, tensor, _gather_last, _scatter_last)


def scatter_hidden(tensor: Tensor) -> Tensor:
    """[..., H], partial -> [..., H / tp] of the sum (one reduce-scatter). Gradient: equal out (all-gather)."""
    return _apply(_Pair, tensor, _scatter_last, _gather_last)


def batch_to_hidden(tensor: Tensor) -> Tensor:
    """[B, ..., H] -> [tp * B, ..., H / tp] (one all-to-all; another in backward)."""
    check_same_shape(tensor)
    return _apply(_Pair, tensor, _to_hidden, _to_batch)


def hidden_to_batch(tensor: Tensor) -> Tensor:
    """[tp * B, ..., H / tp] -> [B, ..., H] (one all-to-all; another in backward)."""
    return _apply(_Pair, tensor, _to_batch, _to_hidden)


def pieces_to_batch(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """[tp * B, ..., lengths[tp rank]] -> [B, ..., sum(lengths)]: like `hidden_to_batch`, slices may be uneven."""
    return _apply(_PiecesToBatch, tensor, tuple(lengths))


def gather_pieces(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """[..., lengths[tp rank]] -> [..., sum(lengths)]: like `gather_hidden`, slices may be uneven."""
    return _apply(_GatherPieces, tensor, tuple(lengths))


def shared_slice(tensor: Tensor, dim: int, full_size: int, start: int) -> Tensor:
    """Use a slice that overlaps with other ranks' slices. Gradient: summed where they overlap (all-reduce).

    full_size, start: size of `dim` in the full tensor, and where this slice begins.
    """
    return _apply(_SharedSlice, tensor, dim, full_size, start)
