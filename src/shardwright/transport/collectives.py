"""Collectives by axis: every member of the axis's group makes the same call in the same order.

Each wait is bounded by `timeout_s`; its error names the members that are missing. An axis of one rank needs
no communication. Where several ranks share a CUDA device, tensors pass through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import ShapeError
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport.p2p import wait_for

Op = Literal["sum", "max", "min", "product"]

_OPS: Final[dict[Op, Any]] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Pending:
    """A collective under way. `wait` must be called, in the order of the calls."""

    __slots__ = ("_doing", "_finish", "_here", "_on_device", "_ranks", "_work")

    def __init__(
        self,
        work: dist.Work,
        here: context.World,
        doing: str,
        ranks: Sequence[int],
        finish: Callable[[], object] | None,
        on_device: bool,
    ) -> None:
        self._work: dist.Work | None = work
        self._here = here
        self._doing = doing
        self._ranks = ranks
        self._finish = finish
        self._on_device = on_device

    def then(self, step: Callable[[], object]) -> None:
        """Do one thing more at the end of `wait`."""
        before = self._finish

        def finish() -> None:
            if before is not None:
                before()
            step()

        self._finish = finish

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream would wait for it).

        Raises: CommunicationTimeout after `timeout_s`, RemoteRankError, LostRankError.
        """
        work, self._work = self._work, None
        if work is None:
            return
        wait_for(work, self._here.board, self._doing, self._ranks, on_device=self._on_device)
        if self._finish is not None:
            self._finish()


def all_reduce(tensor: Tensor, axis: Axis, op: Op = "sum", async_op: bool = False) -> Pending | None:
    """Replace a tensor, on every rank of the group, by the sum (maximum, ...) of all ranks' tensors.

    Returns: None, or with async_op what must be waited for before the tensor is read or written.
    """
    here = context.world()
    if len(here.groups.ranks(axis)) == 1:
        return None
    carrier, finish = _carrier(here, tensor)
    if carrier.is_complex():
        carrier = torch.view_as_real(carrier)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    pending = _start(
        here, axis, "all_reduce", carrier, lambda group: group.allreduce([carrier], options), finish
    )
    return _given_back(pending, async_op)


def broadcast_tensor(
    tensor: Tensor, axis: Axis, src_group_rank: int = 0, async_op: bool = False
) -> Pending | None:
    """Fill a tensor, on every rank of the group, with the one of `src_group_rank`. Any dtype.

    Returns: None, or with async_op what must be waited for before the tensor is read or written.
    """
    here = context.world()
    if len(here.groups.ranks(axis)) == 1 or tensor.numel() == 0:
        return None
    carrier, finish = _carrier(here, tensor)
    bits = _bits(carrier)
    options = dist.BroadcastOptions()
    options.rootRank = src_group_rank
    options.rootTensor = 0
    pending = _start(here, axis, "broadcast", bits, lambda group: group.broadcast([bits], options), finish)
    return _given_back(pending, async_op)


def all_gather(tensor: Tensor, axis: Axis) -> list[Tensor]:
    """Return the tensors of all ranks of the group, in rank order; all must be of equal shape and dtype."""
    here = context.world()
    ranks = here.groups.ranks(axis)
    if len(ranks) == 1 or tensor.numel() == 0:
        return [tensor.detach().clone() for _ in ranks]
    source = _to_host(here, tensor.detach().contiguous())
    results = [torch.empty_like(source) for _ in ranks]
    bits = [_bits(result) for result in results]
    _start(here, axis, "all_gather", source, lambda group: group.allgather([bits], [_bits(source)])).wait()
    return [result.to(tensor.device) for result in results]


