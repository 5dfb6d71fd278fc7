"""Run by `test_emulation` in a process where CUDA is emulated."""

from __future__ import annotations

import io
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp  # noqa: F401  begins the emulation

CUDA = torch.device("cuda", 1)


def test_factories_and_moves() -> None:
    x = torch.randn(3, 4)
    made = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=CUDA, pin_memory=True),
        torch.tensor([1.0], device=0),
        torch.full_like(x, 2.0, device="cuda:1"),
        x.new_zeros(3, device=CUDA),
        torch.arange(3, device=CUDA),
        torch.randperm(4, device="cuda", generator=torch.Generator("cuda").manual_seed(3)),
        x.to("cuda"),
        x.to(CUDA, torch.float16, non_blocking=True),
        x.to(device="cuda", dtype=torch.float64),
        x.to(0),
        x.cuda(),
        x.cuda(1, non_blocking=True),
        x.pin_memory(),
        torch.as_tensor([1], device="cuda"),
        torch.cuda.FloatTensor(2, 2),
        x.type(torch.cuda.HalfTensor),
        x.type("torch.cuda.DoubleTensor"),
    ]
    assert {t.device for t in made} == {torch.device("cpu")}
    assert [t.dtype for t in made[8:10]] == [torch.float16, torch.float64]
    assert [t.dtype for t in made[-2:]] == [torch.float16, torch.float64]
    assert x.to(torch.float64).dtype == torch.float64
    assert x.to("meta").is_meta


def test_modules_and_default_devices() -> None:
    model = nn.Linear(2, 3, device="cuda").to(CUDA).cuda()
    weight = model.weight
    assert model.to(device="cuda", dtype=torch.float64).weight is weight
    with CUDA:
        assert torch.zeros(1).device.type == "cpu"
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        assert nn.Linear(2, 2).weight.is_meta
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_device_functions() -> None:
    torch.cuda.set_device(CUDA)
    assert torch.cuda.current_device() == 1
    with torch.cuda.device("cuda:0"):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.is_bf16_supported()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    with pytest.raises(AttributeError):
        torch.cuda.no_such_name  # noqa: B018


def test_memory_statistics() -> None:
    block = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() >= block.nbytes
    assert torch.cuda.max_memory_allocated(0) >= block.nbytes
    assert torch.cuda.memory_reserved(CUDA) > 0
    assert torch.cuda.memory.memory_stats()["allocated_bytes.all.current"] >= block.nbytes
    assert torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["peak"] > 0
    assert "MiB" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()


def test_seeds_leave_the_stream_of_the_cpu_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    torch.cuda.manual_seed(5)
    torch.cuda.manual_seed_all(6)
    assert torch.cuda.initial_seed() == 6
    state = torch.cuda.get_rng_state()
    torch.cuda.seed_all()
    torch.cuda.set_rng_state(state, CUDA)
    assert torch.equal(torch.cuda.random.get_rng_state_all()[0], state)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    with torch.random.fork_rng():
        torch.rand(1)


def test_autocast() -> None:
    x, layer = torch.ones(2, 4), nn.Linear(4, 4)
    with torch.autocast("cuda"):
        assert layer(x).dtype == torch.float16
        assert torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(value: torch.Tensor) -> torch.Tensor:
        return layer(value)

    assert forward(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_grad_scaler_skips_an_overflow() -> None:
    layer = nn.Linear(2, 1, device="cuda")
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.cuda.amp.GradScaler(init_scale=4.0)
    assert scaler.is_enabled()
    for value, moved in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(layer(torch.full((1, 2), value, device=CUDA)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.weight, before) != moved
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(layer.weight, before - 0.1)


def test_streams_and_events() -> None:
    stream = torch.cuda.Stream(priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        y = torch.ones(10, device="cuda").sum()
        y.record_stream(stream)
    stream.record_event(end)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.default_stream(CUDA).wait_event(end)
    assert end.query()
    assert stream.query()
    assert 0 <= start.elapsed_time(end) < 60_000
    torch.cuda.nvtx.range_push("range")
    torch.cuda.nvtx.range_pop()


def test_files() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0)}, file)
    for place in ("cuda", "cuda:1", CUDA, lambda storage, _: storage.cuda(0), None):
        file.seek(0)
        assert torch.equal(torch.load(file, map_location=place)["a"], torch.arange(3.0))


def test_other_threads_and_recomputation() -> None:
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(torch.zeros(1, device="cuda"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    x = torch.ones(2, 2, requires_grad=True)
    checkpoint(lambda t: t * torch.full((2,), 3.0, device="cuda"), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 3.0))


class _OnDevice(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device="cuda")


def test_data_loaders() -> None:
    loader = torch.utils.data.DataLoader(_OnDevice(), batch_size=2, num_workers=1, pin_memory=True)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_types_stay_what_they_are() -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(CUDA, torch.device)
    assert str(CUDA) == "cuda:1"
    assert torch.zeros(1).is_cuda is False
