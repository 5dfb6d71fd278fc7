"""Saving a checkpoint: all of it or nothing.

The order of a save, and why: every rank writes its files under a name nobody reads; each file is on disk
before its checksum is told; the manifest, which makes the folder valid, is written when all ranks have told;
one rename gives the folder its name; then `newest` moves; then old checkpoints go. Whatever dies at whatever
moment, the checkpoint that `newest` names is complete.

Source: api.md 9.5, design.md section 6.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwright
from shardwright.checkpoint import full, layout, random_state, retention, safe_loading, state
from shardwright.checkpoint.collective import (
    absolute,
    agree,
    collect,
    present_layout,
    run_everywhere,
    run_on_rank_zero,
)
from shardwright.checkpoint.folder import local_root, prune
from shardwright.checkpoint.layout import Layout, Role, StateRole
from shardwright.checkpoint.manifest import Entry, FileRecord, Manifest, merge_entries
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer
from shardwright.checkpoint.storage import local
from shardwright.errors import CheckpointError, UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.topology import rng
from shardwright.topology.context import world

_log = get_logger(__name__)
_CALL = "save_checkpoint"


@dataclass(frozen=True)
class _Written:
    """What one rank reports about its part of a save."""

    files: dict[str, FileRecord]
    entries: list[Entry]


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int,
    partial: bool = True,
    model: CheckpointModel | None = None,
    optimizer: CheckpointOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    trust: bool | None = None,
) -> None:
    """Save the training state as `path/{tag}_partial`, or the whole model as `path/{tag}` (see `full`), and make it the
    one to resume from.

    Called by: every rank of the world, with the same path and tag, outside a step.
    Collectives: four small ones over the world; returns when all ranks have finished.
    path: a folder that all ranks share; created if needed.   tag: a plain name; an existing checkpoint of
    that tag is replaced in one step.   model, optimizer: the wrappers; None leaves their files out.
    user_content: what resume gives back, taken from rank 0: plain values, collections, tensors, numpy (see
    `safe_loading`).   num_kept_partial_checkpoints: delete the oldest until so many are left; None: keep all.
    translate_if_full: give a full checkpoint the names that the model had before modules were replaced.
    trust: also accept user content that safe loading refuses.
    Also saved, for every rank: the state of its random generators.
    Raises: the same error on every rank: CheckpointError if ranks disagree, the disk refuses, or content
        can't be loaded again; the previous checkpoint is intact then. UsageError before the model is
        partitioned.
    """
    where = absolute(path)
    agree(
        _CALL,
        {
            "path": where,
            "tag": tag,
            "partial": partial,
            "num_kept_partial_checkpoints": num_kept_partial_checkpoints,
            "has model": model is not None,
            "has optimizer": optimizer is not None,
            "trust": safe_loading.trusted(trust),
        },
    )
    root = local_root(where)
    if not partial:
        name = layout.check_tag(tag)
        trusted = safe_loading.trusted(trust)
        full.save(root, name, model, optimizer, user_content, translate=translate_if_full, trust=trusted)
        return
    folder = layout.partial_folder(tag)
    retention.check_count(num_kept_partial_checkpoints)
    save = _Save(root, folder, model, optimizer, safe_loading.trusted(trust))
    save.run(user_content, num_kept_partial_checkpoints)


class _Save:
    """One save. All ranks call run."""

    def __init__(
        self,
        root: Path,
        folder: str,
        model: CheckpointModel | None,
        optimizer: CheckpointOptimizer | None,
        trust: bool,
    ) -> None:
        self.root = root
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.trust = trust
        self.layout: Layout = present_layout()
        self.call = f"{_CALL} of {folder!r}"
        self.files: dict[str, FileRecord] = {}

    def run(self, user_content: Any, keep: int | None) -> None:
        started = time.monotonic()
        run_everywhere(self.call, self._check_ready)
        save_id = run_on_rank_zero(self.call, lambda: self._prepare(user_content))
        temporary = self.root / layout.saving_folder(self.folder, save_id)
        try:
            written = collect(self.call, lambda: self._write_own_files(temporary))
            size_bytes = run_on_rank_zero(self.call, lambda: self._commit(temporary, save_id, written, keep))
        except BaseException:
            if world().rank == 0:
                local.discard(temporary)
            raise
        if rank_zero():
            _log.info(
                "saved %s: %.1f MB in %.1f s",
                self.root / self.folder,
                size_bytes / 1e6,
                time.monotonic() - started,
            )

    def _check_ready(self) -> None:
        if self.model is not None and not self.model.partitioned:
            raise UsageError(
                f"{_CALL} before the model is partitioned: this rank doesn't know its part yet",
                remedy="run one step first; the model is partitioned by the first step",
            )

    def _prepare(self, user_content: Any) -> str:
        """Rank 0: clean up, make the temporary folder, write what may be refused; return the save id."""
        self.root.mkdir(parents=True, exist_ok=True)
        save_id = uuid.uuid4().hex
        local.clean_leftovers(self.root, unique=save_id)
        temporary = self.root / layout.saving_folder(self.folder, save_id)
        temporary.mkdir()
        try:
            content = {} if user_content is None else user_content
            self._write(temporary, layout.USER_CONTENT, "user_content", content)
        except BaseException:
            local.discard(temporary)
            raise
        return save_id

    def _write_own_files(self, temporary: Path) -> _Written:
        here = world()
        if not temporary.is_dir():
            raise CheckpointError(
                f"this rank (host {platform.node()}) doesn't see the folder that rank 0 made, {temporary}",
                remedy="save into a folder on a file system that all ranks share",
            )
        entries: list[Entry] = []
        table = self.model.tensor_table() if self.model is not None else ()
        name = self._own_file("model")
        if self.model is not None and name is not None:
            content = state.compact(self.model.local_state_dict())
            self._write(temporary, name, "model", content)
            entries += state.model_entries(name, content, table)
        name = self._own_file("optimizer")
        if self.optimizer is not None and name is not None:
            names = [name for group in self.optimizer.group_names() for name in group]
            content = state.compact(self.optimizer.local_state_dict(gather_if_shard=False))
            content[state.PARAM_NAMES] = names
            self._write(temporary, name, "optimizer", content)
            entries += state.optimizer_entries(
                "optimizer", name, content["state"], names, table, content.get(state.SPANS)
            )
        half = None if self.optimizer is None else self.optimizer.half_precision_state()
        name = self._own_file("fp16_states")
        if self.optimizer is not None and half is not None and name is not None:
            names = [name for group in self.optimizer.group_names() for name in group]
            content = {**state.compact(half), state.PARAM_NAMES: names}
            self._write(temporary, name, "fp16_states", content)
            entries += state.optimizer_entries(
                "fp16_states", name, content["state"], names, table, content.get(state.SPANS)
            )
        position = self.model.random_position() if self.model is not None else {}
        self._write(temporary, layout.rng_file(here.rank), "rng", random_state.pack(rng.capture(), position))
        if here.rank == 0 and (record := self._partition()) is not None:
            old_form = {
                "partition": record.get("stage_of"),
                "pp_size": self.layout.pp,
                "tp_size": self.layout.tp,
                "version": shardwright.__version__,
            }
            self._write(temporary, layout.PARTITION_INFO, "partition_info", old_form)
        return _Written(self.files, entries)

    def _commit(self, temporary: Path, save_id: str, written: Sequence[_Written], keep: int | None) -> int:
        """Rank 0: write the manifest, give the folder its name, move `newest`, delete what is too old."""
        files = {name: record for rank in written for name, record in rank.files.items()}
        manifest = Manifest(
            tag=self.folder.removesuffix(layout.PARTIAL_SUFFIX),
            save_id=save_id,
            saved_at_s=int(time.time()),
            layout=self.layout,
            versions={
                "shardwright": shardwright.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            files=dict(sorted(files.items())),
            entries=merge_entries(rank.entries for rank in written),
            partition=self._partition(),
            ties=() if self.model is None else _tuples(self.model.tied_names()),
            param_groups=() if self.optimizer is None else _tuples(self.optimizer.full_group_names()),
        )
        data = manifest.to_bytes()
        local.write_durably(temporary / layout.MANIFEST, data)
        local.fsync_folder(temporary)
        local.publish(temporary, self.root / self.folder, unique=save_id)
        local.replace_text(self.root / layout.NEWEST, self.folder, unique=save_id)
        prune(self.root, newest=self.folder, keep=keep, unique=save_id)
        return len(data) + sum(record.size_bytes for record in files.values())

    def _own_file(self, role: StateRole) -> str | None:
        """Return the name of the state file that this rank writes; None on a replica."""
        at, sharded = world().coordinates, self.layout.shard_optimizer_state
        if not layout.writes_state(role, rdp=at.rdp, shard_optimizer_state=sharded):
            return None
        return layout.state_file(role, pp=at.pp, tp=at.tp, rdp=at.rdp, shard_optimizer_state=sharded)

    def _partition(self) -> dict[str, Any] | None:
        record = None if self.model is None else self.model.partition_record()
        return None if record is None else json.loads(json.dumps(record))

    def _write(self, temporary: Path, name: str, role: Role, content: Any) -> None:
        size_bytes, digest = safe_loading.write_file(temporary / name, content, trust=self.trust)
        self.files[name] = FileRecord(size_bytes, digest, role, writer=world().rank)


def _tuples(names: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group) for group in names)
