"""What scripts ask a wrapped model about its parts: `model.local_parameters()` and the like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwright.engine.part import Part
from shardwright.engine.sharded_state import ShardedState


class PartAccessors:
    """Iterators over what this rank owns, in the plain module's names. No call communicates.

    Raises: UsageError by every `local_*` call before the model is partitioned.
    """

    _part: Part
    _sharding: ShardedState

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(plain name, parameter) for what this rank holds; each parameter once."""
        self._part.demand_settled("local_named_parameters()")
        return self._part.parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds."""
        self._part.demand_settled("local_parameters()")
        return (parameter for _, parameter in self._part.parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(plain name, buffer) for what this rank holds."""
        self._part.demand_settled("local_named_buffers()")
        return self._part.buffers()

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers that this rank holds."""
        self._part.demand_settled("local_buffers()")
        return (buffer for _, buffer in self._part.buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(plain name, module) for the modules that live on this rank's stage."""
        self._part.demand_settled("local_named_modules()")
        return self._part.modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that live on this rank's stage."""
        self._part.demand_settled("local_modules()")
        return (module for _, module in self._part.modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """With sharded optimizer state this rank's virtual parameters, from the end of the first step on.

        What isn't shared with other ranks, or not trained, comes as it is; of what this rank owns nothing, nothing.
        """
        for name, parameter in self.local_named_parameters():
            piece = self._sharding.piece(parameter) if self._sharding.is_settled else None
            if piece is None:
                yield name, parameter
            elif piece.stop > piece.start or not parameter.numel():
                yield name, piece.tensor

    # ------------------------------------------------------------------ tensor parallelism

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Tensor-parallel modules, of all stages."""
        return self._part.distribution.modules()

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Is it sliced over tp ranks?"""
        return self._part.distribution.spec(parameter) is not None

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Is it sliced over tp ranks?"""
        return self._part.distribution.is_cut_buffer(buffer)

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Does it act on the batch of the whole tp group?"""
        return self._part.distribution.is_scaled(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Does it act on the batch of the whole tp group?"""
        return self._part.distribution.is_scaled_buffer(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) on this rank whose gradients are reduced over DP_GROUP."""
        return ((n, p) for n, p in self.local_named_parameters() if not self.is_scaled_batch_parameter(p))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) on this rank whose gradients are reduced over RDP_GROUP."""
        return ((n, p) for n, p in self.local_named_parameters() if self.is_scaled_batch_parameter(p))
