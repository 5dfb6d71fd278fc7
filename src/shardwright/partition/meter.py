"""Watch the memory of one microbatch: forward, loss and backward on fake tensors, allocation by allocation.

Counted is what tensors own, as it lives and dies in one process. What kernels use inside themselves is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwright.partition.footprint import Border, Footprint, Stretch
from shardwright.partition.recorder import storage_key
from shardwright.partition.trace import bearing_modules, on_fake_tensors

Loss = Callable[[Any], Tensor]


def measure(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, loss: Loss | None = None
) -> Footprint:
    """Run one microbatch on fake tensors, and a forward that keeps nothing, and return what they held.

    loss: from the model's output to the number to minimise. Without it, the output's own `loss` if there is one, else
    the mean of its first floating tensor.
    Called by: any process, alone. Collectives: none. The model is left as it was.
    Raises: whatever the model's forward or backward raises on fake tensors.
    """
    names = bearing_modules(module)
    with on_fake_tensors(module, args, kwargs) as (fake_args, fake_kwargs):
        heavy = _Meter(names, [*module.parameters(), *module.buffers()], (fake_args, fake_kwargs))
        with heavy.watching(module):
            output = module(*fake_args, **fake_kwargs)
            value = _loss_of(output, loss)
            heavy.turn()
            torch.autograd.backward([value])
            del value
        backward = heavy.finish(module)
        del output
    with on_fake_tensors(module, args, kwargs) as (fake_args, fake_kwargs):
        present = [*module.parameters(), *module.buffers()]
        plain = _Meter(names, present, (fake_args, fake_kwargs), keeps=False)
        with plain.watching(module):
            output = module(*fake_args, **fake_kwargs)
            plain.turn()
        del output
    return Footprint(heavy.forward, plain.forward, backward, heavy.borders())


def _loss_of(output: Any, loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(output)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad)
    return found if found.dim() == 0 else found.mean()


@dataclass
class _Open:
    """A stretch that is not over."""

    running: str
    home: str
    start: int
    peak: int
    gradients: int = 0
    end: int = 0

    def closed(self) -> Stretch:
        return Stretch(self.running, self.home, self.peak - self.start, self.end - self.start, self.gradients)


@dataclass
class _Storage:
    """Memory that an operation made. made, read, saved: when (in operations); saved: first, for the backward."""

    nbytes: int
    made: int
    read: int
    computed: bool
    stretch: _Open
    saved: int | None = None


class _Meter(TorchDispatchMode):
    """Protocol: `with meter.watching(module)`: forward, `turn`, backward; then `finish`.

    keeps: False drops what autograd saves, as activation checkpointing does; there is no backward then.
    """

    def __init__(self, names: dict[int, str], present: list[Tensor], inputs: Any, *, keeps: bool = True) -> None:
        super().__init__()
        self._keeps = keeps
        self._names = names
        self._computed = {storage_key(tensor) for tensor in present}
        self._present = self._computed | {
            storage_key(leaf) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)
        }
        self._live = 0
        self._time = 0
        self._storages: dict[int, _Storage] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._made: list[_Storage] = []
        self._stack: list[list[str | None]] = [["", None]]
        self._first_calls: dict[str, int] = {}
        self._stretches: list[_Open] = []
        self._in_backward = False
        self._begin("", "")
        self.forward: tuple[Stretch, ...] = ()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        handles = []
        try:
            for found in module.modules():
                name = self._names.get(id(found))
                if name is not None:
                    handles.append(found.register_forward_pre_hook(self._enter(name), prepend=True))
                    handles.append(found.register_forward_hook(self._leave(name), always_call=True))
            pack = self._pack if self._keeps else _nothing
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def turn(self) -> None:
        """Forward is over."""
        last = self._close()
        self.forward = tuple(stretch.closed() for stretch in self._stretches)
        self._stretches = []
        self._in_backward = True
        self._begin(last.running, last.home)

    def finish(self, module: nn.Module) -> tuple[Stretch, ...]:
        """Backward is over: what it consisted of."""
        self._close()
        for parameter in module.parameters():
            storage = None if parameter.grad is None else self._storages.get(storage_key(parameter.grad))
            if storage is not None:
                storage.stretch.gradients += storage.nbytes
        self._watched.clear()
        return tuple(stretch.closed() for stretch in self._stretches)

    def borders(self) -> dict[str, Border]:
        """What would cross at the first call of each module."""
        found = {}
        forward = [s for s in self._made if s.computed and s.read > s.made]
        for name, time in self._first_calls.items():
            crossing = [s for s in forward if s.made < time <= s.read]
            kept = sum(s.nbytes for s in crossing if s.saved is not None and s.saved < time)
            unsaved = sum(s.nbytes for s in crossing if s.saved is None)
            found[name] = Border(sum(s.nbytes for s in crossing), kept, unsaved)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._time += 1
        computed = False
        inside = set()
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor):
                key = storage_key(leaf)
                inside.add(key)
                computed = computed or key in self._computed
                storage = self._storages.get(key)
                if storage is not None:
                    computed = computed or storage.computed
                    if not self._in_backward:
                        storage.read = self._time
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, Tensor) and (key := storage_key(leaf)) not in inside and key not in self._present:
                if key not in self._storages:
                    self._add(key, leaf, computed)
        return out

    def _add(self, key: int, leaf: Tensor, computed: bool) -> None:
        memory = leaf.untyped_storage()
        nbytes = int(memory.nbytes())
        made = _Storage(nbytes, self._time, self._time, computed, self._stretches[-1])
        self._storages[key] = made
        if not self._in_backward:
            self._made.append(made)
        self._watched[key] = weakref.ref(memory, lambda _: self._drop(key))
        self._live += nbytes
        self._stretches[-1].peak = max(self._stretches[-1].peak, self._live)

    def _drop(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        self._watched.pop(key, None)
        if storage is not None:
            self._live -= storage.nbytes

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._first_calls.setdefault(name, self._time + 1)
            self._stack.append([name, None])
            self._change()

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while len(self._stack) > 1 and self._stack.pop()[0] != name:
                pass
            self._stack[-1][1] = name
            self._change()

        return leave

    def _change(self) -> None:
        running, last_child = self._stack[-1]
        assert running is not None
        self._close()
        self._begin(running, running if last_child is None else last_child)

    def _begin(self, running: str, home: str) -> None:
        self._stretches.append(_Open(running, home, self._live, self._live))

    def _close(self) -> _Open:
        last = self._stretches[-1]
        last.end = self._live
        return last

    def _pack(self, tensor: Tensor) -> tuple[Tensor, str, str]:
        storage = self._storages.get(storage_key(tensor))
        if storage is not None and storage.saved is None:
            storage.saved = self._time
        here = self._stretches[-1]
        return tensor, here.running, here.home

    def _unpack(self, kept: tuple[Tensor, str, str]) -> Tensor:
        tensor, running, home = kept
        here = self._stretches[-1]
        if (here.running, here.home) != (running, home):
            self._close()
            self._begin(running, home)
        return tensor


def _nothing(tensor: Tensor) -> None:
    """In place of what autograd would save."""
