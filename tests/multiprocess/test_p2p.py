"""Tensors from rank to rank: every form, order, channels, many at a time."""

from __future__ import annotations

import pytest
import torch

from harness import RankPool
from shardwright.errors import ShapeError, UsageError
from shardwright.topology import accessors
from shardwright.transport import collectives, p2p

CONFIG = {"pipeline_parallel_degree": 2, "log_level": "warning", "timeout_s": 30}
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]


def tensors() -> list[torch.Tensor]:
    """Return the same tensors on every rank."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for dtype in DTYPES:
        for shape in [(), (0,), (1,), (3, 0, 2), (4, 5, 6)]:
            made.append(torch.randn(shape, generator=generator).mul(3).to(dtype))
    base = torch.arange(120.0).view(2, 3, 4, 5)
    made += [
        base.transpose(1, 3),
        base.permute(3, 0, 2, 1),
        base.contiguous(memory_format=torch.channels_last),
        base[:, 1:],
        base[..., ::2],
        base[1, 1],
        torch.ones(1, 4).expand(3, 4),
        torch.nn.Parameter(torch.ones(3)),
        torch.tensor([1 + 2j]).conj().resolve_conj(),
    ]
    return made


def send_every_form() -> None:
    specs = [p2p.TensorSpec.of(tensor) for tensor in tensors()]
    if accessors.rank() == 0:
        p2p.reap([p2p.isend(tensor, 1, 0) for tensor in tensors()])
        return
    receiving = [p2p.irecv(spec, 0, 0) for spec in specs]
    for tensor, spec, received in zip(tensors(), specs, receiving, strict=True):
        other = received.wait()
        assert received.wait() is other
        assert other.dtype == tensor.dtype
        assert other.stride() == spec.strides
        if p2p.is_dense(tensor):
            assert other.stride() == tensor.stride()
        else:
            assert other.is_contiguous()
        assert torch.equal(other, tensor)


def test_tensors_of_every_form(pool2: RankPool) -> None:
    pool2.run(send_every_form, config=CONFIG)


def send_in_order_on_channels() -> None:
    order = [(channel, number) for number in range(5) for channel in (3, 1, 7)]
    if accessors.rank() == 0:
        p2p.reap([p2p.isend(torch.tensor([100 * channel + number]), 1, channel) for channel, number in order])
        return
    spec = p2p.TensorSpec((1,), (1,), torch.int64)
    for channel in (7, 3, 1):  # another order of channels than they were sent in
        got = [p2p.irecv(spec, 0, channel).wait().item() for _ in range(5)]
        assert got == [100 * channel + number for number in range(5)]


def test_channels_do_not_wait_for_each_other(pool2: RankPool) -> None:
    pool2.run(send_in_order_on_channels, config=CONFIG)


def exchange_both_ways() -> None:
    rank = accessors.rank()
    other = 1 - rank
    for size in (10, 1 << 18):
        sent = [p2p.isend(torch.full((size,), float(rank + k)), other, k) for k in range(4)]
        for k in range(4):
            got = p2p.irecv(p2p.TensorSpec((size,), (1,), torch.float32), other, k).wait()
            assert torch.equal(got, torch.full((size,), float(other + k)))
        p2p.reap(sent)
        assert sent == []


def test_both_directions_at_once(pool2: RankPool) -> None:
    pool2.run(exchange_both_ways, config=CONFIG)


def receive_into_a_tensor() -> None:
    if accessors.rank() == 0:
        p2p.isend(torch.arange(6.0), 1, 0).wait()
        return
    buffer = torch.zeros(2, 6)
    assert p2p.irecv(buffer[1], 0, 0).wait().data_ptr() == buffer[1].data_ptr()
    assert torch.equal(buffer[1], torch.arange(6.0))
    assert not buffer[0].any()
    with pytest.raises(ShapeError, match="gaps or overlaps"):
        p2p.irecv(buffer[:, ::2], 0, 0)


def test_receiving_into_a_tensor(pool2: RankPool) -> None:
    pool2.run(receive_into_a_tensor, config=CONFIG)


def talk_to_nobody() -> None:
    for rank in (accessors.rank(), 2, -1):
        with pytest.raises(UsageError, match=f"can't exchange a message with rank {rank}"):
            p2p.isend(torch.ones(1), rank, 0)


def test_ranks_that_do_not_exist_are_refused(pool2: RankPool) -> None:
    pool2.run(talk_to_nobody, config=CONFIG)


def use_collectives() -> None:
    rank, size = accessors.rank(), accessors.size()
    strided = torch.zeros(4, 3).t()
    strided += rank
    collectives.all_reduce(strided, "world")
    assert torch.equal(strided, torch.full((3, 4), float(sum(range(size)))))
    biggest = torch.tensor([rank], dtype=torch.int64)
    collectives.all_reduce(biggest, "world", op="max")
    assert biggest.item() == size - 1
    complex_sum = torch.tensor([rank * 1j])
    collectives.all_reduce(complex_sum, "world")
    assert complex_sum.item() == sum(range(size)) * 1j
    first, second = torch.ones(3), torch.ones(3) * 2
    pending = [collectives.all_reduce(tensor, "pp", async_op=True) for tensor in (first, second)]
    for each in pending:
        assert each is not None
        each.wait()
        each.wait()
    assert (first[0].item(), second[0].item()) == (accessors.pp_size(), 2 * accessors.pp_size())
    for dtype in DTYPES:
        tensor = torch.full((2, 3), rank + 1).to(dtype).t()
        collectives.broadcast_tensor(tensor, "world", src_group_rank=1)
        assert torch.equal(tensor, torch.full((3, 2), 2).to(dtype))
        gathered = collectives.all_gather(torch.full((2,), rank).to(dtype), "world")
        assert all(torch.equal(t, torch.full((2,), r).to(dtype)) for r, t in enumerate(gathered))
    share = collectives.reduce_scatter(torch.arange(2.0 * size), "world")
    assert torch.equal(share, size * torch.arange(2.0 * rank, 2.0 * rank + 2))
    collectives.barrier("pp")
    collectives.barrier("world", timeout_s=20)


def test_collectives(pool4: RankPool) -> None:
    pool4.run(use_collectives, config={**CONFIG, "ddp": True})


def time_small_messages() -> float:
    from time import perf_counter

    count, spec = 300, p2p.TensorSpec((16,), (1,), torch.float32)
    best = float("inf")
    for _ in range(5):
        collectives.barrier()
        began = perf_counter()
        if accessors.rank() == 0:
            p2p.reap([p2p.isend(torch.zeros(16), 1, 0) for _ in range(count)])
        else:
            for received in [p2p.irecv(spec, 0, 0) for _ in range(count)]:
                received.wait()
        best = min(best, (perf_counter() - began) / count)
    return best


def test_a_small_message_is_cheap(pool2: RankPool) -> None:
    seconds = max(pool2.run(time_small_messages, config=CONFIG))
    print(f"{seconds * 1e6:.0f} us per message")
    assert seconds < 0.01  # about 100 us on an idle machine
