"""Writing a checkpoint in another layout: one file after the other, published in one step."""

from __future__ import annotations

import dataclasses
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

import shardwright
from shardwright.checkpoint import integrity, layout, random_state, resumed_streams, state, storage, torch_stream
from shardwright.checkpoint.exchange.export import put
from shardwright.checkpoint.exchange.source import Source
from shardwright.checkpoint.flat_groups import MODULE, in_module
from shardwright.checkpoint.integrity import HashingWriter
from shardwright.checkpoint.layout import Role, StateRole
from shardwright.checkpoint.manifest import OBJECT, Entry, FileRecord, Manifest, merge_entries
from shardwright.checkpoint.plan import slow_to_fast
from shardwright.checkpoint.relayout.flat import FlatFiles
from shardwright.checkpoint.relayout.recut import origin_of
from shardwright.checkpoint.relayout.target import Member, ModelFile, OptimizerFile, Row, Target
from shardwright.checkpoint.state import TensorRow
from shardwright.checkpoint.storage import Place
from shardwright.errors import CheckpointError
from shardwright.topology.ranks import Degrees, RankTable

Advance = Callable[[int], None]

_BLOCK_BYTES = 4 << 20


def rewrite(source: Source, target: Target, root: Place, tag: str, *, trust: bool, advance: Advance) -> Manifest:
    """Write `root/{tag}_partial` as a job of the target's layout would save what is in the source; make it the newest.

    Memory: what one file holds. The source's files are compared with their checksums first. Random state is what ranks would
    take if they resumed from the source; that of a partial source's ranks is kept beside, and comes back with their layout.
    advance: called with the bytes of each file that is written.
    Raises: CheckpointError if the source is damaged or lacks something; OSError if the disk refuses. Then nothing is left.
    """
    _check(source, target)
    folder = layout.partial_folder(tag)
    store, save_id = storage.of(root), uuid.uuid4().hex
    store.clean_name(root, folder)
    if (root / folder).exists():
        raise CheckpointError(f"{root / folder} exists", remedy="give another folder, or another --tag")
    store.prepare(root)
    temporary = store.saving(root, folder, save_id)
    store.begin(temporary)
    try:
        work = _Rewrite(source, target, temporary, trust, advance)
        manifest = dataclasses.replace(
            work.write(folder.removesuffix(layout.PARTIAL_SUFFIX)), save_id=save_id, data_folder=store.data_folder(save_id)
        )
        store.commit(temporary, root / folder, manifest.to_bytes(), unique=save_id)
    except BaseException:
        store.discard(temporary)
        raise
    store.replace_text(root / layout.NEWEST, folder, unique=save_id)
    return manifest


def _check(source: Source, target: Target) -> None:
    """Is the source whole, and is everything of it somewhere in the target?"""
    checkpoint, manifest = source.checkpoint, source.manifest
    skipped = integrity.checksums_skipped()
    folder = checkpoint.root / checkpoint.name if checkpoint.kind == "partial" else checkpoint.root
    problems = integrity.check_files(folder, manifest, manifest.files.keys(), checksums=not skipped)
    if problems:
        raise CheckpointError(
            f"{checkpoint.name} is damaged: {'; '.join(map(str, problems[:5]))}",
            where=str(checkpoint.place),
            remedy="convert another checkpoint",
        )
    saved = {entry.name: entry.shape for entry in source.entries("model") if entry.dtype != OBJECT}
    wanted = {row.name for file in target.models for row in file.rows}
    known = {entry.name for entry in source.entries("model")}
    odd = [f"{name!r} is only {where}" for name, where in _unequal(known, wanted)]
    for row in (row for file in target.models for row in file.rows if row.name in saved):
        shape = saved[row.name]
        if len(row.box) != len(shape) or any(stop > size for (_, stop), size in zip(row.box, shape, strict=True)):
            odd.append(f"{row.name!r} is {list(shape)} in the checkpoint, and of another shape in the layout")
    if source.has_optimizer:
        held = {member.row.name for file in target.optimizers for group in file.groups for member in group}
        trained = {name for group in manifest.param_groups for name in group}
        odd += [f"the optimizer has {n!r} only {where}" for n, where in _unequal(trained, held)]
    if odd:
        raise CheckpointError(
            f"the layout is not one of this model: {'; '.join(odd[:5])}{'; ...' if len(odd) > 5 else ''}",
            where=str(checkpoint.place),
        )


def _unequal(saved: set[str], wanted: set[str]) -> list[tuple[str, str]]:
    return [
        *((name, "in the checkpoint") for name in sorted(saved - wanted)),
        *((name, "in the layout") for name in sorted(wanted - saved)),
    ]


