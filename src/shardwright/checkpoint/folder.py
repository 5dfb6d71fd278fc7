"""A folder of checkpoints: what lies in it, finding one by name, deleting the oldest."""

from __future__ import annotations

from shardwright.checkpoint import integrity, layout, retention, storage
from shardwright.checkpoint.storage import Place
from shardwright.log import get_logger

_log = get_logger(__name__)


def partial_checkpoints(root: Place) -> list[retention.Kept]:
    """List the partial checkpoints of a folder; a folder of another purpose that happens to end in "_partial"
    is left out.

    The time of a checkpoint is that of its manifest, because files put in later by others change the
    folder's. One that a save is replacing counts by its own name (`existing`).
    """
    found = []
    names = {path.name for path in root.iterdir()}
    for name in sorted({name.removesuffix(layout.PREVIOUS_SUFFIX) for name in names}):
        folder = existing(root, name)
        if not name.endswith(layout.PARTIAL_SUFFIX) or not folder.is_dir():
            continue
        mark = folder / layout.MANIFEST
        if (
            not mark.exists()
            and not any(folder.glob("model_*.pt"))
            and not any(folder.glob("optimizer_*.pt"))
        ):
            continue
        try:
            modified_ns = (mark if mark.exists() else folder).stat().st_mtime_ns
        except FileNotFoundError:
            continue
        _, problems = integrity.inspect(folder)
        found.append(retention.Kept(name, modified_ns, complete=not integrity.harmful(problems)))
    return found


def prune(root: Place, *, newest: str, keep: int | None, unique: str) -> None:
    """Delete the oldest partial checkpoints until `keep` are left. Called by rank 0, after `newest` moved."""
    if keep is None:
        return
    try:
        for name in retention.surplus(partial_checkpoints(root), newest=newest, keep=keep):
            storage.of(root).remove(root / name, unique=unique)
    except OSError as error:  # the save itself is done
        _log.warning("could not look for old checkpoints in %s: %s", root, error)


def existing(root: Place, name: str) -> Place:
    """Return where a checkpoint lies: under its own name, or under the one it has while a save of its tag
    replaces it.
    """
    previous = root / layout.previous_folder(name)
    return previous if not (root / name).exists() and previous.exists() else root / name


def candidates(root: Place) -> str:
    """Say, as the remedy of an error, which partial checkpoints a folder holds."""
    if not root.is_dir():
        return f"check the path: {root} is not a folder; in a first run don't resume"
    found = [kept.folder + ("" if kept.complete else " (incomplete)") for kept in partial_checkpoints(root)]
    if not found:
        return f"check the path: {root} holds no partial checkpoint; in a first run don't resume"
    return f"tag= one of {', '.join(found)}"
