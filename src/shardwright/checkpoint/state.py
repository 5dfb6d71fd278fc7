"""What a checkpoint needs from the model and the optimizer, and how their state becomes manifest entries.

The engine's wrappers fulfil the two protocols; nothing here knows pipelines or process groups.
Names are those of the plain user module, without any prefix of a wrapper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.manifest import OBJECT, Entry, KeyPath, Slice
from shardwright.errors import CheckpointError

if TYPE_CHECKING:
    from shardwright.checkpoint.flat_groups import FlatGroups

PARTIAL_MARK = "_smp_is_partial"
PARAM_NAMES = "param_names"
MASTER = "fp32_from_fp16"
"""fp32 masters in a state dict: index over the groups -> master. Inside the library a master is one more value in its
parameter's state, so that it is joined, cut and exchanged like the rest."""
SPANS = "_smp_spans"
"""Key of an optimizer dict whose state is that of pieces: name -> [start, stop, elements of all], of the rank's part of
the parameter in row-major order, or [start, stop, elements of all, strides] in the order of memory that these give."""
Spans = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of this rank's state dict: what it is in the whole model.

    shape: of the whole tensor.   dtype: such as "float32".   offset, local_shape: the part this rank holds,
    elements per dim; zeros and `shape` where nothing is sliced.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]


