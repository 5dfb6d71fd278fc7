"""`smp.sharded_data_parallel_checkpoint`: a full model from the shards of sharded data parallelism."""

from __future__ import annotations

from shardwright.engine.full_sharding import get_buffer_names, get_param_shapes
from shardwright.torch import _not_built

__all__ = [
    "get_buffer_names",
    "get_full_state_dict_from_sharded_data_parallel_checkpoint",
    "get_param_shapes",
]

get_full_state_dict_from_sharded_data_parallel_checkpoint = _not_built.function(
    "sharded_data_parallel_checkpoint.get_full_state_dict_from_sharded_data_parallel_checkpoint"
)
