"""Which torch functions are special to glue, and how: tables, and small functions without state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.pipeline.placed import PlacedTensor
from shardwright.pipeline.spec import Spec, twin

_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """A short, stable name: 'add', 'setitem', 'data.get', 'requires_grad.set'."""
    name = _names.get(func)
    if name is None:
        name = getattr(func, "__name__", type(func).__name__)
        if name in ("__get__", "__set__", "__delete__"):
            owner = func.__self__
            name = f"{getattr(owner, 'fget', owner).__name__}.{name.strip('_')}"
        elif name.startswith("__") and name.endswith("__"):
            name = name.strip("_")
        _names[func] = name
    return name


# ---------------------------------------------------------------------- questions about the spec

Answer = Callable[..., Any]


def _ask_twin(func: Any) -> Answer:
    return lambda frame, spec, *args, **kwargs: func(twin(spec), *args, **kwargs)


def _size(frame: Any, spec: Spec, dim: int | None = None) -> Any:
    return torch.Size(spec.shape) if dim is None else spec.shape[dim]


class _GradFn:
    """Stands for the autograd node of a placed result; the real one is on the rank that holds it."""

    def __repr__(self) -> str:
        return "<placed>"


GRAD_FN = _GradFn()


def _grad_fn(spec: Spec) -> _GradFn | None:
    return GRAD_FN if spec.requires_grad else None


def _no_interface(frame: Any, spec: Spec) -> Any:
    raise AttributeError("a tensor that is placed on a pipeline stage has no array interface")


META: dict[Any, Answer] = {
    Tensor.__cuda_array_interface__.__get__: _no_interface,  # type: ignore[attr-defined]
    Tensor.shape.__get__: lambda frame, spec: torch.Size(spec.shape),  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.dtype.__get__: lambda frame, spec: spec.dtype,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda frame, spec: frame.device,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: lambda frame, spec: spec.requires_grad,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda frame, spec: len(spec.shape),  # type: ignore[attr-defined]
    Tensor.dim: lambda frame, spec: len(spec.shape),
    Tensor.numel: lambda frame, spec: spec.numel,
    Tensor.nelement: lambda frame, spec: spec.numel,
    torch.numel: lambda frame, spec: spec.numel,
    Tensor.is_leaf.__get__: lambda frame, spec: not spec.requires_grad,  # type: ignore[attr-defined]
    Tensor.grad.__get__: lambda frame, spec: None,  # type: ignore[attr-defined, union-attr]
    Tensor.get_device: lambda frame, spec: -1 if frame.device.type == "cpu" else frame.device.index,
    Tensor.is_cuda.__get__: lambda frame, spec: frame.device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda frame, spec: frame.device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda frame, spec: False,  # type: ignore[attr-defined]
    Tensor.__len__: lambda frame, spec: spec.shape[0],
    Tensor.grad_fn.__get__: lambda frame, spec: _grad_fn(spec),  # type: ignore[attr-defined, union-attr]
    Tensor._version.__get__: lambda frame, spec: 0,  # type: ignore[attr-defined]
}
DEVICE_GETTERS = {
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.get_device,
}
_ASKED_OF_TWIN = (
    "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size", "storage_offset", "is_signed",
    "ndimension", "is_inference", "is_conj", "is_neg", "is_shared", "dim_order", "type", "layout", "itemsize", "nbytes",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "is_vulkan", "is_sparse_csr",
    "is_mtia", "is_maia", "is_ipu", "is_hpu",
)  # fmt: skip
for _name in _ASKED_OF_TWIN:
    for _home in (Tensor, torch):
        _found = getattr(_home, _name, None)
        if _found is None or isinstance(_found, (torch.dtype, type)):
            continue
        _func = _found if callable(_found) else _found.__get__
        if callable(_func) and hasattr(_func, "__name__"):
            META[_func] = _ask_twin(_func)
del META[Tensor.type]  # with an argument it converts


# ---------------------------------------------------------------------- what is refused, and the remedy

REFUSED = {
    "grad": "call model.backward(loss) inside the step function",
    "backward": "call model.backward(loss) inside the step function",
    "register_hook": "register a hook on a module, or compute what the hook needs in the step body",
    "register_post_accumulate_grad_hook": "register it on the model's parameters, outside the step",
    "retain_grad": "return the tensor from the step, or register a backward hook on a module inside one stage",
    "data_ptr": "the value may be on another rank; use it inside a module",
    "untyped_storage": "the value may be on another rank; use it inside a module",
    "storage": "the value may be on another rank; use it inside a module",
    "_typed_storage": "the value may be on another rank; use it inside a module",
    "share_memory_": "share the tensor inside a module",
    "set_": "use copy_()",
    "resize_": "use reshape() or new_empty()",
    "resize_as_": "use reshape()",
    "swap_": "assign the tensors to new names",
    "dlpack": "the value may be on another rank; use it inside a module",
    "from_dlpack": "the value may be on another rank; use it inside a module",
    "apply_": "use torch functions, or a module",
    "map_": "use torch functions, or a module",
    "map2_": "use torch functions, or a module",
    "grad.set": "gradients of activations are not kept; set .grad on parameters outside the step",
    "_cdata.get": "the value may be on another rank; use it inside a module",
}

# Python sees the value: its holder computes it and tells the group.
VALUE_OPS = {
    "item", "tolist", "numpy", "array", "bool", "int", "float", "complex", "index", "repr", "str", "format", "contains",
    "equal", "allclose", "is_nonzero",
}  # fmt: skip

# Tensor functions that share their name with a conversion to a Python number.
_NOT_VALUE_OPS = {Tensor.float, Tensor.int, Tensor.bool, torch.complex}


def tells_value(func: Any, name: str) -> bool:
    """Does Python see a value that comes out of this function?"""
    return name in VALUE_OPS and func not in _NOT_VALUE_OPS


# Reading or setting these on a parameter concerns the parameter object itself, on each rank.
PLAIN_ON_PARAMETERS = {
    "grad.get",
    "grad.set",
    "requires_grad.get",
    "is_leaf.get",
    "data_ptr",
    "zero_grad",
    "untyped_storage",
}

MOVES = {"to", "cpu", "cuda", "pin_memory"}
INDEXING = {"getitem", "setitem"}
# What they return shares memory with the operand, and no gradient flows through.
DETACHING = {"detach"}
# The value of a number among the arguments changes neither shape nor dtype: outcomes are kept by its type.
ANY_NUMBER = {
    "add", "sub", "mul", "div", "true_divide", "radd", "rsub", "rmul", "rdiv", "truediv", "rtruediv", "subtract",
    "multiply", "divide", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "lerp", "lerp_", "clamp",
    "clamp_",    "masked_fill", "masked_fill_", "fill_", "full_like", "setitem", "gt", "lt", "ge", "le", "eq", "ne", "isclose",
}  # fmt: skip
_SHAPED_LIKE = {"view_as": Tensor.view, "expand_as": Tensor.expand, "reshape_as": Tensor.reshape}


def without_other(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Calls that only want to know the shape or dtype of another tensor, as (function, arguments) without it."""
    if name not in _SHAPED_LIKE and name not in ("type_as", "to"):
        return None
    subject, other = args[0], args[1] if len(args) > 1 else kwargs.get("other")
    if not isinstance(other, Tensor):
        return None
    if name in _SHAPED_LIKE:
        return _SHAPED_LIKE[name], (
            subject,
            other.shape if type(other) is not PlacedTensor else other._value.spec.shape,
        )
    dtype = other.dtype if type(other) is not PlacedTensor else other._value.spec.dtype
    if name == "type_as" or len(args) + len(kwargs) == 2:
        return Tensor.to, (subject, dtype)
    return None


