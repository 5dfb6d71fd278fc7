"""How one configuration key is declared, and how a value given for it is checked.

A `Setting` is everything the library knows about a key apart from its name: what values it takes, since
when it exists, whether it shapes the process groups, and the sentence that explains it. `flag`, `whole`,
`real` and `choice` declare dataclass fields that carry one.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from shardwright.errors import ConfigError

Value: TypeAlias = bool | int | float | str | None
Kind = Literal["flag", "whole", "real", "choice"]

_METADATA: Final = "shardwright.setting"


@dataclass(frozen=True)
class Setting:
    """What a key may hold and what it means.

    default: the value without any setting; None means unset, or derived as `default_rule` says.
    acts_at_start: read only while groups are built, so that a change afterwards has no effect.
    topology: shapes the process groups; a running world cannot change it.
    """

    kind: Kind
    default: Value
    doc: str
    since: str
    default_rule: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    topology: bool = False
    acts_at_start: bool = False

    @property
    def rule(self) -> str:
        """The values this key takes, as words that fit after 'expected'."""
        if self.kind == "flag":
            return "true or false"
        if self.kind == "choice":
            return "one of " + ", ".join(f"'{choice}'" for choice in self.choices)
        noun = "an integer" if self.kind == "whole" else "a number"
        if self.above is not None:
            return f"{noun} > {self.above:g}"
        if self.minimum is not None and self.maximum is not None:
            return f"{noun} from {self.minimum:g} to {self.maximum:g}"
        return noun if self.minimum is None else f"{noun} >= {self.minimum:g}"

    def check(self, key: str, value: object, *, where: str | None = None) -> Value:
        """Return `value` in its canonical type (5e8 becomes 500000000, "dpt" becomes "DPT").

        None is accepted where it is the default, and stands for "not set".
        Raises: ConfigError with key, value, the rule and a remedy; `where` says which source gave it.
        """
        if value is None and self.default is None:
            return None
        checked = self._convert(value)
        if checked is None or not self._in_range(checked):
            raise ConfigError(
                f"'{key}' is {value!r}, expected {self.rule}", where=where, remedy=self._remedy(key)
            )
        return checked

    def _convert(self, value: object) -> Value:
        """The value as this kind's Python type, or None where it is of another kind."""
        if self.kind == "choice":
            folded = {choice.lower(): choice for choice in self.choices}
            return folded.get(value.lower()) if isinstance(value, str) else None
        number = _as_number(value)
        if number is None:
            return None
        if self.kind == "flag":
            return bool(number) if number in (0, 1) and not isinstance(number, float) else None
        if isinstance(number, bool):
            return None
        if self.kind == "real":
            return float(number)
        return int(number) if number == math.floor(number) else None

    def _in_range(self, value: Value) -> bool:
        if self.kind not in ("whole", "real") or not isinstance(value, (int, float)):
            return True
        if self.above is not None and not value > self.above:
            return False
        if self.minimum is not None and value < self.minimum:
            return False
        return self.maximum is None or value <= self.maximum

    def _remedy(self, key: str) -> str:
        if self.kind == "choice" or self.default is None:
            return f"set '{key}' to {self.rule}, or leave it out ({self.default_text})"
        return f"set '{key}' to {self.rule}, for example {_as_json(self.default)}"

    @property
    def default_text(self) -> str:
        """The default in words, for messages and the configuration reference."""
        return f"default: {self.default_rule or _as_json(self.default)}"


def flag(default: bool, *, doc: str, since: str, topology: bool = False, acts_at_start: bool = False) -> Any:
    """Declare a true/false key. The integers 0 and 1 count: scripts pass parsed arguments on."""
    return _declare(Setting("flag", default, doc, since, topology=topology, acts_at_start=acts_at_start))


def whole(
    default: int | None,
    *,
    doc: str,
    since: str,
    at_least: int | None = None,
    at_most: int | None = None,
    default_rule: str | None = None,
    topology: bool = False,
    acts_at_start: bool = False,
) -> Any:
    """Declare an integer key. Floats with an integral value count, because JSON writers produce them."""
    setting = Setting(
        "whole",
        default,
        doc,
        since,
        default_rule=default_rule,
        minimum=at_least,
        maximum=at_most,
        topology=topology,
        acts_at_start=acts_at_start,
    )
    return _declare(setting)


def real(
    default: float | None,
    *,
    doc: str,
    since: str,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    default_rule: str | None = None,
    acts_at_start: bool = False,
) -> Any:
    """Declare a floating point key; infinities and NaN are refused."""
    setting = Setting(
        "real",
        default,
        doc,
        since,
        default_rule=default_rule,
        minimum=at_least,
        maximum=at_most,
        above=above,
        acts_at_start=acts_at_start,
    )
    return _declare(setting)


def choice(
    default: str,
    choices: tuple[str, ...],
    *,
    doc: str,
    since: str,
    topology: bool = False,
    acts_at_start: bool = False,
) -> Any:
    """Declare a key that takes one of a few words, in any mixture of capitals."""
    setting = Setting(
        "choice", default, doc, since, choices=choices, topology=topology, acts_at_start=acts_at_start
    )
    return _declare(setting)


def settings_of(schema: type) -> Mapping[str, Setting]:
    """The settings a dataclass declares, by key, in the order of declaration."""
    return {field.name: field.metadata[_METADATA] for field in dataclasses.fields(schema)}


def _declare(setting: Setting) -> Any:
    return dataclasses.field(default=setting.default, metadata={_METADATA: setting})


def _as_number(value: object) -> bool | int | float | None:
    """A finite number from Python, JSON or NumPy, or None; strings are not numbers."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # NumPy integers; anything else raises
    except TypeError:
        return None


def _as_json(value: Value) -> str:
    """The value as one would write it in JSON."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
