"""When CUDA begins to be emulated. Loads no torch."""

from __future__ import annotations

import os

from shardwright.config.emulation import requested
from shardwright.import_hooks import when_imported

_watching = False


def begin() -> None:
    """If it is requested, emulate CUDA from the moment that torch is imported. May be called again.

    Called by: `sitecustomize`, and `shardwright.torch` for processes that only have the variable.
    """
    global _watching
    if _watching or not requested(os.environ):
        return
    _watching = True
    when_imported("torch", _install)


def _install() -> None:
    from shardwright.emulation import install

    install.install()
