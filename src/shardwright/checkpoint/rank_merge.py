"""The files that ranks wrote with `smp.save`, joined: partial state dicts in them become those of the whole model.

A partial state dict doesn't say what it is a part of. So `describe` does, when it is saved, in an entry of its own beside the
stamp, and `merged` makes whole ones of the dicts that lie at the same place in all files of a set. Whole dicts fit any layout.

Source: api.md 9.3 and 5.4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from shardwright.checkpoint import plan, reader
from shardwright.checkpoint.manifest import OBJECT, Entry, KeyPath, merge_entries
from shardwright.checkpoint.state import (
    MASTER,
    PARAM_NAMES,
    PARTIAL_MARK,
    SPANS,
    CheckpointModel,
    CheckpointOptimizer,
    TensorRow,
    model_entries,
    optimizer_entries,
)
from shardwright.checkpoint.whole import label_of, labelled
from shardwright.errors import CheckpointError

StateDict = dict[str, Any]
_OWN_KEYS = ("state", "param_groups", MASTER, SPANS, PARTIAL_MARK)


@dataclass(frozen=True)
class Parts:
    """What the partial state dicts of a rank are parts of.

    tensors, parameters: rows of the model, see `CheckpointModel`; the latter None where they are the same.   groups, full_groups:
    names of the optimizer's parameters here and in the whole model, group by group; None without one optimizer.
    """

    tensors: list[TensorRow]
    parameters: list[TensorRow] | None
    groups: list[list[str]] | None
    full_groups: list[list[str]] | None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Parts:
        """The inverse. Raises: TypeError, KeyError or ValueError for anything else."""
        rows = None if told["parameters"] is None else _rows(told["parameters"])
        return cls(_rows(told["tensors"]), rows, _groups(told["groups"]), _groups(told["full_groups"]))


def _rows(told: Sequence[Mapping[str, Any]]) -> list[TensorRow]:
    def sizes(values: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(int, values))

    return [
        TensorRow(str(row["name"]), sizes(row["shape"]), str(row["dtype"]), sizes(row["offset"]), sizes(row["local_shape"]))
        for row in told
    ]


def _groups(told: Sequence[Sequence[Any]] | None) -> list[list[str]] | None:
    return None if told is None else [list(map(str, names)) for names in told]


def describe(model: CheckpointModel, optimizer: CheckpointOptimizer | None) -> Parts:
    """What is saved beside partial state dicts. Called by: any rank whose model is partitioned. Collectives: none."""
    tensors, parameters = list(model.tensor_table()), list(model.parameter_table())
    here, full = (None, None) if optimizer is None else (optimizer.group_names(), optimizer.full_group_names())
    return Parts(
        tensors,
        None if parameters == tensors else parameters,
        None if here is None else [list(names) for names in here],
        None if full is None else [list(names) for names in full],
    )


def partial_dicts(value: Any, inside: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """The partial state dicts in nested containers, and where they are."""
    if isinstance(value, Mapping):
        if value.get(PARTIAL_MARK):
            yield inside, value
            return
        for key, item in value.items():
            yield from partial_dicts(item, (*inside, key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from partial_dicts(item, (*inside, index))


@dataclass(frozen=True)
class RankFile:
    """One file of a set, read. place: pp_rank, tp_rank.   parts: None where it has no partial state dict."""

    name: str
    place: tuple[int, int]
    content: Any
    parts: Parts | None


def merged(files: Sequence[RankFile]) -> Any:
    """The content of the first file with whole state dicts, marked as such, in the place of its partial ones.

    files: those of one save, each place at least once; the first is that of the first place. What is whole in one file isn't
    copied.
    Raises: CheckpointError if a part is nowhere, or a state dict isn't one of the wrapped model or optimizer.
    """
    content = files[0].content
    for key, _ in list(partial_dicts(content)):
        shares = _shares(key, files)
        is_optimizer = isinstance(shares[0].held.get("param_groups"), list) and "state" in shares[0].held
        content = _with(content, key, _optimizer(shares) if is_optimizer else _model(shares))
    return content


@dataclass(frozen=True)
class _Share:
    """A partial state dict, and the file it is from."""

    file: str
    label: str
    held: Mapping[str, Any]
    parts: Parts


def _shares(key: KeyPath, files: Sequence[RankFile]) -> list[_Share]:
    """The partial dicts at one place in the files of a set."""
    label = ".".join(map(str, key)) or "the content"
    found, missing = [], {file.place: file.name for file in files}
    for file in files:
        held = dict(partial_dicts(file.content)).get(key)
        if held is not None and file.parts is not None:
            found.append(_Share(file.name, label, held, file.parts))
            missing.pop(file.place, None)
    if missing:
        raise CheckpointError(
            f"{', '.join(missing.values())} has no partial state dict where {files[0].name} has one, in {label}",
            remedy="save the same keys on every rank, or load with the degrees of the save",
        )
    return found


def _with(content: Any, key: KeyPath, value: Any) -> Any:
    """The content with another value at a place; dicts and lists on the way are changed."""
    if not key:
        return value
    inner = _with(content[key[0]], key[1:], value)
    if isinstance(content, tuple):
        return tuple(inner if index == key[0] else item for index, item in enumerate(content))
    content[key[0]] = inner
    return content


# ------------------------------------------------------------------ models


def _model(shares: Sequence[_Share]) -> StateDict:
    """The whole model's state dict, marked as one in the library's own names."""
    held = {share.file: share.held for share in shares}
    described = []
    for share in shares:
        with _explained(share):
            described.append(model_entries(share.file, share.held, share.parts.tensors))
    whole: StateDict = OrderedDict()
    for entry in merge_entries(described):
        first = entry.slices[0]
        whole[entry.name] = reader.follow(held[first.file], first.key) if entry.dtype == OBJECT else _joined(entry, held)
    whole[PARTIAL_MARK] = False
    notes = getattr(shares[0].held, "_metadata", None)
    if notes is not None:
        whole._metadata = notes  # type: ignore[attr-defined]
    return whole


# ------------------------------------------------------------------ optimizers


def _optimizer(shares: Sequence[_Share]) -> StateDict:
    """torch's form for the whole model, as `optimizer.state_dict()` has it, and the mark."""
    held: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    described = []
    for share in shares:
        names = _names(share)
        rows = share.parts.tensors if share.parts.parameters is None else share.parts.parameters
        for number, (state, spans) in enumerate(_states(share.held)):
            source = f"{share.file}[{number}]"
            held[source] = {"state": state}
            with _explained(share):
                described.append(optimizer_entries("optimizer", source, state, names, rows, spans))
            for index, value in state.items():
                values.setdefault(names[index], {}).update(value)
    known = {label_of(e): _joined(e, held) for e in merge_entries(described) if e.dtype != OBJECT}
    first = shares[0]
    states: dict[int, Any] = {}
    groups = []
    index = 0
    for group, members in zip(first.held["param_groups"], first.parts.full_groups or (), strict=True):
        own_names = {PARAM_NAMES: list(members)} if PARAM_NAMES in group else {}
        groups.append({**group, **own_names, "params": list(range(index, index + len(members)))})
        for name in members:
            if name in values:
                states[index] = labelled(values[name], f"optimizer {name}", known.__getitem__)
            index += 1
    whole = {"state": states, "param_groups": groups}
    if MASTER in first.held:
        masters = {i: state.pop(MASTER) for i, state in states.items() if MASTER in state}
        whole[MASTER] = masters
        whole["state"] = {i: state for i, state in states.items() if state or i not in masters}
    besides = {key: value for key, value in first.held.items() if key not in _OWN_KEYS}
    return {**whole, **besides, PARTIAL_MARK: False}


