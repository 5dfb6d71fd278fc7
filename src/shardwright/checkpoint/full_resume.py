"""Resuming from full checkpoints, and from whole state dicts of other programs. The files are those of `full`.

Source: api.md 9.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.checkpoint import full_files, resumed_streams, safe_loading, state, unread
from shardwright.checkpoint.collective import present_layout, run_everywhere, run_on_rank_zero
from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.errors import CheckpointError, PartitionError
from shardwright.log import get_logger, rank_zero
from shardwright.topology import rng
from shardwright.topology.context import world

_log = get_logger(__name__)

Translate = Callable[[dict[str, Any]], dict[str, Any]]


def resume(
    root: Place,
    tag: str | int | None,
    model: CheckpointModel,
    optimizer: CheckpointOptimizer | None,
    *,
    strict: bool,
    moments: bool,
    translate_function: Translate | None,
    trust: bool,
) -> Any:
    """Load a full checkpoint, or a whole state dict that a script has put there, into any layout.

    Called by: every rank of the world. Collectives: a few small ones; tensors are read from the file by every rank, mapped,
        each only what it needs.
    tag: None takes the one in `newest`. `pytorch_model.bin` also stands for what transformers writes in its place.
    moments: False takes only masters and the loss scaler of the optimizer's state.
    translate_function: makes the model's own names of the file's; without it names of the original model are recognised.
    Optimizer state is loaded where the checkpoint has some. Random state as from a partial checkpoint, if the checkpoint has some:
    with the same layout each rank's own; where training goes on, with optimizer state, the saved partition is taken over then.
    All is loaded at once, except into a model whose parameters have no memory before they are placed.
    Returns: the user content, {} if there is none.
    Raises: as `load.resume_from_checkpoint`, the same error on every rank.
    """
    call = "resume_from_checkpoint(partial=False)"
    name = run_on_rank_zero(call, lambda: full_files.chosen_tag(root, tag))
    found = run_on_rank_zero(call, lambda: full_files.find(root, name, strict=strict))

    def read() -> tuple[dict[str, Any], Any, Any, resumed_streams.Unpacked | None]:
        content: dict[str, Any] = {}
        for path in found.model:
            content.update(full_files.read_state_dict(path, trust=trust))
        if translate_function is not None:
            content = _translated(content, translate_function)
        _tie_again(content, model)
        whole_state = None
        if optimizer is not None and found.optimizer is not None:
            whole_state = full_files.read_nested(found.optimizer, trust=trust)
        user: Any = {}
        if found.user_content is not None and found.user_content.stat().st_size:
            user = safe_loading.read_file(found.user_content, trust=trust, mmap=False)
        return content, whole_state, user, _random_state(found, strict=strict, trust=trust)

    content, whole_state, user, random = run_everywhere(call, read)
    if optimizer is not None and whole_state is None and found.manifest is not None and rank_zero():
        _log.warning("full checkpoint %r has no optimizer state: the optimizer begins anew", name)
    if not found.model and strict:
        raise CheckpointError(
            f"checkpoint {name!r} holds no model: it was saved with model=None",
            remedy="resume from another checkpoint; strict=False goes on with the present weights",
        )

    fitted: dict[StateRole, dict[str, Any]] = {}

    def fit() -> None:
        if found.model:
            fitted["model"] = model.fitted(content, strict=strict, translated=translate_function is not None)
        if whole_state is not None and optimizer is not None:
            fitted["optimizer"] = optimizer.fitted(whole_state, strict=strict)
            if not moments:
                present = optimizer.local_state_dict(gather_if_shard=False)
                fitted["optimizer"] = state.without_moments(fitted["optimizer"], present)

    def load() -> None:
        if "model" in fitted:
            model.load_whole(fitted["model"], strict=strict)
        if "optimizer" in fitted and optimizer is not None:
            optimizer.load_whole(fitted["optimizer"])

    def load_everywhere() -> None:
        run_everywhere(call, fit)
        half_before = model.load_begins(fitted)
        try:
            run_everywhere(f"{call}, loading {name!r}", load)
        except BaseException:
            model.load_begins(fitted)  # and will not end
            raise
        model.load_ends(fitted.keys() - half_before)  # of the others `load_whole` knows whether they are whole now

    if model.is_delayed or isinstance(root, RemotePath):  # then each rank reads what it holds
        model.run_when_partitioned(load_everywhere)
    else:
        load_everywhere()
    if whole_state is not None:
        run_everywhere(call, lambda: _take_partition(found, model))
    if random is not None:
        captured, position = random
        rng.restore(captured)
        model.restore_random_position(position)
    if rank_zero():
        _log.info("resuming from %s", root / name)
    return {} if user is None else user


def _translated(content: dict[str, Any], translate: Translate) -> dict[str, Any]:
    """Without the content of tensors that are in an object store, if the function can do that."""
    if not any(isinstance(value, unread.Unread) for value in content.values()):
        return translate(content)
    try:
        return translate(content.copy())
    except Exception as error:
        _log.info("all tensors are read before translate_function: %s", error)
        return translate(unread.here(content))


def _random_state(found: full_files.Found, *, strict: bool, trust: bool) -> resumed_streams.Unpacked | None:
    """What this rank goes on with; None from a checkpoint that has none."""
    if found.random_state is None or found.manifest is None:
        return None
    try:
        where = resumed_streams.source(found.manifest.layout, world().coordinates)
        return resumed_streams.read_full(found.random_state, where, trust=trust)
    except CheckpointError as error:
        if strict:
            raise
        _log.warning("random state not restored: %s", error.what)
    return None


def _take_partition(found: full_files.Found, model: CheckpointModel) -> None:
    """Cut the model as it was, if the layout is the same: random state goes with what a rank runs."""
    manifest = found.manifest
    if manifest is None or manifest.partition is None or model.partitioned or manifest.layout.differences(present_layout()):
        return
    try:
        model.restore_partition(manifest.partition)
    except PartitionError as error:
        _log.info("the partition of the checkpoint is not this model's, which gets its own: %s", error.what)


def _tie_again(content: dict[str, Any], model: CheckpointModel) -> None:
    """Give tied tensors all their names: safetensors files hold each tensor once. Not where names are still to be translated."""
    tensors = {name for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors <= model.names_and_shapes().keys():
        return
    for names in model.tied_names():
        known = next((name for name in names if name in content), None)
        if known is not None:
            content.update((name, content[known]) for name in names if name not in content)
