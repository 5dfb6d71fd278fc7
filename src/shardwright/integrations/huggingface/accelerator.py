"""accelerate's view of the world as the Trainer needs it: its processes are data-parallel ranks.

By itself accelerate takes every process for a replica: it would give stages of one pipeline different data, gather
metrics over all of them, and clip by the norm of what one rank holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.operations import recursively_apply
from torch.nn import functional

from shardwright.engine.grad_clipping import clip_grad_norm
from shardwright.engine.state import state
from shardwright.errors import UsageError
from shardwright.topology import accessors
from shardwright.topology.accessors import CommGroup
from shardwright.transport import objects


class ModelParallelAccelerator(Accelerator):
    """An `Accelerator` whose processes are the ranks that have data of their own, in the Trainer's place of the plain one.

    Models and optimizers are the library's, so it leaves them as they are. Gathering is over the group of those ranks,
    with one object gather, and is called by all ranks of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _no_launcher():
            super().__init__(*args, **kwargs)
        prescaled = state.cfg.prescaled_batch
        self._group = CommGroup.RDP_GROUP if prescaled else CommGroup.DP_GROUP
        place = {
            "num_processes": accessors.rdp_size() if prescaled else accessors.dp_size(),
            "process_index": accessors.rdp_rank() if prescaled else accessors.dp_rank(),
            "local_process_index": accessors.local_rank(),
        }
        PartialState._shared_state.update(place)
        AcceleratorState._shared_state.update(place)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """The wrapped optimizer as it is: accelerate's wrapper would hide what it can do."""
        if optimizer is state.optimizer:
            return optimizer
        return super().prepare_optimizer(optimizer, device_placement)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Was the last optimizer step skipped because of an overflow?"""
        return bool(getattr(state.optimizer, "overflow", False))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip all gradients of the wrapped model by the norm of the whole model."""
        return clip_grad_norm(max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all data-parallel ranks, one after the other in the first dimension."""
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that filled up the last batch."""
        if use_gather_object and self.num_processes > 1:
            raise UsageError(
                "eval_use_gather_object gathers by accelerate, over ranks that have no data of their own",
                remedy="leave it out",
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad nested tensors to the largest size in one dimension among data-parallel ranks."""
        return recursively_apply(self._pad_one, tensor, error_on_other_type=True, dim=dim, value=pad_index, first=pad_first)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
        return torch.cat([part.to(tensor.device) for part in objects.allgather(tensor, self._group)])

    def _pad_one(self, tensor: torch.Tensor, dim: int, value: int, first: bool) -> torch.Tensor:
        if dim >= tensor.ndim:
            return tensor
        missing = max(objects.allgather(tensor.shape[dim], self._group)) - tensor.shape[dim]
        before_and_after = (missing, 0) if first else (0, missing)
        return functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + before_and_after, value=value)


@contextmanager
def _no_launcher() -> Iterator[None]:
    """Inside, accelerate sees a process of its own, and no launcher that started others."""
    found = os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if found is not None:
            os.environ["LOCAL_RANK"] = found
