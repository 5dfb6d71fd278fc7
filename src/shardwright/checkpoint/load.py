"""Resuming from a checkpoint: chosen once, compared, verified, and only then read.

Source: api.md 9.6, design.md sections 6 and 9.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

from shardwright.checkpoint import (
    background,
    choice,
    full_resume,
    integrity,
    layout,
    reshard,
    resumed_streams,
    safe_loading,
    state,
    storage,
)
from shardwright.checkpoint.choice import Choice
from shardwright.checkpoint.collective import absolute, agree, collect, run_everywhere, run_on_rank_zero
from shardwright.checkpoint.flat_groups import users_own
from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.manifest import OBJECT
from shardwright.checkpoint.placing import Placing
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer
from shardwright.checkpoint.storage import Place
from shardwright.checkpoint.torch_file import is_checkable
from shardwright.errors import CheckpointError, UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.topology import rng
from shardwright.topology.context import world

_log = get_logger(__name__)
_CALL = "resume_from_checkpoint"
_RANDOM = "random state"


@dataclass(frozen=True)
class _Request:
    """What the caller asked for, equal on all ranks, and the objects of this rank to load into.

    moments: False leaves the optimizer's settings and state fresh, but for masters and loss scaler.
    """

    root: Place
    tag: str | int | None
    strict: bool
    trust: bool
    model: CheckpointModel
    optimizer: CheckpointOptimizer | None
    moments: bool


@dataclass(frozen=True)
class _Files:
    """The files that this rank reads; None where the checkpoint has none, or none is asked for.

    rng: whose random state.   moved: state is read from whichever files have it: the checkpoint has another layout, or shards
    of whole parameters.
    checked: then, the state files that this rank makes sure of.
    check: each part of a state file is checked when it is read.
    check_while_loading: and not before, since that is at once.
    """

    model: str | None = None
    optimizer: str | None = None
    fp16_states: str | None = None
    user_content: str | None = None
    rng: resumed_streams.Source | None = None
    moved: bool = False
    checked: tuple[str, ...] = ()
    check: bool = False
    check_while_loading: bool = False

    def state(self) -> set[str]:
        """Files of tensors."""
        own = {name for name in (self.model, self.optimizer, self.fp16_states) if name is not None}
        return own | set(self.checked)

    def others(self, *, strict: bool) -> set[str]:
        """User content, and what else must be whole."""
        content = {self.user_content} if self.user_content is not None else set()
        return content | {*(self.rng.files() if strict and self.rng is not None else ())}

    def required(self, *, strict: bool) -> set[str]:
        """The ones that must be whole."""
        return self.state() | self.others(strict=strict)


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    *,
    model: CheckpointModel | None,
    optimizer: CheckpointOptimizer | None,
    load_optimizer_states: bool | None = None,
    trust: bool | None = None,
) -> Any:
    """Continue from a checkpoint that `save_checkpoint` wrote, with the same layout or another one.

    Called by: every rank of the world, with the same arguments, after both wrappers were made.
    Collectives: a few small ones over the world, one more when the tensors are loaded.
    tag: with or without "_partial"; None takes the one in `path/newest`, or, where that one is incomplete,
    the latest complete one, and says so.   strict: names must match, and this rank's random state must be
    there. load_optimizer (or load_optimizer_states): False leaves the optimizer fresh, and fp32 masters at the
    loaded weights.
    translate_function: for full checkpoints, see `full_resume.resume`.
    load_sharded_optimizer_state: with sharded data parallelism, False takes over the fp32 masters and the loss scaler only: moments
    begin anew, settings stay. Without it there is no such state, and it has no effect.
    trust: load files that could run code.
    Random state is restored at once: each rank's own, or that of the same place in another layout (`resumed_streams`); a
    checkpoint that was made without a job has none. With the same layout the saved partition is taken over. With another one
    it is if the pipeline degree is the same, and every rank reads what it holds now out of whichever files have it, see
    `reshard`.
    Tensors are loaded when the model is partitioned: now with one stage, else during the first step.
    Returns: the user content, {} if there is none.
    Raises: the same error on every rank. CheckpointNotFoundError (a FileNotFoundError) naming folder, tag and
        what is there; CheckpointError if the checkpoint is damaged or doesn't fit the model; UsageError before the model is wrapped.
    """
    where = absolute(path)
    with_optimizer = load_optimizer if load_optimizer_states is None else load_optimizer_states
    trust = safe_loading.trusted(trust)
    agree(
        _CALL,
        {
            "path": where,
            "tag": tag,
            "partial": partial,
            "strict": strict,
            "load_optimizer": with_optimizer,
            "load_sharded_optimizer_state": load_sharded_optimizer_state,
            "has model": model is not None,
            "has optimizer": optimizer is not None,
            "has translate_function": translate_function is not None,
            "trust": trust,
        },
    )
    if model is None:
        raise UsageError(
            f"{_CALL} before the model is wrapped",
            remedy="call it after smp.DistributedModel and smp.DistributedOptimizer",
        )
    background.finish()
    root = storage.place(where)
    moments = load_sharded_optimizer_state or world().config.sharded_data_parallel_degree == 1
    if not partial:
        return full_resume.resume(
            root,
            tag,
            model,
            optimizer if with_optimizer else None,
            strict=strict,
            moments=moments,
            translate_function=translate_function,
            trust=trust,
        )
    request = _Request(root, tag, strict, trust, model, optimizer if with_optimizer else None, moments)
    skipped: dict[str, str] = {}
    while True:
        chosen, files = _choose_whole(request, skipped)
        content, random, damage = _load_chosen(chosen, files, request)
        if not damage:
            break
        _skip(chosen, damage, request, skipped)
    if random is not None:
        captured, position = random
        rng.restore(captured)
        model.restore_random_position(position)
    if rank_zero():
        moved = f", saved with {chosen.manifest.layout.describe()}" if choice.is_moved(chosen) else ""
        _log.info("resuming from %s%s", chosen.folder, moved)
    return {} if content is None else content


def _load_chosen(
    chosen: Choice, files: _Files, request: _Request
) -> tuple[Any, tuple[rng.RngState, dict[str, int]] | None, list[str]]:
    """Open the files, and load the tensors, now or when the model is partitioned.

    Returns: user content; random state; what turned out to be damaged on any rank while it was read.
    """
    run_everywhere(_CALL, lambda: _check_names(chosen, request))
    loaded = run_everywhere(_CALL, lambda: _open(chosen, files, request))
    record = chosen.manifest.partition
    if record is not None and chosen.manifest.layout.pp == world().table.degrees.pp:
        run_everywhere(_CALL, lambda: request.model.restore_partition(record))
    content = loaded.pop(files.user_content, None) if files.user_content else None
    random = loaded.pop(_RANDOM, None)
    # Without strict the checkpoint that comes next, after a damaged one, may leave some values as they are.
    reader = Placing(chosen.files, chosen.manifest.files, trust=request.trust, check=files.check, in_place=request.strict)
    damage: list[str] = []
    later = not request.model.partitioned

    def load() -> None:
        try:
            damage.extend(_load_tensors(chosen, files, reader, request))
            if later and damage:
                raise _damaged(chosen, "has been damaged since it was chosen", damage)
        except BaseException:
            if later:
                request.model.load_begins(_parts(request))  # no step may run with the values of the beginning
            raise

    if later and not files.moved:  # the files may be gone when the model is partitioned
        run_everywhere(_CALL, lambda: [reader.value(name, ()) for name in files.state()])
    request.model.run_when_partitioned(load)
    return content, random, damage


def _choose_whole(request: _Request, skipped: dict[str, str]) -> tuple[Choice, _Files]:
    """Settle on a checkpoint whose files are whole on all ranks; without a tag, go back until one is.

    State files that can be checked while they are loaded, right away, are there and of the right size; no more is known.
    """
    while True:
        chosen = run_on_rank_zero(_CALL, lambda: choice.choose(request.root, request.tag, skipped))
        name_files = _files_to_check if _goes_by_manifest(chosen) else _own_files
        files = run_everywhere(_CALL, partial_of(name_files, chosen, request))
        per_rank = collect(_CALL, partial_of(_verify, chosen, files, request))
        damage = [
            f"{problem} (rank {rank})" for rank, problems in enumerate(per_rank) for problem in problems
        ]
        if not damage:
            return chosen, files
        _skip(chosen, damage, request, skipped)


def _goes_by_manifest(chosen: Choice) -> bool:
    """May a rank need values from files of others? The same on every rank."""
    shards = chosen.manifest.layout.sharded_data_parallel_degree > 1 and bool(chosen.manifest.entries)  # see `flat_groups`
    return shards or choice.is_moved(chosen)


def _skip(chosen: Choice, damage: Sequence[str], request: _Request, skipped: dict[str, str]) -> None:
    """Go on without a damaged checkpoint, unless it is the one that was asked for."""
    if request.tag is not None:
        raise _damaged(chosen, "is damaged", damage)
    skipped[chosen.name] = text = choice.shortened(damage)
    if rank_zero():
        _log.warning("%s: skipping %s, it is damaged: %s", _CALL, chosen.folder, text)


def _damaged(chosen: Choice, what: str, damage: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{_CALL}: checkpoint {chosen.folder.name!r} {what}: {choice.shortened(damage)}",
        where=str(chosen.folder),
        remedy="resume from another checkpoint, or with tag=None from the latest complete one",
    )


def _own_files(chosen: Choice, request: _Request) -> _Files:
    """Name the files this rank reads.

    Raises: CheckpointError if the checkpoint holds no model (strict), or no optimizer although it is asked
        for.
    """
    _check_roles(chosen, request)
    manifest, here = chosen.manifest, world()

    def own(role: StateRole) -> str:
        at = here.coordinates
        return layout.state_file(manifest.layout, role, pp=at.pp, tp=at.tp, rdp=at.rdp)

    check = _can_check_parts(chosen, request)
    files = _Files(
        model=own("model") if manifest.has("model") else None,
        optimizer=own("optimizer") if request.optimizer is not None else None,
        fp16_states=own("fp16_states") if request.optimizer is not None and manifest.has("fp16_states") else None,
        user_content=layout.USER_CONTENT if layout.USER_CONTENT in manifest.files else None,
        rng=_random_source(chosen),
        check=check,
        check_while_loading=check and request.model.partitioned,
    )
    _check_listed(chosen, files, request)
    return files


def _files_to_check(chosen: Choice, request: _Request) -> _Files:
    """Name the files that this rank makes sure of where the layout is another one, so that all ranks together read each
    once.

    Raises: as `_own_files`.
    """
    _check_roles(chosen, request)
    here = world()
    names = list(reshard.files_of(chosen, with_optimizer=request.optimizer is not None))
    user_content = layout.USER_CONTENT if layout.USER_CONTENT in chosen.manifest.files else None
    check = _can_check_parts(chosen, request)
    files = _Files(
        user_content=user_content,
        rng=_random_source(chosen),
        checked=tuple(names[here.rank :: here.size]),
        moved=True,
        check=check,
        check_while_loading=check and request.model.partitioned,
    )
    _check_listed(chosen, files, request)
    return files


def _check_listed(chosen: Choice, files: _Files, request: _Request) -> None:
    if unlisted := files.required(strict=request.strict) - chosen.manifest.files.keys():
        raise CheckpointError(f"the manifest of {chosen.folder.name!r} lists no {', '.join(sorted(unlisted))}")


def _can_check_parts(chosen: Choice, request: _Request) -> bool:
    """May parts of all state files be checked when they are read? Equal on all ranks."""
    names = reshard.files_of(chosen, with_optimizer=request.optimizer is not None)
    every = all(is_checkable(chosen.manifest.files[name]) for name in names)
    return every and not integrity.checksums_skipped()


def _random_source(chosen: Choice) -> resumed_streams.Source | None:
    """Whose random state this rank takes; None from a checkpoint that has none."""
    return resumed_streams.source(chosen.manifest.layout, world().coordinates) if chosen.manifest.has("rng") else None


def _check_roles(chosen: Choice, request: _Request) -> None:
    manifest = chosen.manifest
    if request.strict and not manifest.has("model"):
        raise CheckpointError(
            f"checkpoint {chosen.folder.name!r} holds no model: it was saved with model=None",
            remedy="resume from another checkpoint; strict=False goes on with the present weights",
        )
    if request.optimizer is not None and not manifest.has("optimizer"):
        raise CheckpointError(
            f"checkpoint {chosen.folder.name!r} holds no optimizer state: it was saved with optimizer=None",
            remedy="resume with load_optimizer=False to go on with a fresh optimizer",
        )


def _verify(chosen: Choice, files: _Files, request: _Request) -> list[integrity.Problem]:
    checksums = not integrity.checksums_skipped()
    check, place, manifest = integrity.check_files, chosen.folder, chosen.manifest
    if not files.check_while_loading:
        return check(place, manifest, files.required(strict=request.strict), checksums=checksums)
    sizes = check(place, manifest, files.state(), checksums=False)
    return sizes + check(place, manifest, files.others(strict=request.strict), checksums=checksums)


def _check_names(chosen: Choice, request: _Request) -> None:
    """Compare the whole model with the whole checkpoint, before anything is read."""
    if not chosen.manifest.has("model") or not chosen.manifest.entries:  # without entries: see `unlisted`
        return
    entries = [entry for entry in chosen.manifest.entries if entry.role == "model" and entry.dtype != OBJECT]
    saved = {entry.name: entry.shape for entry in entries}
    present = {name: tuple(shape) for name, shape in request.model.names_and_shapes().items()}
    problems = [
        f"{name!r} saved {list(saved[name])}, present {list(shape)}"
        for name, shape in present.items()
        if name in saved and saved[name] != shape
    ]
    if request.strict:
        lost = [f"{name!r} is only in the checkpoint" for name in saved if name not in present]
        new = [f"{name!r} is only in the model" for name in present if name not in saved]
        pairs = itertools.chain.from_iterable(itertools.zip_longest(lost, new))  # the first few show both
        problems += [problem for problem in pairs if problem is not None]
    if problems:
        raise CheckpointError(
            f"checkpoint {chosen.folder.name!r} doesn't fit the model: {choice.shortened(problems)}",
            remedy="build the model as it was when saved, and mark the same modules for tensor parallelism, whatever the degree"
            " (also where it is 1); strict=False tolerates names, not shapes",
        )


def _open(chosen: Choice, files: _Files, request: _Request) -> dict[str, Any]:
    """Read this rank's small files.

    Returns: content by file name; under `_RANDOM` the random state of this rank, if it could be read.
    """
    loaded = {}
    if (name := files.user_content) is not None:
        loaded[name] = users_own(safe_loading.read_file(chosen.files / name, trust=request.trust, mmap=False))
    if files.rng is None:
        return loaded
    try:
        loaded[_RANDOM] = resumed_streams.read(chosen, files.rng, trust=request.trust)
    except CheckpointError as error:
        if request.strict:
            raise
        _log.warning("%s: random state not restored: %s", _CALL, error.what)
    return loaded


def _load_tensors(chosen: Choice, files: _Files, reader: Placing, request: _Request) -> list[str]:
    """Load into the partitioned model and optimizer: on all ranks, or with an error on all.

    Returns: what is damaged, by rank. What was loaded until that was found is of no use: the model refuses to run.
    """
    call = f"{_CALL}, loading {chosen.folder.name!r}"
    planned: list[Callable[[], None]] = []

    def plan() -> None:
        if files.moved:
            to = chosen, request.model, request.optimizer, reader
            with_model = chosen.manifest.has("model")
            planned.append(reshard.plan_load(*to, with_model=with_model, strict=request.strict, moments=request.moments))
        else:
            planned.append(_plan_own(files, reader, request))

    def damage_of(work: Callable[[], None]) -> list[str]:
        def carry_out() -> str | None:
            try:
                work()
            except integrity.Damaged as error:
                return error.what
            return None

        per_rank = collect(call, carry_out)
        return [f"{problem} (rank {rank})" for rank, problem in enumerate(per_rank) if problem is not None]

    if damage := damage_of(plan):
        return damage
    parts = _parts(request)
    if not request.strict and (damage := damage_of(reader.check_all)):
        return damage
    half_before = request.model.load_begins(parts)
    if request.strict and (damage := damage_of(reader.check_all)):
        return damage
    run_everywhere(call, planned[0])
    left = half_before & {"model"} if not (request.strict or _has_all_names(chosen, request)) else set()
    request.model.load_ends(parts - left)
    return []


def _parts(request: _Request) -> set[StateRole]:
    return {"model"} if request.optimizer is None else {"model", "optimizer"}


def _has_all_names(chosen: Choice, request: _Request) -> bool:
    """Does the load without strict give each tensor of the model its value?"""
    return request.model.names_and_shapes().keys() <= {entry.name for entry in chosen.manifest.entries if entry.role == "model"}


def _plan_own(files: _Files, reader: Placing, request: _Request) -> Callable[[], None]:
    """Ask for this rank's own files, as it wrote them, in the memory that model and optimizer have. Returns: what loads them."""
    model, optimizer, strict = request.model, request.optimizer, request.strict
    plain: dict[str, Any] = {}
    if files.model is not None:
        present = model.local_state_dict()
        saved = reader.value(files.model, ())
        plain = {n: reader.placed(files.model, v, present.get(n)) for n, v in saved.items() if n != state.PARTIAL_MARK}
    attached: dict[str, Any] = {}
    if files.optimizer is not None and optimizer is not None:
        names = optimizer.group_names()
        attached = state.attach_by_name(reader.value(files.optimizer, ()), names, strict=strict)
        attached = reader.placed(files.optimizer, attached, optimizer.local_state_dict(gather_if_shard=False))
        if files.fp16_states is not None:
            half = reader.value(files.fp16_states, ())
            masters = state.attach_by_name(half, names, strict=strict)
            masters = reader.placed(files.fp16_states, masters, optimizer.half_precision_state())
            scaler = {key: value for key, value in half.items() if key not in ("state", "param_groups", state.SPANS)}
            attached = state.with_half_precision(attached, masters, reader.placed(files.fp16_states, scaler))

    def load() -> None:
        reader.run()
        # What lies in the model already is not copied by this: torch sees that source and target are the same memory.
        if files.model is not None:
            model.load_local(plain, strict=strict)
        if attached and optimizer is not None:
            optimizer.load_local({**attached, state.PARTIAL_MARK: True})

    return load