def retarget_move(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of `.to` without devices (a placed tensor stays where it is); None if nothing is left to do."""
    if name != "to":
        return None
    rest: list[Any] = []
    for arg in args[1:]:
        if isinstance(arg, Tensor):
            rest.append(arg.dtype if type(arg) is not PlacedTensor else arg._value.spec.dtype)
        elif isinstance(arg, torch.dtype) or type(arg) is bool:
            rest.append(arg)
    kept = {k: v for k, v in kwargs.items() if k not in ("device", "other", "non_blocking")}
    other = kwargs.get("other")
    if other is not None:
        kept["dtype"] = other.dtype if type(other) is not PlacedTensor else other._value.spec.dtype
    if not any(isinstance(a, torch.dtype) for a in rest) and "dtype" not in kept and "memory_format" not in kept:
        if kept.get("copy"):
            return ((args[0]._value.spec.dtype,), kept)
        return None
    flags = [a for a in rest if type(a) is bool]
    dtype = next((a for a in rest if isinstance(a, torch.dtype)), kept.pop("dtype", None))
    positional = (dtype,) if dtype is not None else ()
    if len(flags) > 1:
        kept["copy"] = flags[1]
    return (positional, kept)


# ---------------------------------------------------------------------- in place

METADATA_IN_PLACE = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"}
_IN_PLACE_DUNDERS = {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift",     "setitem",
}  # fmt: skip
_SETTERS = {"data.set", "requires_grad.set", "real.set", "imag.set"}


def _inplace_positions() -> dict[Any, int]:
    found: dict[Any, int] = {}
    for func in vars(F).values():
        if callable(func) and not isinstance(func, type):
            try:
                names = list(inspect.signature(func).parameters)
            except (TypeError, ValueError):
                continue
            if "inplace" in names:
                found[func] = names.index("inplace")
    return found


_INPLACE_POSITION = _inplace_positions()


def in_place_target(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor (or the list of tensors) that this call writes to, or None."""
    if name in _IN_PLACE_DUNDERS or name in _SETTERS or (name.endswith("_") and not name.startswith("__")):
        return args[0] if args else next(iter(kwargs.values()), None)
    position = _INPLACE_POSITION.get(func)
    if position is not None:
        flag = kwargs.get("inplace", args[position] if len(args) > position else False)
        return args[0] if flag and args else kwargs.get("input") if flag else None
    return None


_STATISTICS = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}


def keeps_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does this call write to the running statistics that it was given? Torch doesn't count it as a change."""
    flag = _STATISTICS.get(func)
    if flag is None:
        return False
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return bool(given.arguments[flag]) and given.arguments["running_mean"] is not None


def plain_indices(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Indices whose shape is known beforehand: ordinary bool tensors as the positions where they are true, ordinary
    numbers in slices as Python's."""
    index = args[1]
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_is_mask(p) or type(p) is slice for p in parts):
        return args
    made: list[Any] = []
    for part in parts:
        if _is_mask(part):
            made += part.nonzero(as_tuple=True)
        elif type(part) is slice:
            made.append(slice(_plain(part.start), _plain(part.stop), _plain(part.step)))
        else:
            made.append(part)
    return (args[0], tuple(made), *args[2:])


def _plain(bound: Any) -> Any:
    return int(bound) if isinstance(bound, Tensor) and type(bound) is not PlacedTensor else bound


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and type(part) is not PlacedTensor and part.dtype == torch.bool and part.dim() > 0
