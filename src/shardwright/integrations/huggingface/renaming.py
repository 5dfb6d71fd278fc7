"""Weights of a transformers model under the names of our distributed modules, and back.

A family writes one table of rules. Each rule names tensors on both sides and says how their values correspond
(the same tensor, transposed, one fused tensor against its parts, many experts against one stack), so both
directions come from one place and are exact inverses, bit for bit.

Names are patterns: `{layer}`, `{expert}` and the like stand for a number, `{prefix}` for any leading path that
ends in a dot, or nothing. Everything here is about whole tensors; slicing over ranks happens elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.errors import ShapeError, UsageError

State = MutableMapping[str, Tensor]
Binding = tuple[tuple[str, str], ...]

_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """Tensors called `plain` in transformers are those called `distributed` in our modules.

    This class itself is for one tensor that only changes its name; subclasses change values as well.
    """

    plain: tuple[str, ...]
    distributed: tuple[str, ...]

    def enter(self, tensors: list[Tensor]) -> list[Tensor]:
        """Plain values to distributed ones; views where that is possible."""
        return tensors

    def leave(self, tensors: list[Tensor]) -> list[Tensor]:
        """Distributed values to plain ones."""
        return tensors


@dataclass(frozen=True)
class Transposed(Rule):
    """One matrix that transformers keeps as [in, out] (its `Conv1D`) and we as [out, in]."""

    def enter(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.t() for tensor in tensors]

    leave = enter


@dataclass(frozen=True)
class Fused(Rule):
    """One tensor whose output rows are those of several projections.

    heads: None when the parts lie one after the other; else the rows are grouped by head, and inside a head by
        part (GPT-NeoX), so that cutting the tensor in one piece would mix them up.
    dim: the dimension that is fused.
    transposed: matrices are [in, out]. Vectors (biases) never are.
    """

    heads: int | None = None
    dim: int = 0
    transposed: bool = False

    def enter(self, tensors: list[Tensor]) -> list[Tensor]:
        fused = self._turned(tensors[0])
        parts = len(self.distributed)
        rows = fused.shape[self.dim]
        if rows % (parts * (self.heads or 1)):
            raise ShapeError(
                f"'{self.plain[0]}' has {rows} rows, which are not {parts} parts of {self.heads or 1} heads",
                remedy="check that the weights belong to this configuration",
            )
        if self.heads is None:
            return list(fused.chunk(parts, self.dim))
        grouped = fused.unflatten(self.dim, (self.heads, parts, -1))
        return [grouped.select(self.dim + 1, part).flatten(self.dim, self.dim + 1) for part in range(parts)]

    def leave(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.heads is None:
            return [self._turned(torch.cat(tensors, self.dim))]
        by_head = [tensor.unflatten(self.dim, (self.heads, -1)) for tensor in tensors]
        return [self._turned(torch.stack(by_head, self.dim + 1).flatten(self.dim, self.dim + 2))]

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


@dataclass(frozen=True)
class Stacked(Rule):
    """Tensors that differ in one number of their names against one tensor with a leading dimension for it."""

    over: str = "expert"

    def enter(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack(tensors)]

    def leave(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind())


@dataclass(frozen=True)
class Tie:
    """A plain name for a weight that another plain name already gives.

    known: True when the model ties the two, False when it does not, None to find out: they are tied on the way in
        when their values are equal, and on the way out when the distributed side has no weight of its own.
    """

    plain: str
    source: str
    distributed: str
    known: bool | None = None


@dataclass(frozen=True)
class Mask:
    """A buffer of old transformers versions that holds a causal mask: dropped on the way in, made on the way out.

    make: from the length and the numbers in the name to the buffer. It runs only for versions that had the buffer.
    beside: the plain name of a parameter that lives beside the buffer in each layer.
    """

    plain: str
    beside: str
    make: Callable[[int, dict[str, str]], Tensor] | None = None


@dataclass(frozen=True)
class Renaming:
    """The correspondence of all tensors of one kind of module.

    others: what happens to names of no rule: "refuse" them, or "pass" them through unchanged.
    mask_length: make the causal-mask buffers of old versions, for this length; None: leave them out.
    """

    rules: tuple[Rule, ...]
    ties: tuple[Tie, ...] = ()
    masks: tuple[Mask, ...] = ()
    others: Literal["refuse", "pass"] = "refuse"
    mask_length: int | None = None

    def to_distributed(self, state: State, *, copy: bool = True) -> dict[str, Tensor]:
        """Whole transformers weights to whole weights of our modules. No communication.

        `state` is emptied on the way, so that never more than one weight exists twice. With `copy=False` results
        may be views of what came in. Any subset of layers will do; what is fused or stacked must be complete.
        Raises: UsageError for a name of no rule or an incomplete group, naming it.
        """
        self._drop_tied(state)
        side = _Side(self.rules, lambda rule: rule.plain, lambda rule: rule.distributed)
        dropped = [_compiled(mask.plain) for mask in self.masks]
        for name in [name for name in state if any(pattern.fullmatch(name) for pattern in dropped)]:
            del state[name]
        return self._translate(state, side, lambda rule, tensors: rule.enter(tensors), copy)

    def to_huggingface(self, state: State, *, copy: bool = True) -> dict[str, Tensor]:
        """Whole weights of our modules to whole transformers weights; the inverse of `to_distributed`.

        Names that exist in transformers only because weights are tied are added; they share their tensor.
        """
        untied = {name for name in state if any(_compiled(tie.distributed).fullmatch(name) for tie in self.ties)}
        side = _Side(self.rules, lambda rule: rule.distributed, lambda rule: rule.plain)
        result = self._translate(state, side, lambda rule, tensors: rule.leave(tensors), copy)
        if not untied:
            self._add_tied(result)
        if self.mask_length is not None:
            self._add_masks(result, self.mask_length)
        return result

    def prefixed(self, plain: str, distributed: str) -> Renaming:
        """The same correspondence for a module that sits at `plain` in transformers and at `distributed` in ours."""
        return Renaming(
            prefixed(self.rules, plain, distributed),
            tuple(Tie(plain + t.plain, plain + t.source, distributed + t.distributed, t.known) for t in self.ties),
            tuple(Mask(plain + mask.plain, plain + mask.beside, mask.make) for mask in self.masks),
            self.others,
            self.mask_length,
        )

    def as_record(self) -> dict[str, Any]:
        """The table as JSON values, without the masks of old versions; see `from_record`."""
        return {
            "rules": [{"kind": type(rule).__name__, **asdict(rule)} for rule in self.rules],
            "ties": [asdict(tie) for tie in self.ties],
            "others": self.others,
        }

    def passing(self) -> Renaming:
        """The same correspondence, with names of no rule left as they are."""
        return replace(self, others="pass")

    def making_masks(self, length: int | None) -> Renaming:
        """The same correspondence, with the mask buffers of old versions on the way out (None: without)."""
        return replace(self, mask_length=length)

    def _drop_tied(self, state: State) -> None:
        for tie in self.ties:
            pattern = _compiled(tie.plain)
            for name in [name for name in state if pattern.fullmatch(name)]:
                source = _filled(tie.source, _bound(pattern, name))
                if tie.known and source not in state:  # a part of a model that holds the weight under this name only
                    state[source] = state.pop(name)
                elif tie.known or (tie.known is None and source in state and _same(state[name], state[source])):
                    del state[name]

    def _add_tied(self, result: dict[str, Tensor]) -> None:
        for tie in self.ties:
            if tie.known is False:
                continue
            pattern = _compiled(tie.source)
            for name in [name for name in result if pattern.fullmatch(name)]:
                result.setdefault(_filled(tie.plain, _bound(pattern, name)), result[name])

    def _add_masks(self, result: dict[str, Tensor], length: int) -> None:
        for mask in self.masks:
            if mask.make is None:
                continue
            pattern = _compiled(mask.beside)
            for name in [name for name in result if pattern.fullmatch(name)]:
                bound = _bound(pattern, name)
                result[_filled(mask.plain, bound)] = mask.make(length, bound)

    def _translate(
        self, state: State, side: _Side, change: Callable[[Rule, list[Tensor]], list[Tensor]], copy: bool
    ) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name in list(state):
            if name not in state:  # taken together with an earlier one
                continue
            found = side.find(name)
            if found is None:
                if self.others == "refuse":
                    raise UsageError(
                        f"weight '{name}' has no place in this model family",
                        remedy="check that the weights come from the same kind of model, and its version",
                    )
                result[name] = state.pop(name)
                continue
            rule, bound = found
            wanted = side.inputs(rule, bound, state)
            missing = [other for other in wanted if other not in state]
            if missing:
                raise UsageError(
                    f"weight '{name}' came without {', '.join(map(repr, missing))}, which belong together",
                    remedy="translate complete layers",
                )
            taken = [state.pop(other) for other in wanted]
            values = change(rule, taken)
            names = side.outputs(rule, bound, len(values))
            for target, value in zip(names, values, strict=True):
                result[target] = _own(value, taken) if copy else value
        return result


@dataclass(frozen=True)
class _Side:
    """The rules seen from the side that the names come from."""

    rules: tuple[Rule, ...]
    source: Callable[[Rule], tuple[str, ...]]
    target: Callable[[Rule], tuple[str, ...]]

    def find(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        for rule in self.rules:
            for pattern in self.source(rule):
                match = _compiled(pattern).fullmatch(name)
                if match:
                    return rule, match.groupdict()
        return None

    def inputs(self, rule: Rule, bound: dict[str, str], state: State) -> list[str]:
        """Names of all tensors that the rule takes together, in order."""
        if not isinstance(rule, Stacked) or not _has_hole(self.source(rule)[0], rule.over):
            return [_filled(pattern, bound) for pattern in self.source(rule)]
        pattern = self.source(rule)[0]
        rest = {key: value for key, value in bound.items() if key != rule.over}
        numbers = [
            int(found[rule.over])
            for found in (_compiled(pattern).fullmatch(name) for name in state)
            if found and all(found[key] == value for key, value in rest.items())
        ]
        return [_filled(pattern, {**rest, rule.over: str(number)}) for number in range(max(numbers) + 1)]

    def outputs(self, rule: Rule, bound: dict[str, str], count: int) -> list[str]:
        """Names of what the rule gives."""
        if isinstance(rule, Stacked) and _has_hole(self.target(rule)[0], rule.over):
            return [_filled(self.target(rule)[0], {**bound, rule.over: str(n)}) for n in range(count)]
        return [_filled(pattern, bound) for pattern in self.target(rule)]


def from_record(record: Mapping[str, Any]) -> Renaming:
    """The inverse of `Renaming.as_record`. Raises: KeyError for a kind of rule that this release doesn't know."""
    kinds = {kind.__name__: kind for kind in (Rule, Transposed, Fused, Stacked)}
    rules = []
    for told in record["rules"]:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items() if key != "kind"}
        rules.append(kinds[told["kind"]](**values))
    return Renaming(tuple(rules), tuple(Tie(**tie) for tie in record["ties"]), others=record["others"])


