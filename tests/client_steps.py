"""What the tests of scripts for the original have in common: layouts, data, a step, an agreement over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_models
import smdistributed.modelparallel.torch as smp

QUIET = {"log_level": "warning"}
STAGES = {**QUIET, "pipeline_parallel_degree": 2, "microbatches": 2}
SLICES = {**QUIET, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 2, "prescaled_batch": True}
REPLICAS = {**QUIET, "ddp": True, "microbatches": 2}
BATCH, LENGTH = 4, 12


def ids(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, hf_models.VOCABULARY, (BATCH, LENGTH), generator=generator)


@smp.step
def causal_step(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def agreed(found: bool) -> bool:
    """Has some rank of this replica of the model found it? As scripts do it."""
    flag = torch.tensor([int(found)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=smp.get_mp_process_group())
    return bool(flag)
