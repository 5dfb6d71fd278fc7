"""What scripts of the original read off a parameter: `ds_shape`, `ds_numel` and `ds_tensor`.

Imported when a model is sharded, never before: DTensors take long to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.data_parallel import shards
from shardwright.data_parallel.flat_layout import ShardLayout
from shardwright.topology import context


class _Described(Tensor):
    """The attributes, for parameters of either kind. Reading them never communicates."""

    __slots__ = ()

    @property
    def ds_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Elements of the whole parameter."""
        return self.numel()

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's block of the flat parameter, padded: one dim, `ds_numel` = ceil(elements / degree) long.

        For reading. It shares memory with the parameter where its rows divide evenly over the ranks and nothing is padded;
        else it is a copy, in which elements that other ranks hold are those after the last `optimizer.step()` or load.
        """
        layout = ShardLayout(tuple(self.shape), context.world().table.degrees.sdp)
        block = shards.flat_block(self, layout, getattr(self, "_sw_missing", ()))
        block.ds_numel = layout.block  # type: ignore[attr-defined]
        return block


class ShardedParameter(_Described, DTensor):
    """A parameter of which this rank holds some rows."""

    __slots__ = ()


class WholeParameter(_Described, nn.Parameter):
    """A parameter without dims, which every rank holds."""


def describe(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters the attributes; they stay the same objects, of a subclass of their class."""
    for parameter in parameters:
        described: type = ShardedParameter if shards.is_shard(parameter) else WholeParameter
        parameter.__class__ = described


def refresh(parameters: Sequence[nn.Parameter]) -> None:
    """Bring `ds_tensor` up to date where its elements lie on several ranks.

    Called by: every rank of a shard group, with all parameters. Collectives: see `shards.missing_elements`.
    """
    layouts = [shards.layout_of(parameter) for parameter in parameters]
    for parameter, missing in zip(parameters, shards.missing_elements(parameters, layouts), strict=True):
        if missing:
            parameter._sw_missing = missing  # type: ignore[attr-defined]
