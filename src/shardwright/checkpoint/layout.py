"""The names a checkpoint uses on disk.

    path/
      {tag}_partial/
        model_{pp}_{tp}.pt            written by rdp rank 0
        optimizer_{pp}_{tp}.pt        written by rdp rank 0; with sharded state optimizer_{pp}_{tp}_{rdp}.pt
        by all fp16_states_{pp}_{tp}.pt      as the optimizer
        rng_{rank}.pt                 written by every rank
        user_content.pt               written by rank 0
        partition_info.pt             written by rank 0, a copy for old readers
        manifest.json                 written last: the commit mark
      newest                          text: the folder name of the checkpoint to resume from

Everything else the library puts into `path` starts with ".shardwright-" (work in progress, safe to delete
when no save runs), except `{tag}_partial.previous`: the old checkpoint of a tag that is being saved again on
a file system without atomic exchange. Resume takes it when `{tag}_partial` is not there.

Source: api.md 9.5, design.md section 6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.errors import CheckpointError

Role = Literal["model", "optimizer", "fp16_states", "rng", "user_content", "partition_info", "origin_rng"]
StateRole = Literal["model", "optimizer", "fp16_states"]
Precision = Literal["fp32", "fp16", "bf16"]

PARTIAL_SUFFIX = "_partial"
PREVIOUS_SUFFIX = ".previous"
MANIFEST = "manifest.json"
NEWEST = "newest"
USER_CONTENT = "user_content.pt"
PARTITION_INFO = "partition_info.pt"
WORK_PREFIX = ".shardwright-"

_ALIASES = {"CLUSTER": "DPT", "SPREAD": "TPD"}


@dataclass(frozen=True)
class Layout:
    """How a job spreads its state over ranks: what must be equal for the same-layout path.

    placement: "cluster", "spread" or a permutation of D, P, T.
    """

    pp: int
    tp: int
    rdp: int
    placement: str = "cluster"
    shard_optimizer_state: bool = False
    sharded_data_parallel_degree: int = 1
    precision: Precision = "fp32"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Layout:
        """Of what `dataclasses.asdict` made of one; fields of later versions are left out."""
        return cls(**{key: value for key, value in record.items() if key in cls.__dataclass_fields__})

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.rdp

    def differences(self, present: Layout) -> list[str]:
        """Return one sentence per setting that differs; self is the saved layout."""
        found = []
        for name in ("pp", "tp", "rdp", "shard_optimizer_state", "sharded_data_parallel_degree", "precision"):
            saved, now = getattr(self, name), getattr(present, name)
            if saved != now:
                found.append(f"{name} saved {saved}, present {now}")
        if not found and self._effective_placement() != present._effective_placement():
            found.append(f"placement_strategy saved {self.placement!r}, present {present.placement!r}")
        return found

    def describe(self) -> str:
        return f"pp={self.pp} tp={self.tp} rdp={self.rdp} placement={self.placement}"

    def _effective_placement(self) -> str:
        """The order of the axes that are larger than one; the others don't move any rank."""
        letters = _ALIASES.get(self.placement.upper(), self.placement.upper())
        size = {"P": self.pp, "T": self.tp, "D": self.rdp}
        return "".join(letter for letter in letters if size[letter] > 1)


def partial_folder(tag: str | int) -> str:
    """Return the folder name of a tag, given with or without the suffix.

    Raises: CheckpointError if the tag can't be a file name of ours.
    """
    name = check_tag(tag)
    return name if name.endswith(PARTIAL_SUFFIX) else name + PARTIAL_SUFFIX


def check_tag(tag: str | int) -> str:
    """Return the tag as text; refuse what isn't one plain file name."""
    if isinstance(tag, bool) or not isinstance(tag, (str, int)):
        raise CheckpointError(
            f"tag is a {type(tag).__name__}, expected a string", remedy="pass for example tag=f'step_{step}'"
        )
    name = str(tag)
    plain = name not in ("", PARTIAL_SUFFIX, NEWEST) and not name.startswith(".")
    if not plain or any(char in name for char in ("/", "\\", "\0", "\n")):
        raise CheckpointError(
            f"tag {name!r} can't be the name of a checkpoint",
            remedy="use a plain file name without path separators that doesn't start with a dot; "
            "put folders into `path`",
        )
    return name


def state_file(layout: Layout, role: StateRole, *, pp: int, tp: int, rdp: int) -> str:
    """Return the name of the file with a rank's part of the model or of the optimizer state."""
    if layout.sharded_data_parallel_degree > 1:
        shard = rdp % layout.sharded_data_parallel_degree
        if role == "model" and layout.tp > 1 and shard == 0:
            return f"{role}_{tp}.pt"  # where the original has all of a slice's buffers
        return f"{role}_{tp}_{shard}.pt" if layout.tp > 1 else f"{role}_{shard}.pt"
    if layout.shard_optimizer_state and role != "model":
        return f"{role}_{pp}_{tp}_{rdp}.pt"
    return f"{role}_{pp}_{tp}.pt"


def writes_state(layout: Layout, role: StateRole, *, rdp: int) -> bool:
    """True where this rank writes the file of `state_file`; every replica reads it."""
    return rdp < layout.sharded_data_parallel_degree or (layout.shard_optimizer_state and role != "model")


def rng_file(rank: int) -> str:
    """Return the name of the file with the random state of a world rank."""
    return f"rng_{rank}.pt"


def origin_rng_file(rank: int) -> str:
    """Return the name of the file with the random state of a rank of the layout that a checkpoint was converted from."""
    return f"origin_rng_{rank}.pt"


def saving_folder(folder: str, save_id: str) -> str:
    """Return the name under which a folder is written before it is published."""
    return f"{WORK_PREFIX}saving-{folder}-{save_id}"


def is_saving(name: str, folder: str) -> bool:
    """Is this such a name of the folder, from whichever save?"""
    return re.fullmatch(re.escape(saving_folder(folder, "")) + "[0-9a-f]{32}", name) is not None


def deleting_folder(folder: str, unique: str) -> str:
    """Return the name a folder gets just before it is deleted, so that no half-deleted one looks whole."""
    return f"{WORK_PREFIX}deleting-{folder}-{unique}"


def previous_folder(folder: str) -> str:
    """Return the name under which the replaced checkpoint of a tag waits for its successor."""
    return folder + PREVIOUS_SUFFIX
