"""Degrees and a placement string, turned into every rank's coordinates and groups. Pure arithmetic.

The rule: in a placement string the right-most letter varies fastest with the global rank; for `XYZ`,
`rank = (x * |Y| + y) * |Z| + z`. `D` stands for reduced data parallelism (rdp), `P` for pp, `T` for tp.
The rank inside a group is its position in the group's ascending list of global ranks.

With sharded data parallelism of degree d the rdp coordinate is `replica * d + shard`: neighbours share a model, and ranks at
the same place of different shard groups hold the same shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from shardwright.errors import ConfigError

Axis = Literal["pp", "tp", "rdp", "dp", "mp", "world", "shard", "replica"]

AXES: Final[tuple[Axis, ...]] = get_args(Axis)

_LETTERS: Final[dict[Axis, str]] = {
    "pp": "P", "tp": "T", "rdp": "RS", "dp": "RST", "mp": "PT", "world": "RSPT", "shard": "S", "replica": "R",
}  # fmt: skip
"""For each axis the letters that vary inside one of its groups; the others are fixed. R and S are the two parts of D."""

_NAMED_PLACEMENTS: Final = {"cluster": "DPT", "spread": "TPD"}


def placement_letters(placement: str) -> str:
    """Return the three letters of a placement, slowest first.

    placement: "cluster" (DPT), "spread" (TPD) or a permutation of D, P and T, in any case.
    Raises: ConfigError for anything else.
    """
    letters = _NAMED_PLACEMENTS.get(placement.lower(), placement.upper())
    if sorted(letters) != ["D", "P", "T"]:
        raise ConfigError(
            f"'placement_strategy' is {placement!r}, expected 'cluster', 'spread' or an order of D, P and T",
            remedy="one of cluster, spread, DPT, DTP, PDT, PTD, TDP, TPD",
        )
    return letters


@dataclass(frozen=True)
class Degrees:
    """Sizes of the three independent axes; their product is the number of processes.

    sdp: how many ranks of rdp share one copy of the parameters.
    """

    pp: int
    tp: int
    rdp: int
    sdp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in (("pp", self.pp), ("tp", self.tp), ("rdp", self.rdp), ("sdp", self.sdp)):
            if degree < 1:
                raise ConfigError(f"the {axis} degree is {degree}, expected at least 1")
        if self.rdp % self.sdp:
            raise ConfigError(f"the sdp degree is {self.sdp}, expected a divisor of the rdp degree, {self.rdp}")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.tp * self.rdp

    @staticmethod
    def of_world(world_size: int, *, pp: int, tp: int, sdp: int = 1) -> Degrees:
        """Return the degrees of a world: what pp and tp don't use is rdp.

        Raises: ConfigError if pp * tp does not divide the number of processes, or sdp what is left.
        """
        if pp < 1 or tp < 1 or world_size % (pp * tp):
            raise ConfigError(
                f"pipeline_parallel_degree {pp} x tensor_parallel_degree {tp} = {pp * tp} "
                f"does not divide the number of processes, {world_size}",
                remedy=f"start a multiple of {pp * tp} processes, or change the degrees",
            )
        return Degrees(pp=pp, tp=tp, rdp=world_size // (pp * tp), sdp=sdp)


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands: its position in each of its groups."""

    rank: int
    pp: int
    tp: int
    rdp: int
    dp: int
    mp: int
    shard: int = 0
    replica: int = 0

    def position(self, axis: Axis) -> int:
        """Return the rank inside the group of an axis."""
        return self.rank if axis == "world" else int(getattr(self, axis))

    def __str__(self) -> str:
        return f"world rank {self.rank} (pp {self.pp}, tp {self.tp}, rdp {self.rdp})"


class RankTable:
    """Coordinates and groups of all ranks; nothing is stored, every answer is computed.

    degrees: sizes of the axes.   placement: see `placement_letters`.
    """

    def __init__(self, degrees: Degrees, placement: str = "cluster") -> None:
        self.degrees = degrees
        self.letters = placement_letters(placement)
        self._order = self.letters.replace("D", "RS")
        self._sizes = {"P": degrees.pp, "T": degrees.tp, "R": degrees.rdp // degrees.sdp, "S": degrees.sdp}
        self._strides: dict[str, int] = {}
        stride = 1
        for letter in reversed(self._order):
            self._strides[letter] = stride
            stride *= self._sizes[letter]
        self._sizes["D"], self._strides["D"] = degrees.rdp, self._strides["S"]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.degrees.world_size

    def size(self, axis: Axis) -> int:
        """Return the number of ranks in each group of an axis."""
        size = 1
        for letter in _LETTERS[axis]:
            size *= self._sizes[letter]
        return size

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank.

        Raises: IndexError if there is no such rank.
        """
        self._check(rank)
        strides, sizes = self._strides, self._sizes
        pp = rank // strides["P"] % sizes["P"]
        tp = rank // strides["T"] % sizes["T"]
        rdp = rank // strides["D"] % sizes["D"]
        return Coordinates(
            rank=rank,
            pp=pp,
            tp=tp,
            rdp=rdp,
            dp=rdp * sizes["T"] + tp if strides["D"] >= strides["T"] else tp * sizes["D"] + rdp,
            mp=pp * sizes["T"] + tp if strides["P"] >= strides["T"] else tp * sizes["P"] + pp,
            shard=rdp % sizes["S"],
            replica=rdp // sizes["S"],
        )

    def rank_at(self, *, pp: int, tp: int, rdp: int) -> int:
        """Return the global rank that stands at three coordinates.

        Raises: IndexError if a coordinate is out of range.
        """
        digits = {"P": pp, "T": tp, "D": rdp}
        for letter, digit in digits.items():
            if not 0 <= digit < self._sizes[letter]:
                raise IndexError(f"no rank at pp {pp}, tp {tp}, rdp {rdp}: the degrees are {self.degrees}")
        return sum(digit * self._strides[letter] for letter, digit in digits.items())

    def group(self, axis: Axis, rank: int) -> list[int]:
        """Return the ascending global ranks of the group of `axis` that holds `rank`."""
        self._check(rank)
        base = rank - sum(self._digit(rank, letter) * self._strides[letter] for letter in _LETTERS[axis])
        return [base + offset for offset in self._offsets(_LETTERS[axis])]

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return all groups of an axis, in the order of their lowest ranks; each rank is in exactly one."""
        fixed = "".join(letter for letter in "RSPT" if letter not in _LETTERS[axis])
        offsets = list(self._offsets(_LETTERS[axis]))
        return [[base + offset for offset in offsets] for base in self._offsets(fixed)]

    def _digit(self, rank: int, letter: str) -> int:
        return rank // self._strides[letter] % self._sizes[letter]

    def _offsets(self, varying: str) -> Iterator[int]:
        """Yield, ascending, what the given letters add to a rank at which they are all zero."""
        offsets = [0]
        for letter in self._order:  # slowest first, so that the products come out ascending
            if letter in varying:
                stride = self._strides[letter]
                offsets = [base + digit * stride for base in offsets for digit in range(self._sizes[letter])]
        yield from offsets

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"there is no rank {rank} in a world of {self.world_size}")
