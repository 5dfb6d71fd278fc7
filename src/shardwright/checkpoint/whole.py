"""The whole model and the whole optimizer state of a running job, while ranks hold parts of them.

Both are described first, on every rank, and then brought to world rank 0 tensor by tensor (`stream`). `content` has the form
of the whole with deferred tensors in it, so that it can be renamed and given to a writer before the tensors come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.checkpoint import layout, state, stream
from shardwright.checkpoint.collective import collect, present_layout, run_everywhere, run_on_rank_zero
from shardwright.checkpoint.deferred import Deferred, filled
from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.manifest import Entry, merge_entries
from shardwright.checkpoint.state import CheckpointModel, CheckpointOptimizer
from shardwright.log import get_logger
from shardwright.topology.context import world
from shardwright.topology.ranks import Axis

_log = get_logger(__name__)

StateDict = dict[str, Any]
Put = Callable[[Deferred, Tensor], None]


@dataclass
class _Told:
    """What a rank says of its part.

    aliases: name -> the name under which the same tensor is described.   values: of the model, what isn't a tensor; of the
    optimizer, the state of each parameter, with labels in the place of tensors.
    """

    entries: list[Entry] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Label:
    """Which entry of the optimizer's state belongs here."""

    text: str


class WholeModel:
    """The state dict of the unpartitioned model.

    Called by: every rank of the world, or of the MP_GROUP of rank 0 if parameters aren't sharded (axis). Collectives: one gather
        of descriptions.
    content: equal on all ranks, in the model's order. Names that are one tensor have one deferred tensor.
    """

    def __init__(self, call: str, model: CheckpointModel, axis: Axis = "world") -> None:
        self._call = call
        self._axis: Axis = axis
        self._source = stream.source_name("model")
        self._held: StateDict = {}
        self._metadata: Any = None
        told = collect(call, lambda: self._tell(model), axis)
        self._entries = merge_entries(rank.entries for rank in told)
        known: StateDict = {e.name: Deferred.named(e.name, e.shape, getattr(torch, e.dtype)) for e in self._entries}
        for rank in told:
            known.update(rank.values)
            known.update((name, known[same]) for name, same in rank.aliases.items())
        order = [*(name for name in model.names_and_shapes() if name in known), *known]
        self.content: StateDict = OrderedDict((name, known[name]) for name in dict.fromkeys(order))
        if self._metadata is not None:
            self.content._metadata = self._metadata  # type: ignore[attr-defined]

    def _tell(self, model: CheckpointModel) -> _Told:
        told = _Told()
        if not _answers("model", model.partitioned):
            return told
        first: dict[int, str] = {}
        held = model.answered_state()
        self._metadata = getattr(held, "_metadata", None)
        for name, value in held.items():
            if not isinstance(value, Tensor):
                told.values[name] = value
            elif first.setdefault(id(value), name) == name:
                self._held[name] = value
            else:
                told.aliases[name] = first[id(value)]
        told.entries = state.model_entries(self._source, self._held, model.tensor_table())
        return told

    def send(self, put: Put, wanted: Iterable[Any]) -> None:
        """Bring all tensors to rank 0, which gives each of `wanted` to `put` as soon as it can be made.

        Called by: every rank. Collectives: messages to rank 0, and one gather of outcomes.
        wanted: looked at on rank 0: deferred tensors, each of which is put once however often it is there; other values are
            left out.
        Raises: what `put` raises, on every rank.
        """
        deliver = Delivery(put, wanted)
        held = {self._source: self._held}
        run_everywhere(
            self._call,
            lambda: stream.send_whole(self._entries, held, lambda e, tensor: deliver.take(e.name, tensor), self._axis),
            self._axis,
        )

    def in_original_names(self, model: CheckpointModel) -> StateDict:
        """On rank 0 the content in the names of the model before modules were replaced; the other ranks' stays.

        Called by: every rank of the world. Collectives: one small one. A translation that looks at values, which are not there
        yet, gets all tensors in memory on rank 0.
        """

        def can_wait() -> bool:
            try:
                model.original_names(self.content.copy())
            except Exception as error:
                _log.info("the model is gathered on rank 0 before its translation, which looks at values: %s", error)
                return False
            return True

        content = self.content if run_on_rank_zero(self._call, can_wait) else self.collected()
        return model.original_names(content) if world().rank == 0 else content

    def collected(self) -> StateDict:
        """All of it in memory, on rank 0; `content` on the others. Called by: every rank, see `send`."""
        tensors: dict[int, Tensor] = {}
        self.send(lambda deferred, tensor: tensors.update({id(deferred): tensor}), self.content.values())
        if world().rank > 0:
            return self.content
        return filled(self.content, tensors)


