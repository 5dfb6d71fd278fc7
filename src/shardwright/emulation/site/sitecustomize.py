"""Loaded by every Python process that has this folder on PYTHONPATH: CUDA is emulated if the variable asks for it."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_here = Path(__file__).resolve().parent

# The sitecustomize that this one hides.
_others = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]
_spec = PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

try:
    from shardwright.emulation import startup
except ImportError:
    pass  # another Python, which has no shardwright
else:
    startup.begin()