def _names(share: _Share) -> list[str]:
    """The parameter of each index of an optimizer's dict."""
    groups = share.parts.groups
    sizes = [len(group["params"]) for group in share.held["param_groups"]]
    if groups is None or sizes != [len(names) for names in groups]:
        known = "not known" if groups is None else f"{[len(names) for names in groups]}"
        raise CheckpointError(
            f"{share.label} in {share.file} has parameter groups of {sizes}, those of the wrapped optimizer were {known} when it"
            " was saved",
            remedy="load with the degrees of the save; only the state of one optimizer can be merged",
        )
    return [name for names in groups for name in names]


def _states(held: Mapping[str, Any]) -> Iterator[tuple[dict[int, Any], Any]]:
    """The states in an optimizer's dict, with masters in them, and the spans of each; gathered ones are several."""
    state, masters, spans = held["state"], held.get(MASTER), held.get(SPANS)
    count = len(state) if isinstance(state, list) else 1
    states = state if isinstance(state, list) else [state]
    for one, own, cut in zip(states, _each(masters, count), _each(spans, count), strict=True):
        joined = {index: dict(values) for index, values in one.items()}
        for index, master in (own or {}).items():
            joined.setdefault(index, {})[MASTER] = master
        yield joined, cut


def _each(value: Any, count: int) -> Sequence[Any]:
    return value if isinstance(value, list) else [value] * count


# ------------------------------------------------------------------ tensors


@contextmanager
def _explained(share: _Share) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{share.label} in {share.file} isn't a part of the model that was wrapped when it was saved: {error.what}",
            remedy="load with the degrees of the save",
        ) from error


def _joined(entry: Entry, held: Mapping[str, Any]) -> Tensor:
    """A whole tensor; the very one of a file if that has all of it."""
    whole = plan.box_of((0,) * len(entry.shape), entry.shape)
    parts = plan.plan(entry, [whole])
    sources: list[Tensor] = [reader.follow(held[copy.source.file], copy.source.key) for copy in parts]
    if not sources:  # no elements
        first = entry.slices[0]
        return reader.follow(held[first.file], first.key).new_empty(entry.shape)
    if len(parts) == 1 and parts[0].source.flat is None and parts[0].source.box == whole:
        return sources[0]
    made = sources[0].new_empty(entry.shape)
    for copy, source in zip(parts, sources, strict=True):
        reader.fill(made, [0] * made.dim(), copy, source)
    return made