class _Rewrite:
    """One conversion."""

    def __init__(self, source: Source, target: Target, temporary: Place, trust: bool, advance: Advance) -> None:
        self._temporary = temporary
        self._source = source
        self._target = target
        self._trust = trust
        self._advance = advance
        self._files: dict[str, FileRecord] = {}
        self._entries: list[list[Entry]] = []
        self._model = {entry.name: entry for entry in source.entries("model")}
        self._states: dict[tuple[str, str], list[Entry]] = {}
        for entry in source.manifest.entries:
            if entry.role != "model":
                self._states.setdefault((entry.role, entry.name), []).append(entry)
        self._flat = FlatFiles(source, target)
        self._tie = {name: names[0] for names in source.manifest.ties for name in names}

    def write(self, tag: str) -> Manifest:
        """All files. Returns: what the manifest says of them."""
        for model in self._target.models:
            self._model_file(model)
        if self._source.has_optimizer:
            roles: list[StateRole] = ["optimizer"]
            if any(entry.role == "fp16_states" for entry in self._source.manifest.entries):
                roles.append("fp16_states")
            for file in self._target.optimizers:
                for role in roles:
                    self._optimizer_file(role, file)
        origin = self._beside()
        return dataclasses.replace(
            self._source.manifest,
            kind="partial",
            tag=tag,
            saved_at_s=int(time.time()),
            layout=self._target.layout,
            versions={
                "shardwright": shardwright.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            files=dict(sorted(self._files.items())),
            entries=merge_entries(self._entries),
            partition=self._target.partition,
            converted_from=origin,
        )

    # ------------------------------------------------------------------ the model

    def _model_file(self, file: ModelFile) -> None:
        content: dict[str, Any] = {}
        made: dict[str, Any] = {}  # tied tensors are one tensor in the file too
        table = []
        for row in file.rows:
            if row.name in self._flat.names:
                continue
            entry = self._model[row.name]
            first = self._tie.get(row.name, row.name)
            if first not in made:
                made[first] = self._value(entry, row)
            content[row.name] = made[first]
            if entry.dtype != OBJECT:
                table.append(TensorRow(row.name, entry.shape, entry.dtype, row.offset, row.shape))
        if self._target.layout.sharded_data_parallel_degree == 1:
            self._write(file.name, "model", {**content, state.PARTIAL_MARK: True}, file.rank)
            self._entries.append(state.model_entries(file.name, content, table))
            return
        everything = {row.name: content.get(row.name) for row in file.rows}
        self._write(file.name, "model", in_module(everything, self._flat.names, state.PARTIAL_MARK), file.rank)
        self._entries.append(state.model_entries(file.name, content, table, (MODULE,)))

    def _value(self, entry: Entry, row: Row) -> Any:
        if entry.dtype == OBJECT:
            return self._source.whole(entry)
        return self._source.part(entry, row.offset, row.shape)

    # ------------------------------------------------------------------ the optimizer

    def _optimizer_file(self, role: StateRole, file: OptimizerFile) -> None:
        members = [member for group in file.groups for member in group]
        names = [member.row.name for member in members]
        states = {index: values for index, member in enumerate(members) if (values := self._state(role, member))}
        flat = self._flat.of(file)
        if flat is not None and role == "fp16_states":
            states = flat.without_masters(states)
        content: dict[str, Any] = {"state": states, "param_groups": self._groups(role, file)}
        spans = {member.row.name: _span(member) for member in members if member.span is not None}
        if role == "optimizer":
            content[state.PARTIAL_MARK] = True
            content.update({} if flat is None else flat.beside_state())
        if file.has_pieces:
            content[state.SPANS] = spans
        if role == "fp16_states":
            content.update(self._source.scaler())
        content[state.PARAM_NAMES] = names
        table = [
            TensorRow(m.row.name, self._model[m.row.name].shape, self._model[m.row.name].dtype, m.row.offset, m.row.shape)
            for m in members
        ]
        name = file.names[role]
        self._write(name, role, content, file.rank)
        self._entries.append(state.optimizer_entries(role, name, states, names, table, spans))
        if flat is not None and role == "optimizer":
            self._entries.append(list(flat.entries(name, self._flat.with_ties(table), self._source.manifest.ties)))

    def _groups(self, role: StateRole, file: OptimizerFile) -> list[dict[str, Any]]:
        """torch's groups, with their settings beside the moments only."""
        saved = self._source.groups()
        named = self._source.groups_are_named
        if len(saved) != len(file.groups):
            raise CheckpointError(f"the optimizer has {len(saved)} parameter groups, the layout {len(file.groups)}")
        groups: list[dict[str, Any]] = []
        index = 0
        for options, members in zip(saved, file.groups, strict=True):
            group = {"params": list(range(index, index + len(members)))}
            index += len(members)
            names = {state.PARAM_NAMES: [m.row.name for m in members]} if named else {}
            groups.append({**options, **names, **group} if role == "optimizer" else group)
        return groups

    def _state(self, role: StateRole, member: Member) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for entry in self._states.get((role, member.row.name), ()):
            put(values, state.path_of(entry), self._state_value(entry, member))
        return values

    def _state_value(self, entry: Entry, member: Member) -> Any:
        like_parameter = entry.shape == self._model[entry.name].shape and state.path_of(entry)[-1:] != ("step",)
        if entry.dtype == OBJECT or not like_parameter:
            found = self._source.whole(entry)
            return found.clone() if isinstance(found, torch.Tensor) else found
        part = self._source.part(entry, member.row.offset, member.row.shape)
        if member.span is None:
            return part
        start, stop = member.span
        order = slow_to_fast(member.row.shape, member.strides)
        return part.permute(order).reshape(-1)[start:stop].clone()

    # ------------------------------------------------------------------ the rest

    def _beside(self) -> Mapping[str, Any] | None:
        """Files that are no state of the new layout's ranks. Returns: what the manifest says of where they are from."""
        manifest, target = self._source.manifest, self._target
        record = manifest.role_of("user_content")
        if self._flat.changes_user_content:
            content = self._flat.user_content(self._source.user_content())
            self._write(layout.USER_CONTENT, "user_content", content, 0)
        elif record is not None:
            self._copy(record, layout.USER_CONTENT, "user_content", 0)
        if target.partition is not None:
            old_form = {
                "partition": target.partition.get("stage_of"),
                "pp_size": target.layout.pp,
                "tp_size": target.layout.tp,
                "version": shardwright.__version__,
            }
            self._write(layout.PARTITION_INFO, "partition_info", old_form, 0)
        origin = origin_of(manifest)
        if origin is None:
            self._random_states(manifest.layout)
            return None
        old = layout.Layout.from_record(origin["layout"])
        returns = not old.differences(target.layout) and origin["partition"] == target.partition
        for rank in range(old.world_size):
            if (kept := self._random_file(rank)) in manifest.files:
                name = layout.rng_file(rank) if returns else layout.origin_rng_file(rank)
                self._copy(kept, name, "rng" if returns else "origin_rng", rank if returns else 0)
        if returns:
            return None
        self._random_states(old)
        return origin

    def _random_states(self, old: layout.Layout) -> None:
        """What ranks of the new layout would take if they resumed from the source, or from what that was converted from."""
        manifest, reader = self._source.manifest, self._source.reader
        listed = manifest.role_of("rng") if manifest.kind == "full" else None
        if listed is None and self._random_file(0) not in manifest.files:
            return

        def saved(rank: int) -> resumed_streams.Unpacked:
            found = reader.value(self._random_file(rank), ()) if listed is None else reader.value(listed, (rank,))
            return random_state.unpack(found)

        new = self._target.layout
        degrees = Degrees(new.pp, new.tp, new.rdp, new.sharded_data_parallel_degree)
        table = RankTable(degrees, new.placement)
        for rank in range(new.world_size):
            where = resumed_streams.source(old, table.coordinates(rank))
            captured, position = resumed_streams.combined(where, [saved(there) for there in where.ranks()])
            self._write(layout.rng_file(rank), "rng", random_state.pack(captured, position), rank)

    def _random_file(self, rank: int) -> str:
        """Of a partial source: where the random state of a rank of the layout that a job has saved is."""
        return layout.rng_file(rank) if self._source.manifest.converted_from is None else layout.origin_rng_file(rank)

    def _write(self, name: str, role: Role, content: Any, rank: int) -> None:
        written = torch_stream.write_file(self._temporary / name, content, trust=self._trust)
        self._files[name] = FileRecord(written.size_bytes, written.digest, role, rank, written.blocks)
        self._advance(written.size_bytes)

    def _copy(self, source: str, name: str, role: Role, rank: int) -> None:
        record = self._source.manifest.files[source]
        place = self._source.checkpoint.place
        writer = HashingWriter(self._temporary / name)
        try:
            with storage.of(place).open(place / source) as file:
                while block := file.read(_BLOCK_BYTES):
                    writer.write(block)
        except BaseException:
            writer.close()
            raise
        writer.finish()
        self._files[name] = dataclasses.replace(record, role=role, writer=rank)
        self._advance(record.size_bytes)


def _span(member: Member) -> list[Any]:
    start, stop = cast(tuple[int, int], member.span)
    total = 1
    for size in member.row.shape:
        total *= size
    return [start, stop, total, *([] if member.strides is None else [list(member.strides)])]
