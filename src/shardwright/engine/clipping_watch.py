"""Notice when torch's own clipping walks through the parameters of a wrapped model, of which it can't see enough."""

from __future__ import annotations

import logging
import sys

from shardwright import log
from shardwright.topology import context

_log = log.get_logger(__name__)
_MODULE = "torch.nn.utils.clip_grad"
_NEAR = 4


def watch(*, sharded: bool) -> None:
    """Warn, once, if the caller's caller is torch's clipping, and that is not what the script means.

    Called by: a generator of parameters when its first value is asked for, so that whoever asks is up the stack.
    sharded: gradients are in pieces, and the parameters have none.
    """
    clips = _clipping_function()
    if clips is None:
        return
    if sharded:
        log.once(
            _log,
            logging.WARNING,
            "torch.nn.utils.%s finds no gradients and clips nothing, for optimizer state is sharded and gradients are in"
            " pieces; use smp.clip_grad_norm(max_norm), which clips by the norm of the whole model",
            clips,
        )
    elif clips == "clip_grad_norm_" and context.world().table.degrees.pp * context.world().table.degrees.tp > 1:
        log.once(
            _log,
            logging.WARNING,
            "torch.nn.utils.clip_grad_norm_ clips by the norm of what one rank holds, by another factor on each; use"
            " smp.clip_grad_norm(max_norm), which clips by the norm of the whole model",
        )


def _clipping_function() -> str | None:
    """The name of torch's clipping function among the nearest callers; a script may filter what it passes."""
    frame = sys._getframe(3)
    for _ in range(_NEAR):
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_name.startswith("clip_grad_"):
            return frame.f_code.co_name
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
