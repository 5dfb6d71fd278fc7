"""What each file of a layout holds. Pure.

A job of that layout says it itself when it saves; here it follows from the partition, the cuts of tp ranks, and the pieces
of ranks that share optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint.layout import Layout, StateRole, state_file, writes_state
from shardwright.checkpoint.plan import Box

Span = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """A part of a tensor in a file. box: in the whole tensor; it may be empty."""

    name: str
    box: Box

    @property
    def offset(self) -> tuple[int, ...]:
        """Where it begins."""
        return tuple(start for start, _ in self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dim."""
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Member:
    """A parameter in an optimizer file.

    row: this tp rank's slice of it.   span: of a piece, elements of the slice in the order of memory that `strides` give
    (row-major without); None where all of the slice is there.
    """

    row: Row
    span: Span | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ModelFile:
    """One model file. rank: the world rank that would write it."""

    name: str
    rank: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class OptimizerFile:
    """One optimizer file, and the one with the masters of the same parameters. groups: as in the optimizer."""

    names: Mapping[StateRole, str]
    rank: int
    groups: tuple[tuple[Member, ...], ...]

    @property
    def has_pieces(self) -> bool:
        """Is some parameter there in a piece?"""
        return any(member.span is not None for group in self.groups for member in group)


@dataclass(frozen=True)
class Target:
    """All state files of a layout. partition: as JSON values; None with one stage."""

    layout: Layout
    models: tuple[ModelFile, ...]
    optimizers: tuple[OptimizerFile, ...]
    partition: Mapping[str, Any] | None


@dataclass(frozen=True)
class At:
    """Coordinates of a rank."""

    pp: int
    tp: int
    rdp: int


@dataclass(frozen=True)
class Rules:
    """What decides which part of what is where.

    stage_of: name in the state dict -> its stage.   cut: name, tp rank -> that rank's box.
    shard: name, box, rdp rank -> the box that it has in the model file there (with sharded data parallelism, rows).
    pieces: for a rank, name -> what of its slice the rank updates, for every parameter that is in pieces.
    strides: of parameters that aren't row-major in memory.   rank_at: the world rank that stands somewhere.
    """

    stage_of: Mapping[str, int]
    cut: Callable[[str, int], Box]
    shard: Callable[[str, Box, int], Box]
    pieces: Callable[[At], Mapping[str, Span]]
    strides: Mapping[str, tuple[int, ...]]
    rank_at: Callable[[At], int]


def lay_out(
    layout: Layout,
    names: Sequence[str],
    groups: Sequence[Sequence[str]],
    rules: Rules,
    partition: Mapping[str, Any] | None,
) -> Target:
    """The files of a layout. names: of the state dict, in order.   groups: of the optimizer, whole."""
    models = []
    optimizers = []
    for at in _ranks(layout):
        here = [name for name in names if rules.stage_of[name] == at.pp]
        if writes_state(layout, "model", rdp=at.rdp):
            rows = tuple(Row(name, rules.shard(name, rules.cut(name, at.tp), at.rdp)) for name in here)
            models.append(ModelFile(_file(layout, "model", at), rules.rank_at(at), rows))
        if groups and writes_state(layout, "optimizer", rdp=at.rdp):
            pieces = rules.pieces(at)
            local = tuple(
                tuple(
                    Member(Row(name, rules.cut(name, at.tp)), pieces.get(name), rules.strides.get(name))
                    for name in group
                    if rules.stage_of[name] == at.pp
                )
                for group in groups
            )
            files: dict[StateRole, str] = {role: _file(layout, role, at) for role in ("optimizer", "fp16_states")}
            optimizers.append(OptimizerFile(files, rules.rank_at(at), local))
    return Target(layout, tuple(models), tuple(optimizers), partition)


def _ranks(layout: Layout) -> Iterator[At]:
    return (At(pp, tp, rdp) for pp in range(layout.pp) for tp in range(layout.tp) for rdp in range(layout.rdp))


def _file(layout: Layout, role: StateRole, at: At) -> str:
    return state_file(layout, role, pp=at.pp, tp=at.tp, rdp=at.rdp)
