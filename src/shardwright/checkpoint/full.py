"""Full checkpoints: the whole model in one file that plain torch, and transformers, can load.

    path/
      {tag}                   torch.save of the state dict itself
      user_content_{tag}      what resume gives back
      optimizer_{tag}         the whole optimizer state, if an optimizer was given
      rng_{tag}               the random state of every rank, in rank order
      manifest_{tag}.json     written last: the commit mark
      newest                  the tag

Several loose files can't be replaced in one step. While a tag is saved again, each old file keeps a second name that
ends in ".previous"; a manifest, old or new, is valid with whichever of the two has its checksum. So at every moment
one of the two saves is whole.

A file without a manifest is taken as it is: scripts write `fullmodel.pt` themselves.

Source: api.md 9.5 to 9.7, design.md section 6.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial as partial_of
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import shardwright
from shardwright.checkpoint import (
    background,
    full_files,
    layout,
    random_state,
    safe_loading,
    state,
    storage,
)
from shardwright.checkpoint.collective import collect, present_layout, run_everywhere, run_on_rank_zero
from shardwright.checkpoint.deferred import Deferred, filled
from shardwright.checkpoint.layout import Role
from shardwright.checkpoint.manifest import Entry, FileRecord, Manifest, Slice
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.checkpoint.storage.attempts import attempt
from shardwright.checkpoint.torch_stream import Stored, StreamedTorchFile
from shardwright.checkpoint.whole import Put, WholeModel, WholeOptimizer
from shardwright.errors import CheckpointError
from shardwright.log import get_logger, rank_zero
from shardwright.topology import rng
from shardwright.topology.context import world

_log = get_logger(__name__)

Values = Callable[[Sequence[Deferred]], Sequence[torch.Tensor]]

_BATCH_BYTES = 16 << 20


# ------------------------------------------------------------------ saving


def save(
    root: Place,
    tag: str,
    model: CheckpointModel | None,
    optimizer: CheckpointOptimizer | None,
    user_content: Any,
    *,
    translate: bool,
    trust: bool,
    blocking: bool = True,
) -> None:
    """Write a full checkpoint, and make it the one that `newest` names.

    Called by: every rank of the world. Collectives: messages of tensors to world rank 0, which writes them as they come; a
        few small ones. No rank needs memory for more than the largest tensor (of a translation: what one result is made of).
    translate: give tensors the names of the model before modules were replaced.
    blocking: False returns when all tensors are in host memory of rank 0, which writes while training goes on; what fails then
        is raised by the next save or resume.
    Raises: the same error on every rank; an earlier checkpoint of that tag is intact then.
    """
    call = f"save_checkpoint of {tag!r}"
    started = time.monotonic()
    position = {} if model is None else model.random_position()
    random_states = collect(call, lambda: random_state.pack(rng.capture(), position))
    save_id = run_on_rank_zero(call, lambda: _prepare(root, tag))
    job = _Save(root, tag, save_id, trust, blocking)
    try:
        run_on_rank_zero(call, lambda: job.write_user_content(user_content))
        run_on_rank_zero(call, lambda: job.write(full_files.random_state_file(tag), "rng", random_states))
        content: Mapping[str, Any] = {}
        if model is not None:
            content = job.write_model(call, model, translate=translate)
        if optimizer is not None:
            whole = WholeOptimizer(call, optimizer, partitioned=model is None or model.partitioned)
            job.write_tensors(call, full_files.optimizer_file(tag), "optimizer", whole.content, whole.send)
        groups = () if optimizer is None else tuple(tuple(names) for names in optimizer.full_group_names())

        origin = None if model is None else model.origin_record()
        if origin is not None and translate:
            origin = {**origin, "renamings": [], "running": {"renamings": origin["renamings"], **job.running_names}}
        partition = None if model is None else model.partition_record()
        structure = None if model is None or world().rank > 0 else model.structure_record()
        described = _model_entries(tag, content), _ties(content), groups, present_layout(), origin, partition, structure
        if blocking:
            size_bytes = run_on_rank_zero(call, lambda: job.publish(*described))
    except BaseException:
        if world().rank == 0:
            job.discard()
        raise

    def tell(size_bytes: int) -> None:
        _log.info("saved %s: %.1f MB in %.1f s", root / tag, size_bytes / 1e6, time.monotonic() - started)

    if not blocking:
        here = world().rank
        background.start(call, lambda: tell(job.write_set_aside(*described)) if here == 0 else None)
    elif rank_zero():
        tell(size_bytes)


class _Save:
    """The files of one save, which are put on the disk under names that nobody reads. World rank 0 writes."""

    def __init__(self, root: Place, tag: str, save_id: str, trust: bool, blocking: bool = True) -> None:
        self._blocking = blocking
        self._set_aside: list[Callable[[], None]] = []
        self._root = root
        self._tag = tag
        self._save_id = save_id
        self._trust = trust
        self._files: dict[str, FileRecord] = {}
        self.running_names: dict[str, Any] = {}
        """Of a translated model, for the manifest: "names" and "ties" before."""

    def write_model(self, call: str, model: CheckpointModel, *, translate: bool) -> Mapping[str, Any]:
        """Write the model tensor by tensor. Called by: every rank. Returns: on rank 0, what is in the file, tensors deferred."""
        whole = WholeModel(call, model)
        content = whole.content
        if translate:
            self.running_names = {"names": list(content), "ties": _ties(content)}
            content = whole.in_original_names(model)
        self.write_tensors(call, self._tag, "model", content, partial_of(whole.send, wanted=content.values()))
        return content

    def write_tensors(
        self, call: str, name: str, role: Role, content: Any, send: Callable[[Put], None]
    ) -> None:
        """Write a file of tensors that come one by one. Called by: every rank.

        content: with deferred tensors, which `send` gives. What is to be written in the background is only copied.
        """
        if not self._blocking:
            kept: list[tuple[Deferred, torch.Tensor]] = []

            def keep(tensor: Deferred, value: torch.Tensor) -> None:
                kept.append((tensor, background.staging.copy(value, ("full", role, len(kept)))))

            send(keep)
            if world().rank == 0:
                copied = tree_map(_own_leaf, content)
                self._set_aside.append(lambda: self._write_kept(name, role, copied, kept))
            return
        path = self._temporary(name)
        file = run_everywhere(call, lambda: StreamedTorchFile(path) if world().rank == 0 else None)
        stored: dict[int, Stored] = {}

        def put(tensor: Deferred, value: torch.Tensor) -> None:
            assert file is not None
            stored[id(tensor)] = file.add(value)

        def finish() -> None:
            assert file is not None
            self._add(name, role, file.finish(filled(content, stored), name))
            safe_loading.check_readable(path, trust=self._trust, name=name)

        try:
            send(put)
            run_on_rank_zero(call, finish)
        finally:
            if file is not None:
                file.close()

    def _write_kept(self, name: str, role: Role, content: Any, kept: Iterable[tuple[Deferred, torch.Tensor]]) -> None:
        """Write a file of tensors that are here, or come by one by one. Called by: rank 0."""
        path = self._temporary(name)
        file = StreamedTorchFile(path)
        try:
            stored = {id(tensor): file.add(value) for tensor, value in kept}
            self._add(name, role, file.finish(filled(content, stored), name))
            safe_loading.check_readable(path, trust=self._trust, name=name)
        finally:
            file.close()

    def write_in_turn(self, name: str, role: Role, content: Any, values: Values) -> None:
        """Write a file whose deferred tensors are got when they are written, some at a time. Called by: rank 0."""

        def work() -> None:
            wanted = {id(t): t for t in tree_leaves(content) if isinstance(t, Deferred)}
            parts = _batches(wanted.values())
            self._write_kept(name, role, content, (pair for part in parts for pair in zip(part, values(part), strict=True)))

        path = self._temporary(name)
        # What is lost of an upload can't be sent again alone, so the file begins again.
        attempt("write", path, work) if isinstance(path, RemotePath) else work()

    def write_set_aside(self, *described: Any) -> int:
        """Write what was only copied, and publish; on a thread of rank 0. Returns bytes."""
        try:
            for work in self._set_aside:
                work()
            return self.publish(*described)
        except BaseException:
            self.discard()
            raise

    def write_user_content(self, content: Any) -> None:
        """Write what resume gives back, first of all, since it may be refused. Called by: rank 0."""
        self.write(full_files.user_content_file(self._tag), "user_content", {} if content is None else content)

    def write(self, name: str, role: Role, content: Any) -> None:
        """Write a file. Called by: rank 0."""
        path = self._temporary(name)
        self._add(name, role, safe_loading.write_file(path, content, trust=self._trust, name=name))

    def _add(self, name: str, role: Role, written: safe_loading.Written) -> None:
        self._files[name] = FileRecord(written.size_bytes, written.digest, role, writer=0)

    def publish(
        self,
        entries: tuple[Entry, ...],
        ties: tuple[tuple[str, ...], ...],
        groups: tuple[tuple[str, ...], ...],
        layout_then: layout.Layout,
        origin: Mapping[str, Any] | None = None,
        partition: Mapping[str, Any] | None = None,
        structure: Mapping[str, Any] | None = None,
    ) -> int:
        """Give the files their names, the manifest last, and move `newest`. Called by: rank 0. Returns bytes."""
        manifest = Manifest(
            tag=self._tag,
            save_id=self._save_id,
            saved_at_s=int(time.time()),
            layout=layout_then,
            versions={
                "shardwright": shardwright.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            files=self._files,
            entries=entries,
            partition=partition,
            structure=structure,
            ties=ties,
            param_groups=groups,
            kind="full",
            origin=origin,
        )
        data = manifest.to_bytes()
        mark = full_files.manifest_file(self._tag)
        store = storage.of(self._root)
        store.put(self._temporary(mark), data)
        kept = [*self._files, *(name for name in full_files.all_files(self._tag)[:-1] if name not in self._files), mark]
        for name in kept:
            store.keep_as(self._root / name, self._root / (name + layout.PREVIOUS_SUFFIX))
        for name in (*self._files, mark):
            store.move(self._temporary(name), self._root / name)
        for name in full_files.all_files(self._tag)[1:-1]:
            if name not in self._files:
                (self._root / name).unlink(missing_ok=True)
        store.sync_folder(self._root)
        store.replace_text(self._root / layout.NEWEST, self._tag, unique=self._save_id)
        for name in kept:
            (self._root / (name + layout.PREVIOUS_SUFFIX)).unlink(missing_ok=True)
        return len(data) + sum(record.size_bytes for record in self._files.values())

    def discard(self) -> None:
        """Delete what was not published."""
        for path in self._root.glob(f"{layout.WORK_PREFIX}*{self._save_id}"):
            storage.of(path).discard(path)

    def _temporary(self, name: str) -> Place:
        return self._root / layout.saving_folder(name, self._save_id)


def _batches(tensors: Iterable[Deferred]) -> Iterator[list[Deferred]]:
    batch: list[Deferred] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if batch and size + num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += num_bytes
    if batch:
        yield batch


def _own_leaf(value: Any) -> Any:
    """A tensor that is in the file besides the deferred ones, as it is now."""
    return value.detach().clone() if isinstance(value, torch.Tensor) and not isinstance(value, Deferred) else value


def _prepare(root: Place, tag: str) -> str:
    """Rank 0: clean up what interrupted saves left. Returns the save's id."""
    save_id = uuid.uuid4().hex
    store = storage.of(root)
    store.prepare(root)
    if (root / tag).is_dir():
        raise CheckpointError(f"{root / tag} is a folder, so no full checkpoint can have that name")
    store.clean_leftovers(root, unique=save_id)
    full_files.settle_leftovers(root, tag)
    return save_id


