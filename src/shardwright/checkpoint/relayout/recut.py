"""How tensors were cut over tp ranks, read off a manifest, and how they are cut over another number of ranks. Pure.

Note [Units]: a dim is cut in units - a head, or one row - into ranges that differ by at most one unit, the longer ones first.
The number of ranks that a tensor was saved by doesn't tell the unit, except where ranges differ: then it is the difference.
Newer manifests have the units of every tensor that any degree cuts ("cuts" of `structure`), and all follows from those. Else:
where all are equal, joining neighbours is right for a degree that divides the saved one, whatever the unit is. So it is for
ranges that overlap (key-value heads that several ranks need), if query heads, and with them all else, are cut into equal ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.checkpoint.layout import StateRole, state_file
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.plan import Box, box_of
from shardwright.errors import CheckpointError
from shardwright.sharding.slices import Range, Units, even_ranges, overlapping, scaled_ranges


@dataclass(frozen=True)
class Cut:
    """A tensor of `shape` of which tp rank r has `ranges[r]` of `dim`."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]

    def box(self, rank: int) -> Box:
        """What a rank has."""
        return (
            *((0, size) for size in self.shape[: self.dim]),
            self.ranges[rank],
            *((0, size) for size in self.shape[self.dim + 1 :]),
        )


_WITH_WEIGHTS: tuple[StateRole, ...] = ("model", "optimizer")
"""Files that may hold weights, see `flat_groups`."""


def saved_cuts(manifest: Manifest) -> dict[str, Cut]:
    """Every tensor of the model that tp ranks have slices of."""
    layout = manifest.layout
    if layout.tp == 1 or manifest.kind == "full":
        return {}
    rank_of = {
        state_file(layout, role, pp=pp, tp=tp, rdp=rdp): tp
        for role in _WITH_WEIGHTS
        for pp in range(layout.pp)
        for tp in range(layout.tp)
        for rdp in range(layout.rdp)
    }
    found = {}
    for entry in manifest.entries:
        if entry.role != "model" or not entry.shape:
            continue
        hulls: dict[int, Box] = {}
        for part in entry.slices:
            rank, box = rank_of[part.file], box_of(part.offset, part.shape)
            hulls[rank] = _hull(hulls[rank], box) if rank in hulls else box
        boxes = [hulls[rank] for rank in sorted(hulls)]
        dims = [d for d, size in enumerate(entry.shape) if any(box[d] != (0, size) for box in boxes)]
        if dims and len(boxes) == layout.tp:
            found[entry.name] = Cut(entry.shape, dims[0], tuple(box[dims[0]] for box in boxes))
    return found


def origin_of(manifest: Manifest) -> dict[str, Any] | None:
    """The layout that a job saved, with its partition and cuts: of this checkpoint, or of what it was converted from.

    None for a full one, which has no layout.
    """
    if manifest.converted_from is not None:
        return dict(manifest.converted_from)
    if manifest.kind == "full":
        return None
    cuts = {name: [cut.dim, cut.ranges] for name, cut in saved_cuts(manifest).items()}
    return {"layout": asdict(manifest.layout), "partition": manifest.partition, "cuts": cuts}


def target_cuts(manifest: Manifest, tp: int) -> dict[str, Cut]:
    """What `tp` ranks have slices of: as a job has saved it, else as it follows from that.

    Raises: CheckpointError as `recut`.
    """
    origin = origin_of(manifest)
    if origin is None or tp != origin["layout"]["tp"]:
        told = None if manifest.structure is None else manifest.structure.get("cuts")
        if told:
            return _by_units(manifest, told, tp)
        return recut(saved_cuts(manifest), 1 if manifest.kind == "full" else manifest.layout.tp, tp)
    shapes = manifest.names("model")
    return {
        name: Cut(shapes[name], dim, tuple((start, stop) for start, stop in ranges))
        for name, (dim, ranges) in origin["cuts"].items()
    }


def check_names(manifest: Manifest) -> None:
    """Raise CheckpointError if the structure of the model doesn't say anything about the names that tensors have."""
    if manifest.structure is None:
        return
    missing = {name for name, _, _ in manifest.structure["parameters"]} - manifest.names("model").keys()
    if missing:
        raise CheckpointError(
            "the full checkpoint has the names of the original model, but tensor parallelism has replaced modules of it: "
            f"{min(missing)!r} is only in the running model",
            remedy="convert a partial checkpoint, or a full one that was saved with translate_if_full=False; or resume there directly",
        )


def _by_units(manifest: Manifest, told: Mapping[str, Any], tp: int) -> dict[str, Cut]:
    shapes = manifest.names("model")
    if tp == 1:
        return {}
    check_names(manifest)
    return {
        name: Cut(shapes[name], dim, Units(size, shared_by).ranges(shapes[name][dim], tp))
        for name, (dim, size, shared_by) in told.items()
        if name in shapes
    }


def recut(cuts: Mapping[str, Cut], saved_tp: int, tp: int) -> dict[str, Cut]:
    """The same for `tp` ranks, see Note [Units].

    Raises: CheckpointError naming a tensor for which that doesn't follow.
    """
    if tp == saved_tp:
        return dict(cuts)
    if tp == 1:
        return {}
    if not cuts:
        raise CheckpointError(
            f"nothing of the model is cut over tp ranks, so the checkpoint doesn't tell what tp={tp} would cut",
            remedy="mark the modules with smp.set_tensor_parallelism in the job that saves, whatever its degree; or save one checkpoint"
            " with a job of that layout, and give it as --like PATH/TAG; or resume there directly",
        )
    aligned = all(_unit(cut) in (None, 1) for cut in cuts.values())
    return {name: _recut(name, cut, saved_tp, tp, aligned) for name, cut in cuts.items()}


def _recut(name: str, cut: Cut, saved_tp: int, tp: int, aligned: bool) -> Cut:
    unit = _unit(cut)
    size = cut.shape[cut.dim]
    if unit is not None and not size % unit:
        count = size // unit
        if scaled_ranges(even_ranges(count, saved_tp), unit) == cut.ranges:
            return Cut(cut.shape, cut.dim, scaled_ranges(even_ranges(count, tp), unit))
    elif unit is None and not saved_tp % tp and aligned:
        together = saved_tp // tp
        joined = [cut.ranges[rank * together : (rank + 1) * together] for rank in range(tp)]
        return Cut(cut.shape, cut.dim, tuple((min(a for a, _ in part), max(b for _, b in part)) for part in joined))
    raise CheckpointError(
        f"how {name!r} {list(cut.shape)} is cut over {tp} tp ranks doesn't follow from its ranges on {saved_tp}, "
        f"{_shown(cut.ranges)} of dim {cut.dim}: heads are not cut, and their size isn't known",
        remedy="save one checkpoint with a job of that layout, and give it as --like PATH/TAG; or resume there directly",
    )


def _unit(cut: Cut) -> int | None:
    """The unit in which a dim is cut; None where the ranges don't tell."""
    lengths = {stop - start for start, stop in cut.ranges}
    return None if overlapping(cut.ranges) or len(lengths) == 1 else max(lengths) - min(lengths)


def _hull(one: Box, other: Box) -> Box:
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _shown(ranges: tuple[Range, ...]) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in ranges)
