"""Partial checkpoints without a manifest: folders with the original's file names, written by it or by hand.

Nothing says what is inside, or whether it is whole. So such a folder is taken only if it has exactly the state files of the
present layout; it loads into that one, each rank from its own files, and names are compared when they are loaded. A folder with
random states is a save of this library that has lost its manifest: nobody knows what else it has lost, so it isn't taken.

Source: the names of api.md 9.5.
"""

from __future__ import annotations

import os
import re

from shardwright.checkpoint import layout, storage
from shardwright.checkpoint.collective import present_layout
from shardwright.checkpoint.layout import Layout, Role, StateRole
from shardwright.checkpoint.manifest import FileRecord, Manifest
from shardwright.checkpoint.storage import Place
from shardwright.log import get_logger

_log = get_logger(__name__)
_STATE_FILE = re.compile(r"(model|optimizer|fp16_states)_[0-9_]+\.pt")
_RANDOM_STATE = re.compile(r"rng_[0-9]+\.pt")


def described(place: Place) -> Manifest | None:
    """A manifest without entries and checksums for such a folder; None if it is none, or of another layout.

    Called by: rank 0.
    """
    if not place.is_dir():
        return None
    sizes = storage.of(place).sizes(place)
    if layout.MANIFEST in sizes or any(map(_RANDOM_STATE.fullmatch, sizes)):
        return None
    here = present_layout()
    expected = {role: state_files(here, role) for role in ("model", "optimizer", "fp16_states")}
    found = {name for name in sizes if _STATE_FILE.fullmatch(name)}
    roles: list[StateRole] = [role for role, names in expected.items() if names & found]  # type: ignore[misc]
    if "model" not in roles or found != set().union(*(expected[role] for role in roles)):
        return None
    files: dict[str, Role] = {name: role for role in roles for name in sorted(expected[role])}
    if sizes.get(layout.USER_CONTENT):  # an empty one is a marker
        files[layout.USER_CONTENT] = "user_content"
    _log.warning("%s has no %s: its files are taken as they are, unchecked", place, layout.MANIFEST)
    return Manifest(
        tag=os.path.basename(str(place)).removesuffix(layout.PARTIAL_SUFFIX),
        save_id="",
        saved_at_s=0,
        layout=here,
        versions={},
        files={name: FileRecord(sizes[name], "", role, writer=0) for name, role in files.items()},
        entries=(),
    )


def state_files(of: Layout, role: StateRole) -> set[str]:
    """The files of a role that all ranks of a layout write."""
    return {
        layout.state_file(of, role, pp=pp, tp=tp, rdp=rdp)
        for pp in range(of.pp)
        for tp in range(of.tp)
        for rdp in range(of.rdp)
        if layout.writes_state(of, role, rdp=rdp)
    }