class CheckpointModel(Protocol):
    """What save and load ask of a wrapped model. None of the calls communicates unless it says so."""

    @property
    def partitioned(self) -> bool:
        """True once this rank knows and holds its own part."""

    @property
    def is_delayed(self) -> bool:
        """True while parameters have no memory: those of this rank get some when the model is partitioned."""

    def names_and_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every key of the unpartitioned state dict with its whole shape; equal on all ranks, known before
        partitioning.

        Keys whose value isn't a tensor (`_extra_state`) are left out.
        """

    def tied_names(self) -> Sequence[Sequence[str]]:
        """Groups of names that are one tensor in the unpartitioned model; equal on all ranks."""

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's parameters and persistent buffers by plain name, plus `_smp_is_partial: True`."""

    def tensor_table(self) -> Sequence[TensorRow]:
        """One row per tensor of `local_state_dict()`."""

    def parameter_table(self) -> Sequence[TensorRow]:
        """The same as the optimizer's pieces count: with sharded data parallelism parameters are whole (or this tp rank's
        slices) here, and `tensor_table` has this rank's rows of them.
        """

    def partition_record(self) -> Mapping[str, Any] | None:
        """The partition plan as JSON values, "stage_of" (module name to stage) among them; None with one
        stage.
        """

    def structure_record(self) -> Mapping[str, Any] | None:
        """The model's modules and parameters as JSON values, see `manifest`; called on world rank 0."""

    def restore_partition(self, record: Mapping[str, Any]) -> None:
        """Take this plan instead of tracing; called on every rank, before or after partitioning.

        Raises: PartitionError if the plan doesn't fit the model, or the model is already partitioned in
            another way.
        """

    def run_when_partitioned(self, callback: Callable[[], None]) -> None:
        """Run the callback once on every rank: now if partitioned, else right after partitioning, on the thread
        that partitions.

        It comes before the post-partition hooks and issues collectives over the world.
        """

    def level_replicas(self) -> None:
        """Give all replicas what state dicts have put into the first one. Called by: every rank. Collectives: over replicas."""

    def load_begins(self, parts: Collection[StateRole]) -> Set[StateRole]:
        """From now on the values of these parts ("model", "optimizer") are being overwritten: until `load_ends`, training and
        saving are refused. Returns: the parts that an earlier load has left so.
        """

    def load_ends(self, parts: Collection[StateRole]) -> None:
        """The values of these parts are all loaded."""

    def load_local(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copy values into this rank's parameters and buffers. state: as `local_state_dict()`, without the
        mark, CPU.

        Names are compared with this rank's own. Raises: an error naming what is missing or unexpected, if
        strict.
        """

    def origin_record(self) -> Mapping[str, Any] | None:
        """What the model was before modules were replaced, as JSON values, see `manifest`; None where that isn't known."""

    def answered_state(self) -> dict[str, Any]:
        """What this rank answers for in the state dict of the whole: as `local_state_dict()`, without the mark, and before
        partitioning as well. Names of one tensor have one object.

        Raises: UsageError while parameters have no memory.
        """

    def original_names(self, content: dict[str, Any]) -> dict[str, Any]:
        """A whole state dict in the names of the model before modules were replaced. The tensors may be deferred."""

    def fitted(self, content: Mapping[str, Any], *, strict: bool, translated: bool) -> dict[str, Any]:
        """Whole tensors in the wrapped model's names; nothing changes. translated: they have these; otherwise they may have
        the original's. Raises: CheckpointError, on all ranks alike, if they don't fit the model.
        """

    def load_whole(self, content: Mapping[str, Any], *, strict: bool) -> None:
        """Copy this rank's share of what `fitted` returned."""

    def random_position(self) -> Mapping[str, int]:
        """The counters that derived random streams depend on (the step number, ...)."""

    def restore_random_position(self, position: Mapping[str, int]) -> None:
        """Continue the derived random streams from here."""


class CheckpointOptimizer(Protocol):
    """What save and load ask of a wrapped optimizer."""

    def full_group_names(self) -> Sequence[Sequence[str]]:
        """Per parameter group: plain names of all its parameters in the unpartitioned order; equal on all
        ranks.
        """

    def group_names(self) -> Sequence[Sequence[str]]:
        """Per parameter group: plain names of the parameters this rank holds, in the order of
        `group["params"]`.
        """

    def flat_groups(self, model: CheckpointModel) -> FlatGroups | None:
        """What is written in flat form, with sharded data parallelism; else None. model: the one being saved beside it."""

    def local_state_dict(self, *, gather_if_shard: bool = True) -> dict[str, Any]:
        """torch's form: "state" keyed by index over this rank's groups, "param_groups", plus
        `_smp_is_partial: True`.
        """

    def parameter_table(self) -> Sequence[TensorRow]:
        """`CheckpointModel.parameter_table` of the model whose parameters these are."""

    def fitted(self, state: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """The whole optimizer's state, which is in torch's form with `PARAM_NAMES`, for the present groups; nothing changes.

        Raises: as `attach_by_name`, on all ranks alike.
        """

    def load_whole(self, state: dict[str, Any]) -> None:
        """Take over this rank's share of what `fitted` returned."""

    def load_local(self, state: dict[str, Any]) -> None:
        """Take over a dict in that form, indices as in `group_names()`. The tensors are the optimizer's to
        keep.
        """

    def half_precision_state(self) -> dict[str, Any] | None:
        """fp32 master weights in the same form, each in the state of its parameter, and plain values of the loss
        scaler under further keys; None in full precision. `load_local` takes it back joined with the rest, see
        `with_half_precision`.
        """


def model_entries(
    file: str, state: Mapping[str, Any], table: Sequence[TensorRow], inside: KeyPath = ()
) -> list[Entry]:
    """Describe a rank's model file for the manifest. inside: the key of the state in the file."""
    rows = {row.name: row for row in table}
    entries = []
    for name, value in state.items():
        if name == PARTIAL_MARK:
            continue
        if not isinstance(value, torch.Tensor):
            entries.append(_plain_entry("model", name, None, file, (*inside, name)))
            continue
        row = rows.get(name)
        if row is None:
            raise CheckpointError(f"the model's tensor table has no row for {name!r} of its local state dict")
        if tuple(value.shape) != row.local_shape:
            raise CheckpointError(
                f"{name!r} is {list(value.shape)}, its tensor table says {list(row.local_shape)}"
            )
        if 0 in row.local_shape and 0 not in row.shape:
            continue  # a shard of which this rank has nothing
        part = Slice(file, (*inside, name), row.offset, row.local_shape)
        entries.append(Entry("model", name, None, row.shape, dtype_name(value), (part,)))
    return entries


def optimizer_entries(
    role: StateRole,
    file: str,
    state: Mapping[int, Any],
    names: Sequence[str],
    table: Sequence[TensorRow],
    spans: Spans | None = None,
) -> list[Entry]:
    """Describe a rank's optimizer file for the manifest.

    state: the "state" of the file.   names: plain name of each index.   A state tensor of its parameter's
    shape is sliced like the parameter, one of its piece's length is a piece; any other, and every "step", is whole by
    itself.   spans: see `SPANS`.
    """
    rows = {row.name: row for row in table}
    entries = []
    for index, values in state.items():
        row = rows.get(names[index])
        for path, value in _leaves(values, ()):
            label = "/".join(str(step) for step in path)
            key: KeyPath = ("state", index, *path)
            if not isinstance(value, torch.Tensor):
                entries.append(_plain_entry(role, names[index], label, file, key))
                continue
            shape = tuple(value.shape)
            span = (spans or {}).get(names[index])
            if row is not None and span is not None and path[-1:] != ("step",) and shape == (span[1] - span[0],):
                if span[0] == span[1] and 0 not in row.shape:
                    continue
                strides = tuple(span[3]) if len(span) > 3 else None
                part, whole = Slice(file, key, row.offset, row.local_shape, (span[0], span[1]), strides), row.shape
            elif row is not None and shape == row.local_shape:
                part, whole = Slice(file, key, row.offset, shape), row.shape
            else:
                part, whole = Slice(file, key, (0,) * len(shape), shape), shape
            entries.append(Entry(role, names[index], label, whole, dtype_name(value), (part,)))
    return entries


def path_of(entry: Entry) -> KeyPath:
    """Where a value lies in the state of its parameter: keys of nested dicts."""
    return (MASTER,) if entry.state == MASTER else entry.slices[0].key[2:]


def attach_by_name(
    saved: Mapping[str, Any], present_groups: Sequence[Sequence[str]], *, strict: bool
) -> dict[str, Any]:
    """Turn a saved optimizer dict into one for the present order of parameters, matched by plain name.

    saved: content of an optimizer file, with its list of names.   present_groups: names per group on this
    rank. Options come group by group. A parameter without saved state stays without. Spans of pieces are kept.
    Returns: torch's form, indices counted over present_groups; tensors are those of `saved`, not copied.
    Raises: CheckpointError if the number of groups differs, or (strict) if a group holds other parameters
        than when saved.
    """
    saved_groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    saved_names = saved.get(PARAM_NAMES)
    if saved_names is None:  # the original's files count on the order
        saved_names = _by_order(saved_groups, present_groups)
    if len(saved_groups) != len(present_groups):
        raise CheckpointError(
            f"the saved optimizer has {len(saved_groups)} parameter groups, now {len(present_groups)}",
            remedy="build the optimizer with the same parameter groups, or resume with load_optimizer=False",
        )
    state_of = {saved_names[index]: value for index, value in saved["state"].items()}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for number, (group, names) in enumerate(zip(saved_groups, present_groups, strict=True)):
        before = {saved_names[i] for i in group["params"]}
        if strict and before != set(names):
            changes = [
                *_named("only saved", before - set(names)),
                *_named("only present", set(names) - before),
            ]
            raise CheckpointError(
                f"optimizer parameter group {number} has changed: {'; '.join(changes)}",
                remedy="group the parameters as before, and mark the same modules for tensor parallelism, whatever the degree;"
                " strict=False takes the state of those in both",
            )
        indices = list(range(index, index + len(names)))
        index += len(names)
        for i, name in zip(indices, names, strict=True):
            if name in state_of:
                state[i] = state_of[name]
        # Without torch's own "param_names": load_state_dict then keeps the present ones.
        options = {key: value for key, value in group.items() if key not in ("params", PARAM_NAMES)}
        groups.append({**options, "params": indices})
    spans = {SPANS: saved[SPANS]} if SPANS in saved else {}
    return {"state": state, "param_groups": groups, **spans}


def settings_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an optimizer dict says of each group besides its parameters."""
    return [{k: v for k, v in group.items() if k not in ("params", PARAM_NAMES)} for group in content["param_groups"]]


def without_moments(content: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Of a whole optimizer dict the masters and the loss scaler, with the settings of another one of the same groups."""
    masters = {i: {MASTER: values[MASTER]} for i, values in content["state"].items() if MASTER in values}
    members = (group["params"] for group in content["param_groups"])
    groups = [{**settings, "params": params} for settings, params in zip(settings_of(present), members, strict=True)]
    return {**content, "state": masters, "param_groups": groups}


def _by_order(saved: Sequence[Mapping[str, Any]], present: Sequence[Sequence[str]]) -> Sequence[str]:
    sizes, now = [len(group["params"]) for group in saved], [len(names) for names in present]
    if sizes != now:
        raise CheckpointError(
            f"the saved optimizer names no parameters, and has groups of {sizes} of them, now {now}",
            remedy="build the optimizer with the same parameter groups, or resume with load_optimizer=False",
        )
    return [name for names in present for name in names]


def with_half_precision(optimizer: Mapping[str, Any], masters: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer state in torch's form with the masters beside it in the state of their parameters.

    optimizer, masters: attached to the same groups.   saved: the file with the masters, for what else it holds.
    """
    indices = [*optimizer["state"], *(i for i in masters["state"] if i not in optimizer["state"])]
    state = {i: {**optimizer["state"].get(i, {}), **masters["state"].get(i, {})} for i in indices}
    known = ("state", "param_groups", PARAM_NAMES, SPANS)
    return {**optimizer, **{key: value for key, value in saved.items() if key not in known}, "state": state}


def detached(value: Any) -> Any:
    """Return the value with every tensor detached, where it is; copied are only containers.

    Raises: CheckpointError for a tensor without storage.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            raise CheckpointError(f"a tensor of shape {list(value.shape)} has no value on this rank, it can't be saved")
        return value.detach()
    if type(value) in (dict, OrderedDict):
        return {key: detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(detached, value))
    return value


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the manifest's spelling of a dtype: "float32", "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every tensor inside nested containers, and every value that holds none."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _plain_entry(role: StateRole, name: str, state: str | None, file: str, key: KeyPath) -> Entry:
    return Entry(role, name, state, (), OBJECT, (Slice(file, key, (), ()),))


def _named(label: str, names: set[str]) -> list[str]:
    shown = sorted(names)[:5]
    rest = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [f"{label}: {', '.join(shown)}{rest}"] if names else []
