"""Which random state a rank goes on with.

With the same layout its own. With another one:

- A rank whose place (pp, tp, rdp) was there before takes the state of that place.
- A rank beyond a degree of the saved layout takes the state of position 0 on that axis. Where the saved ranks differed along
  the axis, as when every replica draws its own dropout masks, so must the new one: then it gets streams of its own, derived
  from that state and its position. Where they were alike, as when every replica shuffles the same list, the new one is like
  them. That is judged for each generator by itself, from positions 0 and 1; a degree of 1 counts as alike.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint import choice, integrity, layout, random_state, safe_loading
from shardwright.checkpoint.choice import Choice
from shardwright.checkpoint.layout import Layout
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError
from shardwright.topology.ranks import Coordinates, Degrees, RankTable
from shardwright.topology.rng import RngState, derive_seed

Unpacked = tuple[RngState, dict[str, int]]
"""What `random_state.unpack` returns."""


@dataclass(frozen=True)
class Source:
    """Where a rank's state comes from.

    rank: of the saved world.   neighbours: for each axis on which this rank stands beyond the saved degree, and that was
        larger than 1: the saved rank one position further, and this rank's position.
    """

    rank: int
    neighbours: tuple[tuple[int, int], ...] = ()

    def ranks(self) -> list[int]:
        """The saved ranks whose states are read, the rank's own first."""
        return [self.rank, *(rank for rank, _ in self.neighbours)]

    def files(self) -> list[str]:
        """Their files in a partial checkpoint."""
        return [layout.rng_file(rank) for rank in self.ranks()]


def source(saved: Layout, at: Coordinates) -> Source:
    """Whose state the rank at these coordinates takes. Pure."""
    degrees = {"pp": saved.pp, "tp": saved.tp, "rdp": saved.rdp}
    table = RankTable(Degrees(**degrees, sdp=saved.sharded_data_parallel_degree), saved.placement)
    place = {axis: getattr(at, axis) if getattr(at, axis) < size else 0 for axis, size in degrees.items()}
    neighbours = tuple(
        (table.rank_at(**{**place, axis: 1}), getattr(at, axis))
        for axis, size in degrees.items()
        if getattr(at, axis) >= size > 1
    )
    return Source(table.rank_at(**place), neighbours)


def joined(own: RngState, neighbours: Sequence[tuple[RngState, int]]) -> RngState:
    """The state of a rank with this source: `own`, except for generators that differ from a neighbour's."""
    changed: dict[str, Any] = {}
    for entry in fields(RngState):
        value = getattr(own, entry.name)
        positions = [at for state, at in neighbours if _digest(getattr(state, entry.name)) != _digest(value)]
        if positions and value is not None:
            changed[entry.name] = _START[entry.name](derive_seed(_digest(value), *positions))
    return replace(own, **changed)


def read(chosen: Choice, where: Source, *, trust: bool) -> Unpacked:
    """Read the random state of this rank from a partial checkpoint, whole or with an error."""
    return combined(where, [_read(chosen, name, trust=trust) for name in where.files()])


def read_full(file: Place, where: Source, *, trust: bool) -> Unpacked:
    """The same from a full checkpoint, of which one file has the states of all ranks."""
    try:
        content = safe_loading.read_file(file, trust=trust, mmap=False)
        return combined(where, [random_state.unpack(content[rank]) for rank in where.ranks()])
    except (OSError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.name} doesn't hold the random state of this rank: {error!r}", where=str(file)) from error


def combined(where: Source, found: Sequence[Unpacked]) -> Unpacked:
    """What a rank goes on with. found: the states of `where.ranks()`."""
    neighbours = [(state, at) for (state, _), (_, at) in zip(found[1:], where.neighbours, strict=True)]
    return joined(found[0][0], neighbours), found[0][1]


def _read(chosen: Choice, name: str, *, trust: bool) -> Unpacked:
    if name not in chosen.manifest.files:
        raise CheckpointError(f"the manifest of {chosen.folder.name!r} lists no {name}")
    problems = integrity.check_files(chosen.folder, chosen.manifest, [name], checksums=True)
    if problems:
        raise CheckpointError(choice.shortened(list(map(str, problems))), where=str(chosen.folder))
    try:
        return random_state.unpack(safe_loading.read_file(chosen.files / name, trust=trust))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{name} doesn't hold a random state: {error!r}", where=str(chosen.folder)
        ) from error


def _digest(value: Any) -> str:
    return hashlib.blake2b(pickle.dumps(_plain(value)), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Equal for equal values: arrays and tensors as bytes."""
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in sorted(value.items())]
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _numpy(seed: int) -> Any:
    return np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)


def _torch(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _cuda(seed: int) -> torch.Tensor:
    """A CUDA generator's state is its seed and an offset, 8 bytes each."""
    return torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8)


_START: dict[str, Callable[[int], Any]] = {
    "python": lambda seed: random.Random(seed).getstate(),
    "numpy": _numpy,
    "torch_cpu": _torch,
    "torch_cuda": _cuda,
}
