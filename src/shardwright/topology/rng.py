"""Random streams: derived seeds, the state of all generators, and running code on a stream of its own.

The generators are those that ordinary code draws from without naming one: Python's `random`, NumPy's legacy
functions (if NumPy is imported), torch's CPU generator, and the current CUDA device's (if CUDA is in use).
Several times per microbatch the pipeline leaves them for a derived stream and comes back, so `forked` avoids
what is slow: NumPy's state is not copied, its bit generator is exchanged.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, ClassVar

import torch

_SEED_BITS = 63
_MT19937_BYTES = 624 * 4 + 4  # the key and the position in it


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else: neither process nor run.

    parts: what names the stream, such as (seed, "unit", step, microbatch, entry).
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


@dataclass(frozen=True)
class RngState:
    """The states of all generators at one moment; `None` where there was none. Can be pickled."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None


def capture() -> RngState:
    """Return the state of all generators (about 50 us)."""
    numpy = _numpy()
    cuda = _cuda_generator()
    return RngState(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(legacy=False),
        torch_cpu=torch.default_generator.get_state(),
        torch_cuda=None if cuda is None else cuda.get_state(),
    )


def restore(state: RngState) -> None:
    """Bring all generators back to a captured state. One that the state doesn't know is left alone."""
    random.setstate(state.python)
    numpy = _numpy()
    if numpy is not None and state.numpy is not None:
        numpy.random.set_state(state.numpy)
    torch.default_generator.set_state(state.torch_cpu)
    cuda = _cuda_generator()
    if cuda is not None and state.torch_cuda is not None:
        cuda.set_state(state.torch_cuda)


def seed_all(seed: int) -> None:
    """Start all generators anew from one seed."""
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    cuda = _cuda_generator()
    if cuda is not None:
        cuda.manual_seed(seed)


class forked:
    """Run a block on streams derived from `seed`; afterwards all generators are exactly where they were.

    Called by: the pipeline around every unit call (about 25 us). Blocks may nest; not for use by several
    threads at one time, since the generators belong to the whole process.
    """

    __slots__ = ("_cuda", "_cuda_state", "_numpy", "_python", "_seed", "_torch")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        seed = self._seed
        self._python = random.getstate()
        random.seed(seed)
        self._torch = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        self._numpy = _NumpyFork(seed) if "numpy" in sys.modules else None
        self._cuda = _cuda_generator()
        if self._cuda is not None:
            self._cuda_state = self._cuda.get_state()
            self._cuda.manual_seed(seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        if self._numpy is not None:
            self._numpy.undo()
        if self._cuda is not None:
            self._cuda.set_state(self._cuda_state)


class torch_forked:
    """Run a block on torch streams derived from `seed`; Python's and NumPy's are not touched (about 3 us)."""

    __slots__ = ("_cuda", "_cuda_state", "_seed", "_state")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        generator = torch.default_generator
        self._state = generator.get_state()
        generator.manual_seed(self._seed)
        self._cuda = _cuda_generator()
        if self._cuda is not None:
            self._cuda_state = self._cuda.get_state()
            self._cuda.manual_seed(self._seed)

    def __exit__(self, *exc: object) -> None:
        torch.default_generator.set_state(self._state)
        if self._cuda is not None:
            self._cuda.set_state(self._cuda_state)


class _NumpyFork:
    """NumPy's legacy functions on another bit generator until `undo`.

    Exchanging the bit generator costs 1 us, copying its state 70 us. But the exchange forgets the second half
    of the last pair of normal numbers, if that was still to be handed out; so that half is drawn before, and
    put back after. Drawing it leaves the bit generator alone exactly when it was there.
    """

    __slots__ = ("_held", "_mine", "_pending", "_theirs")

    _spare: ClassVar[list[Any]] = []  # bit generators to use again: making one costs 90 us

    def __init__(self, seed: int) -> None:
        numpy_random = sys.modules["numpy"].random
        self._theirs = numpy_random.get_bit_generator()
        self._pending: float | None = None
        self._held: dict[str, Any] | None = None
        if isinstance(self._theirs, numpy_random.MT19937):
            address = self._theirs.ctypes.state_address
            before = ctypes.string_at(address, _MT19937_BYTES)
            pending = numpy_random.standard_normal()
            if ctypes.string_at(address, _MT19937_BYTES) == before:
                self._pending = pending
            else:
                ctypes.memmove(address, before, _MT19937_BYTES)
        else:  # the user put in another kind: the slow way is right for any
            self._held = numpy_random.get_state(legacy=False)
        self._mine = self._spare.pop() if self._spare else numpy_random.MT19937(0)
        numpy_random.set_bit_generator(self._mine)
        numpy_random.seed(seed & 0xFFFFFFFF)

    def undo(self) -> None:
        numpy_random = sys.modules["numpy"].random
        numpy_random.set_bit_generator(self._theirs)
        self._spare.append(self._mine)
        if self._held is not None:
            numpy_random.set_state(self._held)
        elif self._pending is not None:
            numpy_random.set_state(
                {**numpy_random.get_state(legacy=False), "has_gauss": 1, "gauss": self._pending}
            )


def _numpy() -> ModuleType | None:
    return sys.modules.get("numpy")


def _cuda_generator() -> torch.Generator | None:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]
