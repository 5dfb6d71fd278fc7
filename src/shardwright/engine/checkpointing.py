"""The v1.10 generation of checkpoint calls, on the wrappers made last."""

from __future__ import annotations

from typing import Any

from shardwright.checkpoint import load, save
from shardwright.engine.state import state


def save_checkpoint(
    path: Any,
    tag: Any,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    trust: bool | None = None,
) -> None:
    """See `shardwright.checkpoint.save.save_checkpoint`: collective over the world."""
    save.save_checkpoint(
        path, tag, partial, model, optimizer, user_content, translate_if_full, num_kept_partial_checkpoints, trust=trust
    )


def resume_from_checkpoint(path: Any, tag: Any = None, partial: bool = True, strict: bool = True, **options: Any) -> Any:
    """See `shardwright.checkpoint.load.resume_from_checkpoint`: collective over the world."""
    return load.resume_from_checkpoint(
        path, tag, partial, strict, model=state.model, optimizer=state.optimizer, **options
    )
