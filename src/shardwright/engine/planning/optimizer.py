"""What an optimizer holds for each element of a parameter: found out by two steps on small parameters."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwright.errors import UsageError
from shardwright.optim.lamb import FusedLamb
from shardwright.optim.novograd import FusedNovoGrad

_FEW = 3
_SIDE = 64


@dataclass(frozen=True)
class OptimizerNeeds:
    """Bytes per element of a parameter in float32.

    state_bytes: kept from step to step.   update_bytes, largest_bytes: more during a step, for each element of all
    parameters, and of the largest one.
    """

    name: str
    state_bytes: float
    update_bytes: float
    largest_bytes: float


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim, or of ours, that has this name in any mixture of capitals.

    Raises: UsageError that lists the names.
    """
    found = {
        key.lower(): cls
        for key, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    for refused in ("sparseadam", "lbfgs", "muon", "adafactor"):  # state that doesn't grow with the number of elements alone
        found.pop(refused, None)
    found.update(fusedlamb=FusedLamb, fusednovograd=FusedNovoGrad)
    if name.lower() not in found:
        raise UsageError(
            f"the optimizer is '{name}', expected one of {', '.join(sorted(cls.__name__ for cls in found.values()))}",
            remedy="take one whose state has the shape of the parameters, as that of yours",
        )
    return found[name.lower()]


def probe(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any] | None = None, *, at_once: bool = False
) -> OptimizerNeeds:
    """Step the optimizer twice on few and on more parameters, and count.

    at_once: update all parameters in one go (`foreach`), as torch does on CUDA, if the optimizer can.
    """
    options = dict(options or {})
    try:
        cls([nn.Parameter(torch.zeros(1))], foreach=at_once, **options)  # type: ignore[call-arg]
        options["foreach"] = at_once
    except TypeError:  # it has no such argument
        pass
    state_bytes, few = _step(cls, options, _FEW)
    _, more = _step(cls, options, 2 * _FEW)
    each = (more - few) / _FEW
    elements = _SIDE * _SIDE
    return OptimizerNeeds(cls.__name__, state_bytes, each / elements, max(0.0, (few - _FEW * each) / elements))


def _step(cls: type[torch.optim.Optimizer], options: Mapping[str, Any], number: int) -> tuple[float, int]:
    """(bytes of state per element, most bytes of other tensors at one time in the second step)."""
    parameters = [nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(number)]
    optimizer = cls(parameters, **options)
    watch = _Live()
    before = 0
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        before = watch.peak = watch.live
        with watch:
            optimizer.step()
    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor) and value.dim()
    )
    return state / (number * _SIDE * _SIDE), watch.peak - before


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of the tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.live = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inside = {_key(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, Tensor) and leaf.dim() and (key := _key(leaf)) not in inside and key not in self._alive:
                memory = leaf.untyped_storage()
                self.live += memory.nbytes()
                self.peak = max(self.peak, self.live)
                self._alive[key] = weakref.ref(memory, self._gone(key, memory.nbytes()))
        return out

    def _gone(self, key: int, nbytes: int) -> Any:
        def gone(_: Any) -> None:
            self.live -= nbytes
            self._alive.pop(key, None)

        return gone


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
