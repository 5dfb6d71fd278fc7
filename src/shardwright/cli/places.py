"""Arguments that name a folder of checkpoints, or a checkpoint in one: a path, or the URL of an object store."""

from __future__ import annotations

from typing import Any


def place(text: str) -> Any:
    """What `shardwright.checkpoint.storage.place` makes of it. A parser for typer, which prints what is wrong with it."""
    from shardwright.checkpoint import storage

    return storage.place(text.rstrip("/") if storage.is_url(text) else text)
