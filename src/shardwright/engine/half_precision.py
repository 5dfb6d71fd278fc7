"""A model in half precision: its tensors, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.engine.wrapping import DataParallelModule, ForwardingModule
from shardwright.errors import UsageError
from shardwright.pipeline.containers import contents, with_contents
from shardwright.precision.policy import Policy


def hops(module: nn.Module, policy: Policy | None) -> nn.Module:
    """Put the modules around the user's module that scripts count on; in half precision cast it.

    Scripts go two steps down (`model.module.module`) to the user's module, and three with fp16.
    """
    if policy is None:
        return DataParallelModule(module)
    cast(module, policy.compute)
    if policy.compute is torch.float16:
        return DataParallelModule(FP16_Module(module, policy.compute))
    return FP16_Module(module, policy.compute)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Floating point parameters and buffers to `dtype`, in place; parameters stay the same objects."""
    module.half() if dtype is torch.float16 else module.bfloat16()


def accumulate_in_full(parameters: Iterable[nn.Parameter]) -> None:
    """Let half precision parameters have fp32 gradients: each call's is added to an fp32 sum.

    Raises: UsageError if this PyTorch can't do that.
    """
    for parameter in parameters:
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            continue
        if not hasattr(parameter, "grad_dtype"):
            raise UsageError(
                f"'_fp32_grad_accumulation' is on, but PyTorch {torch.__version__} keeps gradients in the dtype of"
                " their parameters",
                remedy="use PyTorch 2.10 or later, or leave out '_fp32_grad_accumulation'",
            )
        parameter.grad_dtype = torch.float32


class FP16_Module(ForwardingModule):
    """The hop at which floating point inputs become half precision, and such outputs fp32.

    Called by: every rank of the pipeline group, in glue: each cast runs where its tensor is. Tensors of other kinds
    (ids, masks), and objects that only carry tensors, such as a key-value cache, pass as they are. Tensors inside the
    model keep the dtypes that its own code gives them, over stages too.
    dtype: float16 or bfloat16.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.half_dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user module's forward, in half precision inside and fp32 outside."""
        args, kwargs = to_half((args, kwargs), self.half_dtype)
        return to_full(self.module(*args, **kwargs), self.half_dtype)


def to_half(value: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors in nested containers in `dtype`."""
    return _changed(value, lambda t: t.to(dtype) if t.dtype.is_floating_point and t.dtype is not dtype else t)


def to_full(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of `dtype` in nested containers in fp32."""
    return _changed(value, lambda t: t.float() if t.dtype is dtype else t)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    found = contents(value, dataclass_too=True)
    if found is None:
        return value
    elements = [_changed(element, change) for element in found[1]]
    if all(new is old for new, old in zip(elements, found[1], strict=True)):
        return value
    return with_contents(value, elements)
