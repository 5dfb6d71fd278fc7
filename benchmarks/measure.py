"""What is measured inside a row: peak memory, timed steps, and what else the machine did meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Give freed memory back to the system and start a new peak."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:  # another C library
        pass
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most resident memory since the last `reset_peak`."""
    return _status_bytes("VmHWM")


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has spent, stolen time included."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(limit_cores: float = 0.15, most_s: float = 15.0) -> None:
    """Return when the machine was quiet for a second, at the latest after `most_s`."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        before = machine_cpu_s()
        time.sleep(1)
        if machine_cpu_s() - before < limit_cores:
            return


def timed_steps(step: Callable[[], float | None], num_steps: int, *, warm_up: int = 2) -> dict[str, Any]:
    """Run warm-up steps and then timed ones, with a barrier around each.

    step: runs one training step and returns its loss, or None on ranks that don't know it.
    Returns: "steps", a list of {seconds, own CPU seconds, CPU seconds of the machine}; "loss" of the first
    step; "peak_bytes" of the timed steps.
    """
    import torch.distributed as dist

    def barrier() -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    loss = step()
    for _ in range(warm_up - 1):
        step()
    reset_peak()
    steps = []
    for _ in range(num_steps):
        barrier()
        machine, own, start = machine_cpu_s(), time.process_time(), time.perf_counter()
        step()
        barrier()
        seconds, own = time.perf_counter() - start, time.process_time() - own
        steps.append({"s": seconds, "cpu_s": own, "machine_s": machine_cpu_s() - machine})
    result: dict[str, Any] = {"steps": steps, "peak_bytes": peak_bytes()}
    return result if loss is None else {**result, "loss": float(loss)}


def provenance() -> list[str]:
    """Lines that say where figures come from: commit, hardware, versions, command."""
    import torch

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].split(":")[1].strip() if models else platform.processor()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return [
        f"commit {git('rev-parse', '--short=12', 'HEAD')}{changed}",
        f"hardware {os.cpu_count()} cores ({cpu}), {memory_gb:.0f} GB memory",
        f"versions Python {platform.python_version()}, PyTorch {torch.__version__}, {platform.system()}",
        "command python " + " ".join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    ]


class ExtraMemory:
    """Within `with`: the most anonymous and shared memory that this process and its children hold beyond what they held at
    the beginning, in bytes; looked at every 20 ms. Mapped files don't count.
    """

    def __enter__(self) -> ExtraMemory:
        self.extra_bytes = 0
        self._before = _held_bytes(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.extra_bytes = max(self.extra_bytes, _held_bytes(os.getpid()) - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _held_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        children = [c for task in Path(f"/proc/{process}/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return 0
    own = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return own + sum(_held_bytes(int(child)) for child in children)


def drop_from_cache(folder: Path) -> None:
    """Make the next reads of a folder's files cold, as far as this system goes; a host may still have them."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
