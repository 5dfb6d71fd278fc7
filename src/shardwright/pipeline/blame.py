"""Where in the user's program an error arose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardwright.errors import LostRankError, RemoteRankError

if TYPE_CHECKING:
    from shardwright.pipeline.runtime import Runtime


def set_place(error: BaseException, place: str) -> None:
    """Remember where the error arose, unless that is known more exactly already."""
    if not hasattr(error, "shardwright_place"):
        error.shardwright_place = place  # type: ignore[attr-defined]


def name_place(error: BaseException, runtime: Runtime, microbatch: int) -> None:
    """Give the error, which passes through here, its module and microbatch as a note.

    The module is the innermost one whose method the traceback goes through; an error of glue between them
    names the split module, or nothing if it is the step function's own.
    """
    if isinstance(error, (RemoteRankError, LostRankError)):
        return  # these say where it was, elsewhere
    module = _innermost_module(error, runtime)
    if module is not None:
        set_place(error, module)
    place = getattr(error, "shardwright_place", None)
    add_note = getattr(error, "add_note", None)  # Python 3.11
    if add_note is not None:
        words = "" if place is None else f", module '{place}'"
        add_note(f"on pipeline rank {runtime.rank}, microbatch {microbatch}{words}")


def _innermost_module(error: BaseException, runtime: Runtime) -> str | None:
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = runtime.module_names.get(id(owner))
            if name is not None:
                found = name or type(owner).__name__
        trace = trace.tb_next
    return found
