"""The context in which models are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.memory.delayed_init import delay_param_initialization
from shardwright.tensor_parallel import scope
from shardwright.topology import context


@contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    zero_init: bool | None = None,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Build a model: marked for tensor parallelism, in another default dtype, and with parameters that come later.

    The arguments are those of `tensor_parallel.scope.model_creation`. With `delayed_parameter_initialization` parameters
    hold no storage until the model is partitioned, see `memory.delayed_init`.
    `from_pretrained` and `from_config` work inside; loaded weights are real at once, and are kept.
    Called by: every rank alike. Collectives: none.
    """
    delayed = context.is_initialized() and context.world().config.delayed_parameter_initialization
    with (
        scope.model_creation(tensor_parallelism, zero_init, dtype, **tensor_parallel_config),
        delay_param_initialization(enabled=delayed),
    ):
        yield