def reduce_scatter(tensor: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
    """Return this rank's equal share of the sum (maximum, ...) of all ranks' flat tensors.

    tensor: [n * k] for a group of n ranks.   Returns: [k].
    Raises: ShapeError if it can't be shared equally.
    """
    here = context.world()
    num_ranks = len(here.groups.ranks(axis))
    if tensor.dim() != 1 or tensor.numel() % num_ranks:
        raise ShapeError(
            f"'tensor' is {list(tensor.shape)}, expected one dim, a multiple of {num_ranks} long"
        )
    if num_ranks == 1:
        return tensor.detach().clone()
    share = tensor.numel() // num_ranks
    if not (tensor.is_cuda and here.devices.has_nccl):
        # gloo itself reduces everything everywhere and drops the rest
        total = tensor.detach().clone()
        all_reduce(total, axis, op)
        position = here.coordinates.position(axis)
        return total[position * share : (position + 1) * share].clone()
    source = tensor.detach().contiguous()
    result = torch.empty(share, dtype=tensor.dtype, device=tensor.device)
    options = dist.ReduceScatterOptions()
    options.reduceOp = _OPS[op]
    _start(
        here,
        axis,
        "reduce_scatter",
        source,
        lambda group: group._reduce_scatter_base(result, source, options),
    ).wait()
    return result


def all_gather_into(
    output: Tensor, tensor: Tensor, axis: Axis, async_op: bool = False
) -> Pending | None:
    """Write the tensors of all ranks of the group, in rank order, into one: output[r] is rank r's.

    output: [n, *tensor.shape], contiguous.   tensor: contiguous, of equal shape and dtype on all ranks.
    Returns: None, or with async_op what must be waited for before `output` is read.
    """
    here = context.world()
    if len(here.groups.ranks(axis)) == 1 or tensor.numel() == 0:
        output.copy_(tensor.detach().unsqueeze(0))
        return None
    source = _bits(_to_host(here, tensor.detach().contiguous()))
    carrier, finish = _result(here, output)
    bits = _bits(carrier)
    pending = _start(here, axis, "all_gather", bits, lambda group: group._allgather_base(bits, source), finish)
    return _given_back(pending, async_op)


def reduce_scatter_into(
    output: Tensor, tensor: Tensor, axis: Axis, *, shares: Tensor | None = None, async_op: bool = False
) -> Pending | None:
    """Write this rank's share of the sum of all ranks' tensors: of tensor[r], for r the rank in the group.

    tensor: [n, *output.shape], contiguous.   output: contiguous.
    shares: memory like `tensor` that gloo may use until the end, if there are more than two ranks.
    Returns: None, or with async_op what must be waited for before `output` is read or `tensor` is written.
    """
    here = context.world()
    if len(here.groups.ranks(axis)) == 1 or tensor.numel() == 0:
        output.copy_(tensor.detach().sum(0))
        return None
    source = tensor.detach().contiguous()
    if tensor.is_cuda and here.devices.has_nccl:
        target = output.detach()
        pending = _start(
            here,
            axis,
            "reduce_scatter",
            source,
            lambda group: group._reduce_scatter_base(target, source, dist.ReduceScatterOptions()),
        )
        return _given_back(pending, async_op)
    # gloo has none that moves only what is needed: exchange the shares, add here
    if len(here.groups.ranks(axis)) == 2:
        return _given_back(_add_other_half(output.detach(), source, axis), async_op)
    received = torch.empty_like(source) if shares is None else shares
    exchange = all_to_all_into(received, source, axis, async_op=True)
    assert exchange is not None
    exchange.then(lambda: _sum_in_order(received, output.detach()))
    return _given_back(exchange, async_op)


def _add_other_half(output: Tensor, halves: Tensor, axis: Axis) -> Pending:
    """Start to fill `output` with the sum of this rank's half and the one that the other of two ranks has for it."""
    own = context.world().coordinates.position(axis)
    sizes = [0, 0]
    sizes[1 - own] = output.numel()
    exchange = all_to_all_into(output, halves[1 - own], axis, sizes, sizes, async_op=True)
    assert exchange is not None
    exchange.then(lambda: output.add_(halves[own]))
    return exchange


def all_reduce_in_order(flat: Tensor, axis: Axis, async_op: bool = False) -> Pending | None:
    """Sum like `all_reduce`, with the very rounding of `reduce_scatter_into`: terms are added in rank order.

    On gloo; with two ranks there is only one order. NCCL has orders of its own.
    flat: contiguous, [n * k] for a group of n ranks.
    """
    here = context.world()
    num_ranks = len(here.groups.ranks(axis))
    if num_ranks <= 2 or flat.numel() == 0 or (flat.is_cuda and here.devices.has_nccl):
        return all_reduce(flat, axis, async_op=async_op)
    source = flat.detach().view(num_ranks, -1)
    received = torch.empty_like(source)
    exchange = all_to_all_into(received, source, axis, async_op=True)
    assert exchange is not None

    def finish() -> None:
        _sum_in_order(received, source[here.coordinates.position(axis)])
        all_gather_in_place(flat, axis)

    exchange.then(finish)
    return _given_back(exchange, async_op)


def all_gather_in_place(flat: Tensor, axis: Axis) -> None:
    """Give every rank all slices of a flat tensor of which it has one: rank r's is the r-th.

    flat: contiguous, [n * k] for a group of n ranks.
    """
    here = context.world()
    ranks = here.groups.ranks(axis)
    if not flat.numel():
        return
    slices = flat.detach().view(len(ranks), -1)
    if flat.is_cuda and here.devices.has_nccl:
        all_gather_into(slices, slices[here.coordinates.position(axis)], axis)
        return
    for rank, piece in enumerate(slices):  # gloo moves bytes in one direction at a time twice as fast as in both
        broadcast_tensor(piece, axis, rank)


def _sum_in_order(terms: Tensor, output: Tensor) -> None:
    """Add terms[0], terms[1], ... one after the other, whatever their number."""
    torch.add(terms[0], terms[1], out=output)
    for term in terms[2:]:
        output.add_(term)


def all_to_all_into(
    output: Tensor,
    tensor: Tensor,
    axis: Axis,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Send a piece of a tensor to each rank of the group and collect the pieces sent here, in rank order.

    output_sizes, input_sizes: elements of each rank's piece; None cuts into equal pieces.
    output, tensor: contiguous.
    Returns: None, or with async_op what must be waited for before `output` is read or `tensor` is written.
    """
    here = context.world()
    if len(here.groups.ranks(axis)) == 1 or (tensor.numel() == 0 and output.numel() == 0):
        output.view(-1).copy_(tensor.detach().reshape(-1))
        return None
    source = _bits(_to_host(here, tensor.detach().contiguous()))
    carrier, finish = _result(here, output)
    bits = _bits(carrier)
    item = tensor.element_size()
    to_here = [size * item for size in output_sizes or ()]
    from_here = [size * item for size in input_sizes or ()]
    pending = _start(
        here, axis, "all_to_all", bits, lambda group: group.alltoall_base(bits, source, to_here, from_here), finish
    )
    return _given_back(pending, async_op)


def barrier(axis: Axis = "world", timeout_s: float | None = None) -> None:
    """Return when every rank of the group has called it.

    timeout_s: bound of this wait, if it isn't that of all waits.
    Raises: CommunicationTimeout naming the ranks that have not come.
    """
    here = context.world()
    if len(here.groups.ranks(axis)) == 1:
        return
    token = torch.zeros(1, dtype=torch.int32)
    with here.board.bounded(timeout_s):
        options = dist.AllreduceOptions()
        _start(here, axis, "barrier", token, lambda group: group.allreduce([token], options)).wait()


def _start(
    here: context.World,
    axis: Axis,
    name: str,
    carrier: Tensor,
    start: Callable[[dist.ProcessGroup], dist.Work],
    finish: Callable[[], object] | None = None,
) -> Pending:
    here.board.raise_if_failed()
    ranks = here.groups.ranks(axis)
    doing = f"{name} over {axis}, call {here.groups.count_call(axis)}"
    try:
        work = start(here.groups.process_group(axis))
    except RuntimeError as error:
        here.board.raise_comm_error(error, ranks=ranks, doing=doing)
    return Pending(work, here, doing, ranks, finish, on_device=carrier.is_cuda)


def _given_back(pending: Pending, async_op: bool) -> Pending | None:
    if async_op:
        return pending
    pending.wait()
    return None


def _carrier(here: context.World, tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
    """Return a contiguous tensor that the backend can work on, and how its result gets back."""
    target = tensor.detach()
    carrier = _to_host(here, target.contiguous())
    if carrier is target:
        return carrier, None
    if carrier.data_ptr() == target.data_ptr() and carrier.device == target.device:
        return carrier, None
    return carrier, lambda: target.copy_(carrier)


def _result(here: context.World, output: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
    """Return the tensor that a backend writes a result into, and how it gets to where it belongs."""
    target = output.detach()
    if target.is_cuda and not here.devices.has_nccl:
        carrier = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        return carrier, lambda: target.copy_(carrier)
    return target, None


def _to_host(here: context.World, tensor: Tensor) -> Tensor:
    if tensor.is_cuda and not here.devices.has_nccl:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor: backends don't know every dtype, and needn't to move it."""
    return tensor.view(-1).view(torch.uint8)
