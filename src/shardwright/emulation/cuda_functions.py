"""What the functions of `torch.cuda` answer when CUDA is emulated: each public name is one of that module's.

There are as many devices as the launcher started processes on this host. Nothing runs asynchronously, so streams and
events have nothing to wait for. Memory statistics are those of this process. Seeds and random states are kept and given back,
but nothing draws from them: random numbers come from the CPU's generator, as in a run on the CPU.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch

_current = 0
_generator = torch.Generator()


def _index(device: Any) -> int:
    if device is None:
        return _current
    if isinstance(device, int):
        return _current if device < 0 else device
    found = torch.device(device).index
    return _current if found is None else found


# -- devices


def is_available() -> bool:
    return True


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def device_count() -> int:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def current_device() -> int:
    return _current


def set_device(device: Any) -> None:
    global _current
    _current = _index(device)


class device:
    """Context manager that changes the current device."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = _current
        set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Context manager that changes the current device to a tensor's: it stays as it is, for tensors are on the CPU."""

    def __init__(self, obj: Any) -> None:
        super().__init__(None)


class _Properties:
    name = "emulated CUDA device (CPU)"
    major, minor = 8, 0
    multi_processor_count = os.cpu_count() or 1
    warp_size = 32
    is_integrated = is_multi_gpu_board = 0

    @property
    def total_memory(self) -> int:
        return mem_get_info()[1]

    def __repr__(self) -> str:
        return f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor})"


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties()


def get_device_name(device: Any = None) -> str:
    return _Properties.name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return _Properties.major, _Properties.minor


def get_arch_list() -> list[str]:
    return []


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    return True


def init() -> None:
    pass


def synchronize(device: Any = None) -> None:
    pass


def ipc_collect() -> None:
    pass


def utilization(device: Any = None) -> int:
    return 0


def is_current_stream_capturing() -> bool:
    return False


# -- memory: that of this process, in bytes


def memory_allocated(device: Any = None) -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return max_memory_allocated()


def max_memory_allocated(device: Any = None) -> int:
    """The most since the process began; it can't be reset."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    now, most = memory_allocated(), max_memory_allocated()
    parts = {"current": now, "peak": most, "allocated": most, "freed": most - now}
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    stats = {f"{kind}.all.{part}": number for kind in kinds for part, number in parts.items()}
    return OrderedDict(stats, num_ooms=0, num_alloc_retries=0)


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, number in memory_stats().items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = number
    return nested


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    mib = 1 << 20
    return (
        f"{_Properties.name}: this process holds {memory_allocated() / mib:.0f} MiB of host memory, at most"
        f" {max_memory_allocated() / mib:.0f} MiB"
    )


def memory_snapshot(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def mem_get_info(device: Any = None) -> tuple[int, int]:
    page_bytes = resource.getpagesize()
    total = os.sysconf("SC_PHYS_PAGES") * page_bytes
    free = os.sysconf("SC_AVPHYS_PAGES") * page_bytes if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    return free, total


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


empty_cache = reset_peak_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = _nothing
reset_accumulated_memory_stats = set_per_process_memory_fraction = _nothing


# -- seeds


def manual_seed(seed: int) -> None:
    _generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    _generator.seed()


seed_all = seed


def initial_seed() -> int:
    return _generator.initial_seed()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return _generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    # One saved on a real device has another form; nothing draws from it anyway.
    if new_state.shape == _generator.get_state().shape:
        _generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state() for _ in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for new_state in new_states:
        set_rng_state(new_state)


# -- streams and events


class Stream:
    """Everything that was given to it has run."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", _index(device))
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


ExternalStream = Stream
_default = Stream(0)


class Event:
    """A moment; `elapsed_time` is the wall clock's, in milliseconds."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: Any):
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        if self._at_s is None or end_event._at_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at_s - self._at_s) * 1000


def stream(stream: Any) -> Any:
    return nullcontext()


def current_stream(device: Any = None) -> Stream:
    return _default


default_stream = current_stream


def set_stream(stream: Any) -> None:
    pass
