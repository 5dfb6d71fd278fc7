"""Watch a forward pass: which module ran when, what it computed, what it kept, and what would cross between
stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from shardwright.partition.cost import LOSS_PASSES, operation_work
from shardwright.partition.records import ModuleRecord

_LOOKUPS = frozenset({"aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::take"})


@dataclass
class _Counts:
    first_call: int = -1
    num_calls: int = 0
    entry_time: int = 0
    output_bytes: int = 0
    flops: int = 0
    work: float = 0.0
    saved_bytes: int = 0
    trailing_flops: int = 0
    trailing_work: float = 0.0
    trailing_saved_bytes: int = 0


@dataclass
class _Frame:
    name: str
    last_child: str | None = None


@dataclass
class _Value:
    """One storage made by the forward: when it was made and last read (in operations)."""

    made: int
    read: int
    nbytes: int
    computed: bool
    """Depends on a parameter or buffer. What doesn't is the same on every rank and never crosses."""


class Recorder(TorchDispatchMode):
    """A dispatch mode that counts; module borders reach it through hooks.

    Protocol: create, `with recorder.watching(module): forward`, perhaps `assume_loss(output)`, then
    `records()` and `borrowed`. Only modules that hold parameters (themselves or below) are told apart.

    names: module id -> name, of those modules.
    homes: storage key of each parameter (or buffer) -> names of the modules that hold it (empty for a
    buffer).
    """

    def __init__(self, names: dict[int, str], homes: dict[int, tuple[str, ...]]) -> None:
        super().__init__()
        self.names = names
        self.homes = homes
        self.borrowed: dict[tuple[str, str], None] = {}
        self._counts: dict[str, _Counts] = {}
        self._stack = [_Frame("")]
        self._time = 0
        self._order = 0
        self._live: dict[int, _Value] = {}
        self._dead: list[_Value] = []
        self._saved: set[tuple[int, int]] = set()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Hooks on every module that holds parameters, gone again afterwards."""
        handles = []
        try:
            for found in module.modules():
                name = self.names.get(id(found))
                if name is not None:
                    handles.append(found.register_forward_pre_hook(self._enter(name), prepend=True))
                    handles.append(found.register_forward_hook(self._leave(name), always_call=True))
            with torch.autograd.graph.saved_tensors_hooks(self._save, _unchanged), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def assume_loss(self, output: Any) -> None:
        """Add the loss that the script will apply, unless the model returned one itself."""
        tensors = [leaf for leaf in _tensors(output) if leaf.is_floating_point()]
        if tensors and all(leaf.dim() for leaf in tensors):
            self._add(0, operation_work(0, LOSS_PASSES * max(_nbytes(leaf) for leaf in tensors)))

    def records(self) -> dict[str, ModuleRecord]:
        """The counts of every module that ran, in order of first call."""
        called = sorted((c.first_call, name) for name, c in self._counts.items() if c.num_calls)
        crossing = self._crossing([self._counts[name].entry_time for _, name in called])
        records = {}
        for (order, name), entry_bytes in zip(called, crossing, strict=True):
            counts = self._counts[name]
            records[name] = ModuleRecord(
                first_call=order,
                num_calls=counts.num_calls,
                flops=counts.flops,
                work=counts.work,
                saved_bytes=counts.saved_bytes,
                trailing_flops=counts.trailing_flops,
                trailing_work=counts.trailing_work,
                trailing_saved_bytes=counts.trailing_saved_bytes,
                output_bytes=counts.output_bytes,
                entry_bytes=entry_bytes,
            )
        return records

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _may_decompose(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = _grouped_mm_shape(args) if _is_fake_grouped_mm(func, args) else func(*args, **kwargs)
        self._account(func, args, kwargs, out)
        return out

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            counts = self._of(name)
            if not counts.num_calls:
                counts.first_call, counts.entry_time = self._order, self._time
                self._order += 1
            counts.num_calls += 1
            self._stack.append(_Frame(name))

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while len(self._stack) > 1 and self._stack.pop().name != name:
                pass
            self._stack[-1].last_child = name
            self._of(name).output_bytes += sum(_nbytes(leaf) for leaf in _tensors(output))

        return leave

    def _of(self, name: str) -> _Counts:
        return self._counts.setdefault(name, _Counts())

    def _add(self, flops: int, work: float) -> None:
        frame = self._stack[-1]
        if frame.last_child is None:
            counts = self._of(frame.name)
            counts.flops += flops
            counts.work += work
        else:
            counts = self._of(frame.last_child)
            counts.trailing_flops += flops
            counts.trailing_work += work

    def _save(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        value = self._live.get(key)
        mark = (key, value.made if value is not None else -1)
        if key not in self.homes and mark not in self._saved:
            self._saved.add(mark)
            self._keep(_nbytes(tensor))
        return tensor

    def _keep(self, nbytes: int) -> None:
        frame = self._stack[-1]
        if frame.last_child is None:
            self._of(frame.name).saved_bytes += nbytes
        else:
            self._of(frame.last_child).trailing_saved_bytes += nbytes

    def _account(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        input_keys = {storage_key(leaf) for leaf in inputs}
        computed = False
        for key in input_keys:
            if key in self.homes:
                computed = True
                self._borrow(key)
            elif (value := self._live.get(key)) is not None:
                value.read = self._time
                computed = computed or value.computed
        fresh = [leaf for leaf in outputs if storage_key(leaf) not in input_keys]
        for leaf in outputs:
            key = storage_key(leaf)
            if key not in input_keys:
                self._retire(key)
                self._live[key] = _Value(self._time, self._time, _storage_bytes(leaf), computed)
            elif (value := self._live.get(key)) is not None:
                value.computed = value.computed or computed
        writes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if not torch.is_grad_enabled():  # no backward to ask: what is computed anew is likely kept
            self._keep(sum(_nbytes(leaf) for leaf in fresh))
        if fresh or writes:
            self._add(*_measure(func, args, kwargs, inputs, outputs))
        self._time += 1

    def _retire(self, key: int) -> None:
        value = self._live.pop(key, None)
        if value is not None:
            self._dead.append(value)

    def _borrow(self, key: int) -> None:
        user = self._stack[-1].name
        holders = self.homes[key]
        below = f"{user}." if user else ""
        if holders and not any(holder == user or holder.startswith(below) for holder in holders):
            self.borrowed[user, holders[0]] = None

    def _crossing(self, times: list[int]) -> list[int]:
        """For each (ascending) time, the bytes of computed values made before it and read at it or later."""
        steps = [0] * (len(times) + 1)
        for value in [*self._dead, *self._live.values()]:
            if value.computed:
                steps[bisect_right(times, value.made)] += value.nbytes
                steps[bisect_right(times, value.read)] -= value.nbytes
        total, result = 0, []
        for step in steps[:-1]:
            total += step
            result.append(total)
        return result


def _may_decompose(func: Any) -> bool:
    """Whether to look inside an operation for those whose FLOPs are known."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func._overloadpacket not in flop_registry
        and func is not torch.ops.prim.device.default
    )