class WholeOptimizer:
    """The optimizer's state in torch's form, indices counted over the groups of the unpartitioned model, with `PARAM_NAMES`.

    Called by: every rank of the world. Collectives: one gather of descriptions.
    content: on rank 0; {} on the others. Masters are values in their parameters' states.
    """

    def __init__(self, call: str, optimizer: CheckpointOptimizer, *, partitioned: bool) -> None:
        self._call = call
        self._held: dict[str, Any] = {}
        told = collect(call, lambda: self._tell(optimizer, partitioned))
        self._entries = [e for e in merge_entries(rank.entries for rank in told) if e.dtype != state.OBJECT]
        self.content: StateDict = {}
        if world().rank == 0:
            self.content = self._joined(optimizer, told)

    def _tell(self, optimizer: CheckpointOptimizer, partitioned: bool) -> _Told:
        told = _Told()
        names = [name for group in optimizer.group_names() for name in group]
        sources: dict[StateRole, Callable[[], StateDict | None]] = {
            "optimizer": lambda: optimizer.local_state_dict(gather_if_shard=False),
            "fp16_states": optimizer.half_precision_state,
        }
        for role, make in sources.items():
            content = make() if _answers(role, partitioned) else None
            if content is None:
                continue
            source, table = stream.source_name(role), optimizer.parameter_table()
            self._held[source] = content
            spans = content.get(state.SPANS)
            told.entries += state.optimizer_entries(role, source, content["state"], names, table, spans)
            for index, values in content["state"].items():
                told.values.setdefault(names[index], {}).update(labelled(values, f"{role} {names[index]}"))
        return told

    def _joined(self, optimizer: CheckpointOptimizer, told: Sequence[_Told]) -> StateDict:
        known = {label_of(e): Deferred.named(label_of(e), e.shape, getattr(torch, e.dtype)) for e in self._entries}
        groups: list[StateDict] = []
        states: dict[int, Any] = {}
        names: list[str] = []
        settings = optimizer.local_state_dict(gather_if_shard=False)["param_groups"]
        for group, members in zip(settings, optimizer.full_group_names(), strict=True):
            own_names = {state.PARAM_NAMES: list(members)} if state.PARAM_NAMES in group else {}
            groups.append({**group, **own_names, "params": list(range(len(names), len(names) + len(members)))})
            names += members
        for index, name in enumerate(names):
            values = next((rank.values[name] for rank in told if name in rank.values), None)
            if values is not None:
                states[index] = tree_map_only(_Label, lambda label: known[label.text], values)
        half = optimizer.half_precision_state() or {}
        besides = ("state", "param_groups", state.PARAM_NAMES, state.SPANS)
        scaler = {key: value for key, value in half.items() if key not in besides}
        return {"state": states, "param_groups": groups, **scaler, state.PARAM_NAMES: names}

    def send(self, put: Put) -> None:
        """Bring all tensors to rank 0, which gives each to `put`. Called by: every rank; see `WholeModel.send`."""
        deliver = Delivery(put, tree_leaves(self.content))
        run_everywhere(
            self._call, lambda: stream.send_whole(self._entries, self._held, lambda e, t: deliver.take(label_of(e), t))
        )


class Delivery:
    """Makes deferred tensors of the tensors that come by, each as soon as it can be, and keeps none for longer than that."""

    def __init__(self, put: Put, wanted: Iterable[Any]) -> None:
        self._put = put
        self._given: dict[str, Tensor] = {}
        self._missing: dict[int, set[str]] = {}
        self._users: dict[str, list[Deferred]] = {}
        for result in {id(value): value for value in wanted if isinstance(value, Deferred)}.values():
            self._missing[id(result)] = set(result.needs())
            for name in result.needs():
                self._users.setdefault(name, []).append(result)

    def take(self, name: str, tensor: Tensor) -> None:
        """A tensor has come; it may be kept until others have."""
        if name not in self._users:
            return
        self._given[name] = tensor
        del tensor
        for result in list(self._users[name]):
            self._missing[id(result)].discard(name)
            if self._missing[id(result)]:
                continue
            self._put(result, result.make(self._given))
            for used in result.needs():
                self._users[used] = [other for other in self._users[used] if other is not result]
                if not self._users[used]:
                    del self._given[used]


def _answers(role: StateRole, partitioned: bool) -> bool:
    """Does this rank tell of its part? Of replicas one does; before partitioning the first stage has everything."""
    at = world().coordinates
    return layout.writes_state(present_layout(), role, rdp=at.rdp) and (partitioned or at.pp == 0)


def label_of(entry: Entry) -> str:
    """Which value of a parameter's state an entry of an optimizer is."""
    return f"{entry.role} {entry.name}" + (f"/{entry.state}" if entry.state else "")


def labelled(value: Any, label: str, make: Callable[[str], Any] = _Label) -> Any:
    """A copy with something made of their labels, see `label_of`, in the place of tensors."""
    if isinstance(value, Tensor):
        return make(label)
    if isinstance(value, dict):
        return {key: labelled(item, f"{label}/{key}", make) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(labelled(item, f"{label}/{index}", make) for index, item in enumerate(value))
    return value
