"""Do something right after a module is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call `action` once, when module `name` has been imported; at once if it is there already."""
    if name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False):
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find the module, and adds to how it is loaded."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            self._action()

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
