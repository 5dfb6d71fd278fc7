"""`smp.sharded_data_parallel_checkpoint`: a full model from the shards of sharded data parallelism."""

from __future__ import annotations

from shardwright.checkpoint.merge_shards import get_full_state_dict_from_sharded_data_parallel_checkpoint
from shardwright.engine.full_sharding import get_buffer_names, get_param_shapes

__all__ = [
    "get_buffer_names",
    "get_full_state_dict_from_sharded_data_parallel_checkpoint",
    "get_param_shapes",
]
