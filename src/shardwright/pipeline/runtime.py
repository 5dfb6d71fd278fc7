"""What the pipeline knows of one partitioned model on this rank, shared by all its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwright.pipeline.overlay import Overlay


class Wire(Protocol):
    """Ordered messages between the ranks of the pipeline group; `to` and `source` are pp ranks.

    channel: the microbatch. Messages of one (source, to, channel) arrive in the order in which they were sent.
    The handle's `wait()` returns the received tensor, or raises when a rank is lost or time runs out.
    """

    def send(self, tensor: torch.Tensor, to: int, channel: int) -> Any: ...

    def receive(self, buffer: torch.Tensor, source: int, channel: int) -> Any: ...


@dataclass(eq=False)
class Registered:
    """A parameter or buffer of the model, and the stage that owns it.

    home: the module and key where a buffer is kept.
    used, changed: glue has read it, has changed or reassigned it, in this step.
    steady: the values of its module's `training` with which a whole step only read it (see `shared`).
    """

    name: str
    tensor: torch.Tensor
    owner: int
    is_buffer: bool
    home: tuple[torch.nn.Module, str] | None = None
    used: bool = False
    changed: bool = False
    steady: set[bool] = field(default_factory=set)


@dataclass(eq=False)
class Runtime:
    """One pipeline rank's view of the partitioned model.

    rank, size: of the pipeline group.   device: where this rank computes.
    cost: estimated cost of one forward call per unit name, equal on all ranks; only for the schedule.
    module_names: name by id of every module of the model.   num_steps: steps begun.
    glue_cache: outcomes of glue ops by key.
    own: by id, the objects among this step's inputs that each rank has itself (see `inputs`).
    overlay: attributes of modules that this step's glue assigned.
    news: outcomes of units that this step told, as (cache, key, outcome); see `spec_cache`.
    readers: names of units whose calls look at tensors that calls before them have kept (see `kept`), and whether in
        objects; new_readers: what this step told of that.
    tied: ids of parameters that several modules have.
    gradient_arrived: called when a parameter that several calls of a microbatch use has its gradient of them all.
    """

    rank: int
    size: int
    device: torch.device
    wire: Wire
    registered: dict[int, Registered] = field(default_factory=dict)
    glue_cache: dict[Any, Any] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    module_names: dict[int, str] = field(default_factory=dict)
    num_steps: int = 0
    units: list[Any] = field(default_factory=list)
    own: dict[int, Any] = field(default_factory=dict)
    overlay: Overlay = field(default_factory=Overlay)
    news: list[tuple[Any, Any, Any]] = field(default_factory=list)
    readers: dict[str, bool] = field(default_factory=dict)
    new_readers: dict[str, bool] = field(default_factory=dict)
    tied: set[int] = field(default_factory=set)
    gradient_arrived: Callable[[torch.nn.Parameter], None] = lambda parameter: None

    def register(
        self, name: str, tensor: torch.Tensor, owner: int, home: tuple[torch.nn.Module, str] | None = None
    ) -> None:
        """Make a parameter, or (with its home) a buffer, known to glue."""
        if id(tensor) not in self.registered:
            self.registered[id(tensor)] = Registered(name, tensor, owner, home is not None, home)

    def replace(self, entry: Registered, tensor: torch.Tensor) -> None:
        """A buffer was assigned anew."""
        self.registered.pop(id(entry.tensor), None)
        entry.tensor = tensor
        self.registered[id(tensor)] = entry

    def begin_step(self, own: dict[int, Any]) -> None:
        """The step's inputs are there. own: objects among them that each rank has itself."""
        self.own = own
        for unit in self.units:
            if unit.kept.places:
                unit.kept.begin_step(self.overlay)

    def learn(self) -> None:
        """A step ended well on every rank: what it told is known from now on."""
        by_cache: dict[Any, dict[Any, Any]] = {}
        for cache, key, outcome in self.news:
            by_cache.setdefault(cache, {})[key] = outcome
        for cache, news in by_cache.items():
            cache.learn(news)
        for name, in_objects in self.new_readers.items():
            self.readers[name] = self.readers.get(name, False) or in_objects
        self._end_step()

    def forget(self) -> None:
        """A step failed: ranks may have got differently far in it."""
        self.overlay.undo()
        self._end_step()

    def _end_step(self) -> None:
        self.news.clear()
        self.new_readers.clear()
        self.own = {}
        for unit in self.units:
            if unit.kept.places:
                unit.kept.end_step()

    def refresh_buffers(self, homes: Iterable[tuple[str, torch.nn.Module, str]]) -> None:
        """After a unit ran here: buffers that it assigned anew are known under their new object."""
        for name, module, key in homes:
            tensor = module._buffers.get(key)
            if tensor is not None and id(tensor) not in self.registered:
                for entry in list(self.registered.values()):
                    if entry.name == name:
                        self.replace(entry, tensor)
                        break

    def tensors_changed(self) -> None:
        """Parameters or buffers were cast: what units returned says nothing about what they will return."""
        for entry in list(self.registered.values()):
            if entry.home is not None:
                module, key = entry.home
                tensor = module._buffers.get(key)
                if tensor is not None and tensor is not entry.tensor:
                    self.replace(entry, tensor)
        self.glue_cache.clear()
        for unit in self.units:
            unit.cache.clear()


# Functions that return a mutable object which module hooks write to, or None; every unit treats it as an argument.
ambient: list[Callable[[], Any]] = []
_PARAMETRIZING_HOOKS = {
    ("torch.nn.utils.weight_norm", "WeightNorm"),
    ("torch.nn.utils.spectral_norm", "SpectralNorm"),
    ("torch.nn.utils.prune", ""),
}


def _only_sets_a_weight(hook: Any) -> bool:
    """torch's own hooks that compute a weight from others before each call."""
    cls = type(hook)
    return (cls.__module__, cls.__name__) in _PARAMETRIZING_HOOKS or (cls.__module__, "") in _PARAMETRIZING_HOOKS


harmless_hooks: list[Callable[[Any], bool]] = [_only_sets_a_weight]


def register_ambient(read: Callable[[], Any]) -> None:
    """Name an object outside the arguments that hooks inside units write to (a collector of hidden states)."""
    ambient.append(read)


def register_harmless_hook(test: Callable[[Any], bool]) -> None:
    """Name forward hooks whose only effect is on results and on ambient objects: they may run inside units."""
    harmless_hooks.append(test)
