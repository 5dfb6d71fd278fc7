"""The files of a full checkpoint: their names, which of them are whole, and those that other programs wrote.

A file has a second name while a save of its tag is under way, see `full`; a manifest is valid with whichever of the two has its
checksum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_leaves

from shardwright.checkpoint import integrity, layout, range_reads, safe_loading, storage, unread
from shardwright.checkpoint.exchange import safetensors_files
from shardwright.checkpoint.layout import Role
from shardwright.checkpoint.manifest import FileRecord, Manifest
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.errors import CheckpointError, CheckpointNotFoundError

_HUGGING_FACE = "pytorch_model.bin"
"""Under this tag transformers resumes, whatever it has saved."""


@dataclass(frozen=True)
class Found:
    """The files of a full checkpoint. model: several if Hugging Face sharded it; None where it has none.

    manifest: None for what somebody else has written.
    """

    model: tuple[Place, ...]
    optimizer: Place | None
    user_content: Place | None
    random_state: Place | None = None
    manifest: Manifest | None = None


def user_content_file(tag: str) -> str:
    return f"user_content_{tag}"


def optimizer_file(tag: str) -> str:
    return f"optimizer_{tag}"


def random_state_file(tag: str) -> str:
    return f"rng_{tag}"


def manifest_file(tag: str) -> str:
    return f"manifest_{tag}.json"


def all_files(tag: str) -> tuple[str, ...]:
    """Every name that a full checkpoint may have, the commit mark last."""
    return tag, user_content_file(tag), optimizer_file(tag), random_state_file(tag), manifest_file(tag)


def chosen_tag(root: Place, tag: str | int | None) -> str:
    """The tag asked for, or without one that of `newest`.

    Raises: CheckpointNotFoundError where there is none; CheckpointError for what can't be a tag.
    """
    if tag is not None:
        return layout.check_tag(tag)
    try:
        newest = (root / layout.NEWEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            f"no full checkpoint in {root}: no tag is given and there is no file {layout.NEWEST!r}", remedy=remedy(root)
        ) from error
    return layout.check_tag(newest.removesuffix(layout.PARTIAL_SUFFIX))


def tags(root: Place) -> list[str]:
    """The full checkpoints of a folder that have a manifest."""
    names = {path.name.removesuffix(layout.PREVIOUS_SUFFIX) for path in root.glob("manifest_*.json*")}
    return sorted(name[len("manifest_") : -len(".json")] for name in names if name.endswith(".json"))


def inspect(
    root: Place, tag: str, *, checksums: bool
) -> tuple[Manifest | None, list[integrity.Problem], dict[str, Place]]:
    """What is wrong with a full checkpoint.

    Returns: its manifest, None if that is unusable; the problems; files that have their second name, for a save of the tag
        was interrupted.
    """
    mark = root / manifest_file(tag)
    whole = whole_set(root, tag, checksums=checksums)
    if whole is not None:
        manifest, paths = whole
        return manifest, [], {name: paths[name] for name in manifest.files if paths[name].name != name}
    try:
        manifest = Manifest.from_bytes(mark.read_bytes(), where=str(mark))
    except (OSError, CheckpointError) as error:
        return None, [integrity.Problem("manifest", mark.name, str(error))], {}
    return manifest, integrity.check_files(root, manifest, manifest.files, checksums=checksums), {}


def remedy(root: Place, but: str = "") -> str:
    """Which full checkpoints a folder holds. but: one that isn't offered."""
    if not root.is_dir():
        return f"check the path: {root} is not a folder"
    found = tags(root)
    if found == [but]:
        return f"{root} holds no other full one"
    found = [tag for tag in found if tag != but]
    if found:
        return f"tag= one of {', '.join(found)}"
    partial = sorted(p.name for p in root.glob("*" + layout.PARTIAL_SUFFIX) if p.is_dir())
    return f"{root} holds partial checkpoints only: {', '.join(partial)}" if partial else f"{root} holds no checkpoint"


def find(root: Place, tag: str, *, strict: bool = True) -> Found:
    """Rank 0: the files of a tag, verified against their manifest if there is one.

    strict: False does with a random state that is damaged, or not there.
    """
    checksums = not integrity.checksums_skipped()
    whole = whole_set(root, tag, checksums=checksums) or (
        None if strict else whole_set(root, tag, checksums=checksums, without="rng")
    )
    if whole is not None:
        manifest, paths = whole
        by_role = {record.role: paths.get(name, root / name) for name, record in manifest.files.items()}
        model = (by_role["model"],) if "model" in by_role else ()
        return Found(model, by_role.get("optimizer"), by_role.get("user_content"), by_role.get("rng"), manifest)
    if any((root / name).exists() for name in _with_previous(manifest_file(tag))):
        _, problems, _ = inspect(root, tag, checksums=checksums)
        raise CheckpointError(
            f"full checkpoint {tag!r} is damaged: {'; '.join(map(str, problems))}",
            where=str(root / tag),
            remedy=f"resume from another checkpoint; {remedy(root, but=tag)}",
        )
    user = root / user_content_file(tag)
    return Found(plain_files(root, tag), None, user if user.is_file() else None)