def _model_entries(tag: str, content: Mapping[str, Any]) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            "model", n, None, tuple(t.shape), state.dtype_name(t), (Slice(tag, (n,), (0,) * t.dim(), tuple(t.shape)),)
        )
        for n, t in content.items()
        if isinstance(t, torch.Tensor)
    )


def _ties(content: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Names that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


# ------------------------------------------------------------------ without a job


def write_new(
    root: Place,
    tag: str,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    user_content: Any,
    *,
    ties: tuple[tuple[str, ...], ...],
    groups: tuple[tuple[str, ...], ...],
    layout_then: layout.Layout,
    values: Values,
    trust: bool,
) -> int:
    """Write a full checkpoint under a tag that is new, in one process, and make it the newest. Returns: bytes.

    optimizer: in torch's form with `state.PARAM_NAMES`.   layout_then: what the manifest says of the job.
    values: gets deferred tensors of the content; at most 16 MiB at once, or one that is larger.
    Raises: CheckpointError if something of that tag is there; nothing is left then, nor after any other error.
    """
    for name in full_files.all_files(tag):
        storage.of(root).clean_name(root, name)
        if (root / name).exists():
            raise CheckpointError(f"{root / name} exists", remedy="give another tag, or another folder")
    job = _Save(root, tag, uuid.uuid4().hex, trust)
    try:
        job.write_in_turn(tag, "model", model, values)
        if optimizer is not None:
            job.write_in_turn(full_files.optimizer_file(tag), "optimizer", optimizer, values)
        job.write_in_turn(full_files.user_content_file(tag), "user_content", user_content, values)
        return job.publish(_model_entries(tag, model), ties, groups, layout_then)
    except BaseException:
        job.discard()
        raise
