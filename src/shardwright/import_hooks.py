"""Do something right after a module is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call `action` once, when module `name` has been imported; at once if it is there already."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Watcher(name, action))
    elif module.__spec__ is not None and getattr(module.__spec__, "_initializing", False):
        module.__spec__.__class__ = _LoadingSpec
        vars(module.__spec__)["_action"] = action
    else:
        action()


class _LoadingSpec(ModuleSpec):
    """The spec of a module that is being imported; the import system notes in it when that is done."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            action = vars(self).pop("_action")
            if self.name in sys.modules:
                action()


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
