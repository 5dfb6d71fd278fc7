"""How a model that is spread over ranks answers to what `nn.Module` offers: casts, moves, and being saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import Self

from shardwright.engine import clipping_watch, placement, weights
from shardwright.engine.part import Part
from shardwright.engine.sharded_state import ShardedState
from shardwright.engine.state import state
from shardwright.engine.step_duties import StepDuties
from shardwright.engine.substitution import in_original_names
from shardwright.engine.wrapping import ForwardingModule
from shardwright.errors import UsageError
from shardwright.memory import delayed_init
from shardwright.topology import context
from shardwright.transport import collectives


class ModuleManners(ForwardingModule):
    """Devices are the library's business; dtypes and memory formats are the script's."""

    _part: Part
    _duties: StepDuties
    _sharding: ShardedState

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change dtype or memory format; devices are ignored. Returns the model."""
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None or memory_format is not None:
            super().to(None, dtype, memory_format=memory_format)  # type: ignore[call-overload]
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters, those of other stages as placeholders. Torch's clipping among the callers is told what it misses."""
        clipping_watch.watch(sharded=self._sharding.is_settled)
        yield from super().parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those of virtual parameters too."""
        super().zero_grad(set_to_none)
        self._sharding.clear_gradients(set_to_none=set_to_none)

    def cuda(self, device: Any = None) -> Self:
        """Returns the model: parts are on their devices after partitioning."""
        return self

    def cpu(self) -> Self:
        """Gather all parameters and buffers over the MP_GROUP and put the whole model on the CPU.

        Called by: every rank of the MP_GROUP. Afterwards it runs without steps, and can't be trained further.
        """
        pipeline, part = self._duties.pipeline, self._part
        if part.distribution.is_cut:
            raise UsageError(
                "model.cpu() can't gather a model whose modules are cut over tensor parallel ranks",
                remedy="take model.state_dict(), which is whole, and load it into the plain model",
            )
        if part.is_sharded:
            raise UsageError(
                "model.cpu() can't gather a model whose parameters are sharded over data-parallel ranks",
                remedy="take model.state_dict(), which is whole, and load it into the plain model",
            )
        if part.is_whole or pipeline is None:
            return super().cpu()
        mine = {**part.owned_tensors(), **part.held_extras()}
        whole = weights.gather(part, mine, "model.cpu()")
        for unit in pipeline.runtime.units:
            unit.remove()
        for entry in part.entries:
            tensor = entry.current()
            if tensor is not None:
                tensor.data = whole.pop(entry.name)
        for name, extra in whole.items():
            part.module.get_submodule(name.rpartition(".")[0]).set_extra_state(extra)
        part.gathered = True
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `half()`, `float()`, `to(dtype)` do. Placeholders stay without memory, and buffers known."""
        pipeline = self._duties.pipeline
        if self._part.is_sharded:
            for _, tensor in (*self._part.parameters(), *self._part.buffers()):
                if fn(torch.empty((), dtype=tensor.dtype)).dtype is not tensor.dtype:
                    raise UsageError(
                        "the dtype of a model can't change once its parameters are sharded over data-parallel ranks",
                        remedy="cast the plain module before smp.DistributedModel, or set 'bf16' or 'fp16'",
                    )
            return self
        if self._part.is_whole or pipeline is None:
            with delayed_init.go_on() if delayed_init.has_delayed(self._part.module) else nullcontext():
                return cast(Self, super()._apply(fn, recurse))  # type: ignore[no-untyped-call]
        elsewhere = {id(tensor) for tensor in self._part.elsewhere()}

        def light(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in elsewhere:
                return fn(tensor)
            return placement.placeholder(tensor.shape, fn(torch.empty((), dtype=tensor.dtype)).dtype)

        super()._apply(light, recurse)  # type: ignore[no-untyped-call]
        pipeline.runtime.tensors_changed()
        return self

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name == "save_pretrained" and (
            not self._part.is_complete or state.module_manager.translate_functions
        ):
            return functools.partial(self._save_pretrained, found)
        return found

    def _save_pretrained(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """The module's own `save_pretrained`, on world rank 0, with the gathered weights in the original's names.

        Called by: every rank of the MP_GROUP.
        """
        full = cast(Any, self).state_dict(gather_to_rank0=True)
        if context.world().rank == 0:
            save(*args, **{"state_dict": in_original_names(full), **kwargs})
        collectives.barrier("mp")
