"""Names of the original that exist, import and can be subclassed, but do not work yet.

One table says what each still waits for. Using such a name raises NotBuiltError, which is a
NotImplementedError; importing it never does, because scripts import names they only use behind a switch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn

from shardwright.errors import NotBuiltError

_WAITING: Final[Mapping[str, tuple[str, ...]]] = {
    "dumping and comparing models for debugging is missing": (
        "debugging.dump_model",
        "debugging.verify",
    ),
}

NOT_BUILT: Final[Mapping[str, str]] = MappingProxyType(
    {name: sentence for sentence, names in _WAITING.items() for name in names}
)
"""Dotted name below `smp` -> what it waits for."""


def error(name: str) -> NotBuiltError:
    """The error that using `name` raises."""
    return NotBuiltError(f"smp.{name} is not built yet: {NOT_BUILT[name]}")


def function(name: str) -> Callable[..., NoReturn]:
    """A function that raises when called."""

    def not_built(*args: Any, **kwargs: Any) -> NoReturn:
        raise error(name)

    not_built.__name__ = not_built.__qualname__ = name.rpartition(".")[2]
    not_built.__doc__ = f"Not built yet: {NOT_BUILT[name]}."
    return not_built
