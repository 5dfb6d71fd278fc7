"""Modules of the original's path that are modules of `shardwright`: the same objects, under both names.

The files in this package only exist for the import system to find; each calls `become`. Submodules need no
files: they are registered with the module they belong to, so none can be loaded a second time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

TARGETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "smdistributed.modelparallel.torch": "shardwright.torch",
        "smdistributed.modelparallel.test.torch.utils": "shardwright.torch.debugging",
    }
)
"""Original module -> ours. Their submodules follow by themselves."""


def become(name: str) -> None:
    """Put our module, and every submodule it has loaded, into `sys.modules` under the original's name.

    Called by: the module `name` while it is imported; the import system then hands out what is registered.
    """
    target = TARGETS[name]
    importlib.import_module(target)
    loaded = [module for module in sys.modules if module == target or module.startswith(f"{target}.")]
    for module in loaded:
        sys.modules[name + module.removeprefix(target)] = sys.modules[module]