def _with_previous(name: str) -> tuple[str, str]:
    return name, name + layout.PREVIOUS_SUFFIX


def whole_set(
    root: Place, tag: str, *, checksums: bool, without: Role | None = None
) -> tuple[Manifest, dict[str, Place]] | None:
    """The manifest of a tag whose files are all there, and where each lies; None if there is none.

    without: a role that doesn't count.
    """
    for mark in _with_previous(manifest_file(tag)):
        try:
            manifest = Manifest.from_bytes((root / mark).read_bytes(), where=str(root / mark))
        except (OSError, CheckpointError):
            continue
        needed = {name: record for name, record in manifest.files.items() if record.role != without}
        paths = {name: _matching(root, name, record, checksums) for name, record in needed.items()}
        whole = {name: path for name, path in paths.items() if path is not None}
        if len(whole) == len(paths):
            return manifest, {**whole, manifest_file(tag): root / mark}
    return None


def _matching(root: Place, name: str, record: FileRecord, checksums: bool) -> Place | None:
    candidates = [path for path in (root / candidate for candidate in _with_previous(name)) if path.is_file()]
    for path in candidates:
        with suppress(OSError):
            if path.stat().st_size == record.size_bytes and (
                not (checksums or len(candidates) > 1) or integrity.file_digest(path) == record.digest
            ):
                return path
    return None


def settle_leftovers(root: Place, replaced: str | None = None) -> None:
    """Give the files of interrupted saves their first names again, so that each tag has what it is valid with, and no more.

    Called by: one rank, when no save into the folder runs. replaced: a tag that is about to be saved; for others what is not
        whole is left as it is.
    """
    second = {path.name for path in root.iterdir() if path.name.endswith(layout.PREVIOUS_SUFFIX)}
    for tag in {*tags(root), *([] if replaced is None else [replaced])} if second else ():
        left = [name for name in (other for _, other in map(_with_previous, all_files(tag))) if name in second]
        whole = whole_set(root, tag, checksums=True) if left else None
        for name, path in whole[1].items() if whole is not None else ():
            if path.name != name:
                storage.of(root).move(path, root / name)
        if whole is not None or tag == replaced:
            for name in left:
                (root / name).unlink(missing_ok=True)


# ------------------------------------------------------------------ files of others


def plain_files(root: Place, tag: str) -> tuple[Place, ...]:
    """A state dict that somebody else has written."""
    if (root / tag).is_file():
        return (root / tag,)
    if tag == _HUGGING_FACE:
        for name in ("model.safetensors", "pytorch_model.bin.index.json", "model.safetensors.index.json"):
            if (root / name).is_file():
                return _shards(root / name) if name.endswith(".json") else (root / name,)
    raise CheckpointNotFoundError(f"no full checkpoint {tag!r} in {root}", remedy=remedy(root))


def _shards(index: Place) -> tuple[Place, ...]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index.name} is no index of a Hugging Face model: {error!r}", where=str(index)) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index.name} names files that are not there: {', '.join(missing)}", where=str(index))
    return tuple(index.parent / name for name in names)


def read_nested(path: Place, *, trust: bool) -> Any:
    """The content of a torch file; its tensors are mapped, or in an object store those of `unread`."""
    content = safe_loading.read_lazily(path, trust=trust)
    elsewhere = [value for value in tree_leaves(content) if range_reads.is_elsewhere(value)]
    if not all(map(range_reads.has_place, elsewhere)):  # of the form before torch 1.6
        return safe_loading.read_file(path, trust=trust)
    return unread.unread(path, content) if isinstance(path, RemotePath) else content


def read_state_dict(path: Place, *, trust: bool) -> dict[str, Any]:
    """Tensors by name, mapped from the file; from an object store those of `unread`."""
    if path.suffix != ".safetensors":
        content = read_nested(path, trust=trust)
    elif isinstance(path, RemotePath):
        content = unread.unread(path, safetensors_files.outline(path))
    else:
        from safetensors import torch as safetensors

        content = safetensors.load_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path.name} holds a {type(content).__name__}, expected a state dict: tensors by name", where=str(path)
        )
    return dict(content)