def _measure(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[int, float]:
    flops = _flops(func, args, kwargs, outputs)
    nbytes = sum(_nbytes(leaf) for leaf in outputs)
    if isinstance(func, torch._ops.OpOverload) and func._schema.name in _LOOKUPS:
        nbytes *= 2
    else:
        nbytes += sum(_nbytes(leaf) for leaf in inputs)
    return flops, operation_work(flops, nbytes)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> int:
    packet = getattr(func, "_overloadpacket", func)
    count = flop_registry.get(packet)
    if count is not None:
        out = outputs[0] if len(outputs) == 1 else tuple(outputs)
        return int(count(*args, **kwargs, out_val=out))
    name = str(packet)
    if "scaled_dot_product" in name and len(args) >= 3:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if "grouped_mm" in name:
        return 2 * outputs[0].numel() * int(args[0].shape[-1])
    return 0


def _is_fake_grouped_mm(func: Any, args: tuple[Any, ...]) -> bool:
    """The shape rule of this operation refuses types that its kernel takes (fp32 on a CPU)."""
    return str(getattr(func, "_overloadpacket", "")) == "aten._grouped_mm" and isinstance(args[0], FakeTensor)


def _grouped_mm_shape(args: tuple[Any, ...]) -> Tensor:
    left: Tensor = args[0]
    right: Tensor = args[1]
    if left.dim() == 2 and right.dim() == 2:  # contracted over the ragged dim: one result per group
        groups = args[2].shape[0]
        return left.new_empty(groups, left.shape[0], right.shape[1])
    if left.dim() == 3 and right.dim() == 2:
        return left.new_empty(left.shape[1], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor while it lives; views share it."""
    return int(tensor.untyped_storage()._cdata)


def _storage_bytes(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded one counts what is stored."""
    return min(tensor.numel() * tensor.element_size(), _storage_bytes(tensor))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
