"""Which checkpoint to resume from: rank 0 looks, everybody follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.checkpoint import folder, integrity, layout, unlisted
from shardwright.checkpoint.collective import present_layout
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError, CheckpointNotFoundError
from shardwright.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from. name: what it is called; folder: where it lies (`folder.existing`)."""

    name: str
    folder: Place
    manifest: Manifest

    @property
    def files(self) -> Place:
        """The folder of its files."""
        return integrity.data_place(self.folder, self.manifest)


def choose(root: Place, tag: str | int | None, skipped: dict[str, str]) -> Choice:
    """Find the checkpoint that is asked for, or, without a tag, the best one that isn't skipped.

    Called by: rank 0.   skipped: names found damaged so far, with the reason; what is found incomplete here
    is added.
    Raises: CheckpointNotFoundError if there is none; CheckpointError if the one asked for by name is
        incomplete.
    """
    return _newest(root, skipped) if tag is None else _by_name(root, layout.partial_folder(tag))


def is_moved(chosen: Choice) -> bool:
    """Was the checkpoint saved with another layout than the job has?

    Called by: every rank, with the same outcome.
    """
    return bool(chosen.manifest.layout.differences(present_layout()))


def shortened(sentences: Sequence[str], limit: int = 5) -> str:
    """Join the first few, and count the rest."""
    rest = f"; and {len(sentences) - limit} more" if len(sentences) > limit else ""
    return "; ".join(sentences[:limit]) + rest


def _newest(root: Place, skipped: dict[str, str]) -> Choice:
    try:
        newest = (root / layout.NEWEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            f"no partial checkpoint in {root}: no tag is given and there is no file {layout.NEWEST!r}",
            remedy=folder.candidates(root),
        ) from error
    first = newest if newest.endswith(layout.PARTIAL_SUFFIX) else newest + layout.PARTIAL_SUFFIX
    for name in _latest_first(root, first):
        if name in skipped:
            continue
        place = folder.existing(root, name)
        manifest, harmful = _inspected(place)
        if manifest is not None and not harmful:
            if name != first:
                _log.warning("going on from %s instead of %r, which %r names", place, first, layout.NEWEST)
            return Choice(name, place, manifest)
        skipped[name] = shortened(list(map(str, harmful))) if place.is_dir() else "not there"
        _log.warning("skipping %s: %s", place, skipped[name])
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise CheckpointNotFoundError(
        f"no complete partial checkpoint in {root}; {layout.NEWEST!r} names {newest!r}; skipped {reasons}",
        remedy="restore the folder from a copy, or give another path",
    )


def _inspected(place: Place) -> tuple[Manifest | None, list[integrity.Problem]]:
    """What is in a folder, and what is wrong with it."""
    manifest, problems = integrity.inspect(place)
    if manifest is None and (made := unlisted.described(place)) is not None:
        return made, []
    return manifest, integrity.harmful(problems)


def _latest_first(root: Place, first: str) -> Iterator[str]:
    """Yield the name in `newest`; then, if that one won't do, the other checkpoints, the latest first."""
    if "/" not in first:
        yield first
    others = sorted(folder.partial_checkpoints(root), key=lambda kept: (kept.modified_ns, kept.folder))
    yield from (kept.folder for kept in reversed(others) if kept.folder != first)


def _by_name(root: Place, name: str) -> Choice:
    place = folder.existing(root, name)
    if not place.is_dir():
        full = name.removesuffix(layout.PARTIAL_SUFFIX)
        hint = f" (there is a full checkpoint {full!r}: partial=False)" if (root / full).is_file() else ""
        raise CheckpointNotFoundError(
            f"no partial checkpoint {name!r} in {root}{hint}", remedy=folder.candidates(root)
        )
    manifest, harmful = _inspected(place)
    if manifest is None or harmful:
        raise CheckpointError(
            f"checkpoint {name!r} is incomplete: {shortened(list(map(str, harmful)))}",
            where=str(place),
            remedy="resume from another checkpoint, or with tag=None from the latest complete one",
        )
    return Choice(name, place, manifest)
