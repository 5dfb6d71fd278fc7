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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardwright
from shardwright.checkpoint import (
    background,
    full,
    full_files,
    layout,
    random_state,
    retention,
    safe_loading,
    state,
    storage,
    torch_stream,
)
from shardwright.checkpoint.collective import (
    absolute,
    agree,
    collect,
    present_layout,
    run_everywhere,
    run_on_rank_zero,
)
from shardwright.checkpoint.flat_groups import MODULE, FlatGroups, in_module
from shardwright.checkpoint.folder import prune
from shardwright.checkpoint.layout import Layout, Role, StateRole
from shardwright.checkpoint.manifest import Entry, FileRecord, Manifest, merge_entries
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer, TensorRow
from shardwright.checkpoint.storage import Place
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


class _Part(NamedTuple):
    """One file of this rank, before it is written.

    make: its content, whose tensors are the live ones.
    describe: the manifest's entries for that content.
    """

    name: str
    role: Role
    make: Callable[[], Any]
    describe: Callable[[Any], list[Entry]] = lambda _: []


@dataclass(frozen=True)
class _Described:
    """What a manifest says besides files and entries."""

    partition: dict[str, Any] | None
    ties: tuple[tuple[str, ...], ...]
    param_groups: tuple[tuple[str, ...], ...]
    structure: Mapping[str, Any] | None
    origin: Mapping[str, Any] | None


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
    blocking: bool = True,
    trust: bool | None = None,
) -> None:
    """Save the training state as `path/{tag}_partial`, or the whole model as `path/{tag}` (see `full`), and make it the
    one to resume from.

    Called by: every rank of the world, with the same path and tag, outside a step.
    Collectives: five small ones over the world; returns when all ranks have finished.
    path: a folder that all ranks share; created if needed.   tag: a plain name; an existing checkpoint of
    that tag is replaced in one step.   model, optimizer: the wrappers; None leaves their files out.
    user_content: what resume gives back, taken from rank 0: plain values, collections, tensors, numpy (see
    `safe_loading`).   num_kept_partial_checkpoints: delete the oldest until so many are left; None: keep all.
    translate_if_full: give a full checkpoint the names that the model had before modules were replaced.
    blocking: False returns as soon as the values are copied aside (of a full checkpoint: to rank 0), and writes while
        training goes on. The next save or resume waits for it, and raises what it failed with; so does the end of the
        process, which logs that.
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
            "blocking": blocking,
            "translate_if_full": translate_if_full,
            "trust": safe_loading.trusted(trust),
        },
    )
    background.finish()
    if model is not None:
        run_everywhere(_CALL, model.level_replicas)
    root = storage.place(where)
    if not partial:
        name = layout.check_tag(tag)
        trusted = safe_loading.trusted(trust)
        how: dict[str, bool] = {"translate": translate_if_full, "trust": trusted, "blocking": blocking}
        full.save(root, name, model, optimizer, user_content, **how)
        return
    folder = layout.partial_folder(tag)
    retention.check_count(num_kept_partial_checkpoints)
    save = _Save(root, folder, model, optimizer, safe_loading.trusted(trust))
    save.run(user_content, num_kept_partial_checkpoints, blocking=blocking)


def prepare_background_save(model: CheckpointModel | None = None, optimizer: CheckpointOptimizer | None = None) -> None:
    """Make memory ready for `save_checkpoint(..., blocking=False)`, on a thread, so that the first one too is over quickly.

    Called by: any rank that will save, after the first optimizer step; state that comes later is not prepared.
        Collectives: none.
    It takes the memory that such a save keeps anyway: one copy of what this rank writes, in host memory.
    Raises: UsageError before the model is partitioned.
    """
    save = _Save(Path(), "", model, optimizer, trust=False)
    save.check_ready("prepare_background_save")
    background.prepare({part.name: part.make() for part in save.state_parts()})


class _Save:
    """One save. All ranks call run."""

    def __init__(
        self,
        root: Place,
        folder: str,
        model: CheckpointModel | None,
        optimizer: CheckpointOptimizer | None,
        trust: bool,
    ) -> None:
        self.root = root
        self.store = storage.of(root)
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.trust = trust
        self.here = world()
        self.layout: Layout = present_layout()
        self.call = f"{_CALL} of {folder!r}"
        self.files: dict[str, FileRecord] = {}
        self.flat: FlatGroups | None = None

    def run(self, user_content: Any, keep: int | None, *, blocking: bool) -> None:
        started = time.monotonic()
        run_everywhere(self.call, lambda: self.check_ready(_CALL))
        if self.flat is not None:
            self.flat.exchange()
        save_id = run_on_rank_zero(self.call, lambda: self._prepare(user_content))
        temporary = self.store.saving(self.root, self.folder, save_id)
        try:
            parts = run_everywhere(self.call, lambda: self._own_parts(temporary))
            described = self._described()
            if not blocking:
                aside = run_everywhere(self.call, lambda: [_set_aside(part) for part in parts])
                background.start(
                    self.call, lambda: self._in_background(aside, temporary, save_id, described, keep, started)
                )
                return
            written = collect(self.call, lambda: self._write_all(parts, temporary))
            size_bytes = run_on_rank_zero(
                self.call, lambda: self._commit(temporary, save_id, written, described, keep)
            )
        except BaseException:
            if world().rank == 0:
                self.store.discard(temporary)
            raise
        if rank_zero():
            self._log_end(size_bytes, started)

    def _log_end(self, size_bytes: int, started: float) -> None:
        duration = time.monotonic() - started
        _log.info("saved %s: %.1f MB in %.1f s", self.root / self.folder, size_bytes / 1e6, duration)

    def _in_background(
        self,
        parts: Sequence[_Part],
        temporary: Place,
        save_id: str,
        described: _Described,
        keep: int | None,
        started: float,
    ) -> None:
        """The rest of a save, on a thread of this rank."""
        try:
            written = self._write_all(parts, temporary)
            background.tell(temporary, self.here.rank, written)
        except Exception as error:
            for part in parts:  # makes room for the note on a full disk
                self.store.discard(temporary / part.name)
            background.tell_failure(temporary, self.here.rank, error)
            if self.here.rank == 0:
                self.store.discard(temporary)
            raise
        if self.here.rank > 0:
            return
        try:
            everything = background.gather(temporary, self.here)
            size_bytes = self._commit(temporary, save_id, everything, described, keep)
        except BaseException:
            self.store.discard(temporary)
            raise
        if rank_zero():
            self._log_end(size_bytes, started)

    def check_ready(self, call: str) -> None:
        """Settle what form state is written in. Raise UsageError if this rank doesn't know its part."""
        if self.model is not None and not self.model.partitioned:
            raise UsageError(
                f"{call} before the model is partitioned: this rank doesn't know its part yet",
                remedy="run one step first; the model is partitioned by the first step",
            )
        if self.model is not None and self.optimizer is not None:
            self.flat = self.optimizer.flat_groups(self.model)

    def _prepare(self, user_content: Any) -> str:
        """Rank 0: clean up, make the temporary folder, write what may be refused; return the save id."""
        self.store.prepare(self.root)
        save_id = uuid.uuid4().hex
        self.store.clean_leftovers(self.root, unique=save_id)
        full_files.settle_leftovers(self.root)
        temporary = self.store.saving(self.root, self.folder, save_id)
        self.store.begin(temporary)
        try:
            content = {} if user_content is None else user_content
            if self.flat is not None:
                content = self.flat.user_content(content)
            self._write(temporary, layout.USER_CONTENT, "user_content", content)
        except BaseException:
            self.store.discard(temporary)
            raise
        return save_id

    def _own_parts(self, temporary: Place) -> list[_Part]:
        """What this rank writes; tensors are the live ones."""
        if not temporary.is_dir():
            raise CheckpointError(
                f"this rank (host {platform.node()}) doesn't see the folder that rank 0 made, {temporary}",
                remedy="save into a folder on a file system that all ranks share",
            )
        parts = self.state_parts()
        model = self.model
        position = model.random_position() if model is not None else {}
        captured = random_state.pack(rng.capture(), position)
        parts.append(_Part(layout.rng_file(self.here.rank), "rng", lambda: captured))
        if self.here.rank == 0 and (record := self._partition()) is not None:
            old_form = {
                "partition": record.get("stage_of"),
                "pp_size": self.layout.pp,
                "tp_size": self.layout.tp,
                "version": shardwright.__version__,
            }
            parts.append(_Part(layout.PARTITION_INFO, "partition_info", lambda: old_form))
        return parts

    def state_parts(self) -> list[_Part]:
        """The files of tensors that this rank writes."""
        parts: list[_Part] = []
        model, optimizer = self.model, self.optimizer
        ties = () if model is None else model.tied_names()
        if model is not None and (name := self._own_file("model")) is not None:
            parts.append(self._model_part(name, model, set() if self.flat is None else self.flat.names(ties)))
        if optimizer is not None:
            table = optimizer.parameter_table()
            names = [name for group in optimizer.group_names() for name in group]
            sources: dict[StateRole, Callable[[], Any]] = {
                "optimizer": lambda: optimizer.local_state_dict(gather_if_shard=False)
            }
            if optimizer.half_precision_state() is not None:
                sources["fp16_states"] = optimizer.half_precision_state
            for role, source in sources.items():
                if (name := self._own_file(role)) is not None:
                    make = partial_of(_with_names, source, names)
                    part = _Part(name, role, make, partial_of(_optimizer_entries, role, name, table))
                    parts.append(part if self.flat is None else _flattened(part, self.flat, table, ties))
        return parts

    def _model_part(self, name: str, model: CheckpointModel, elsewhere: set[str]) -> _Part:
        """elsewhere: names of weights that are in the flat groups."""
        table = model.tensor_table()

        def make() -> Any:
            return state.detached(model.local_state_dict())

        if self.layout.sharded_data_parallel_degree == 1:
            return _Part(name, "model", make, partial_of(state.model_entries, name, table=table))

        def describe(content: Any) -> list[Entry]:
            here = {name: value for name, value in content[MODULE].items() if name not in elsewhere}
            return state.model_entries(name, here, table, (MODULE,))

        return _Part(name, "model", lambda: in_module(make(), elsewhere, state.PARTIAL_MARK), describe)

    def _write_all(self, parts: Sequence[_Part], temporary: Place) -> _Written:
        entries: list[Entry] = []
        for part in parts:
            content = part.make()
            self._write(temporary, part.name, part.role, content)
            entries += part.describe(content)
        return _Written(self.files, entries)

    def _described(self) -> _Described:
        """What the manifest says of the model and the optimizer as they are now."""
        return _Described(
            self._partition(),
            () if self.model is None else _tuples(self.model.tied_names()),
            () if self.optimizer is None else _tuples(self.optimizer.full_group_names()),
            None if self.model is None or self.here.rank > 0 else self.model.structure_record(),
            None if self.model is None else self.model.origin_record(),
        )

    def _commit(
        self, temporary: Place, save_id: str, written: Sequence[_Written], described: _Described, keep: int | None
    ) -> int:
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
            partition=described.partition,
            ties=described.ties,
            param_groups=described.param_groups,
            data_folder=self.store.data_folder(save_id),
            structure=described.structure,
            origin=described.origin,
        )
        data = manifest.to_bytes()
        self.store.commit(temporary, self.root / self.folder, data, unique=save_id)
        self.store.replace_text(self.root / layout.NEWEST, self.folder, unique=save_id)
        prune(self.root, newest=self.folder, keep=keep, unique=save_id)
        return len(data) + sum(record.size_bytes for record in files.values())

    def _own_file(self, role: StateRole) -> str | None:
        """Return the name of the state file that this rank writes; None on a replica."""
        at = self.here.coordinates
        if not layout.writes_state(self.layout, role, rdp=at.rdp):
            return None
        return layout.state_file(self.layout, role, pp=at.pp, tp=at.tp, rdp=at.rdp)

    def _partition(self) -> dict[str, Any] | None:
        record = None if self.model is None else self.model.partition_record()
        return None if record is None else json.loads(json.dumps(record))

    def _write(self, temporary: Place, name: str, role: Role, content: Any) -> None:
        written = torch_stream.write_file(temporary / name, content, trust=self.trust)
        self.files[name] = FileRecord(written.size_bytes, written.digest, role, self.here.rank, written.blocks)


def _with_names(source: Callable[[], Any], names: Sequence[str]) -> dict[str, Any]:
    return {**state.detached(source()), state.PARAM_NAMES: names}


def _optimizer_entries(role: StateRole, name: str, table: Sequence[TensorRow], content: dict[str, Any]) -> list[Entry]:
    names, spans = content[state.PARAM_NAMES], content.get(state.SPANS)
    return state.optimizer_entries(role, name, content["state"], names, table, spans)


def _flattened(part: _Part, flat: FlatGroups, table: Sequence[TensorRow], ties: Sequence[Sequence[str]]) -> _Part:
    """An optimizer's file with flat groups in it; of a file of masters, it without those that are in the flat groups."""
    if part.role != "optimizer":

        def less() -> Any:
            content = part.make()
            return {**content, "state": flat.without_masters(content["state"])}

        return part._replace(make=less)
    return part._replace(
        make=lambda: {**part.make(), **flat.beside_state()},
        describe=lambda content: [*part.describe(content), *flat.entries(part.name, table, ties)],
    )


def _set_aside(part: _Part) -> _Part:
    """The same with its content copied as it is now."""
    content = background.staging.copy(part.make(), (part.name,))
    return part._replace(make=lambda: content)


def _tuples(names: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group) for group in names)