def same(plain: str, distributed: str) -> Rule:
    """A rule for one tensor that only changes its name."""
    return Rule((plain,), (distributed,))


def module(plain: str, distributed: str, *, bias: bool = True) -> tuple[Rule, ...]:
    """Rules for the weight, and the bias, of one linear, norm or embedding module."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(same(f"{plain}.{kind}", f"{distributed}.{kind}") for kind in kinds)


def conv1d(plain: str, distributed: str) -> tuple[Rule, ...]:
    """Rules for a `Conv1D` of transformers: its matrix is [in, out]."""
    return (
        Transposed((f"{plain}.weight",), (f"{distributed}.weight",)),
        same(f"{plain}.bias", f"{distributed}.bias"),
    )


def fused(
    plain: str, distributed: Sequence[str], *, heads: int | None = None, transposed: bool = False
) -> tuple[Rule, ...]:
    """Rules for the weight and the bias of one linear module that is several of ours."""
    return tuple(
        Fused(
            (f"{plain}.{kind}",),
            tuple(f"{part}.{kind}" for part in distributed),
            heads=heads,
            transposed=transposed,
        )
        for kind in ("weight", "bias")
    )


def prefixed(rules: Iterable[Rule], plain: str, distributed: str) -> tuple[Rule, ...]:
    """The rules for a module that sits at `plain` in transformers and at `distributed` in ours."""
    return tuple(
        replace(
            rule,
            plain=tuple(plain + name for name in rule.plain),
            distributed=tuple(distributed + name for name in rule.distributed),
        )
        for rule in rules
    )


_patterns: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    found = _patterns.get(pattern)
    if found is None:
        found = _patterns[pattern] = re.compile("".join(_pieces(pattern)))
    return found


def _pieces(pattern: str) -> Iterator[str]:
    end = 0
    for hole in _HOLE.finditer(pattern):
        yield re.escape(pattern[end : hole.start()])
        name = hole[1]
        yield rf"(?P<{name}>(?:.*\.)?)" if name == "prefix" else rf"(?P<{name}>\d+)"
        end = hole.end()
    yield re.escape(pattern[end:])


def _bound(pattern: re.Pattern[str], name: str) -> dict[str, str]:
    match = pattern.fullmatch(name)
    assert match is not None
    return match.groupdict()


def _filled(pattern: str, bound: dict[str, str]) -> str:
    return _HOLE.sub(lambda hole: bound[hole[1]], pattern)


def _has_hole(pattern: str, name: str) -> bool:
    return f"{{{name}}}" in pattern


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return one.shape == other.shape and one.dtype == other.dtype and not one.is_meta and torch.equal(one, other)


def _own(value: Tensor, inputs: list[Tensor]) -> Tensor:
    """The value with memory of its own, unless it is one of the inputs just as it came."""
    if any(value is given for given in inputs):
        return value
    shared = any(value.untyped_storage().data_ptr() == given.untyped_storage().data_ptr() for given in inputs)
    return value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
