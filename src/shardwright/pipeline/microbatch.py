"""How the arguments of a step call split into microbatches.

Pure: arguments in, arguments out; no process group, no copies (slices are narrow views of the caller's
tensors). The rules are the table of api.md 3.3. Everything is checked before the first slice is made, so that
an error leaves nothing behind: no microbatch has run and no message has been sent.

Called by the step decorator on the rank whose inputs count: pipeline rank 0, or any rank without one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from shardwright.errors import ShapeError, UsageError
from shardwright.log import get_logger, once
from shardwright.pipeline.containers import contents, with_contents

_logger = get_logger(__name__)


class Microbatch(NamedTuple):
    """The arguments of one run of the step body.

    num_samples: how many samples it holds (size of the first split tensor); None if no tensor was split. The
    counts are equal unless an uneven split was allowed; they are then the weights for averaging results.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int | None


@dataclass(frozen=True)
class _SplitTensor:
    """One tensor that is to be cut: where it sits in the arguments, and what is cut."""

    path: str
    axis: int
    size: int


def check_split_names(
    signature: inspect.Signature, non_split_inputs: Sequence[str], input_split_axes: Mapping[str, int]
) -> None:
    """Refuse names in the decorator's options that no argument can have.

    Called by: the step decorator, once, when it is applied.
    Raises: UsageError naming the option, the name, and the function's parameters.
    """
    both = sorted(set(non_split_inputs) & set(input_split_axes))
    if both:
        raise UsageError(
            f"'{both[0]}' is named in non_split_inputs and in input_split_axes",
            remedy="remove it from one: an argument is either split or passed whole",
        )
    parameters = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for option, names in (("non_split_inputs", non_split_inputs), ("input_split_axes", input_split_axes)):
        for name in names:
            if name not in parameters:
                raise UsageError(
                    f"{option} names '{name}', which is no parameter of the step function",
                    remedy=f"use one of: {', '.join(parameters) or '(the function has no parameters)'}",
                )


def bind_arguments(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Match the call's arguments with the step function's parameters.

    Defaults are not filled in: an argument that was not passed is left to the function.
    Raises: TypeError in Python's own words where the call does not fit the signature.
    """
    return signature.bind(*args, **kwargs)


def split_arguments(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    allow_uneven: bool = False,
) -> list[Microbatch]:
    """Cut the arguments of one step call into microbatches.

    Called by: the rank whose inputs count, before anything of the step runs.
    Collectives: none.
    num_microbatches: how many to make.
    non_split_inputs: parameter names passed whole to each microbatch. For a function with **kwargs, also
        names of extra keyword arguments.
    input_split_axes: parameter name -> axis for every tensor inside that argument; 0 elsewhere.
    allow_uneven: spread a remainder over the first microbatches (for forward-only steps). A batch smaller
        than num_microbatches gives fewer microbatches, never an empty one.
    Returns: the microbatches in order; concatenating their tensors restores the input.
    Raises: ShapeError naming argument, axis, size and microbatch count where a tensor cannot be cut;
        UsageError for a DataLoader or another value that only looks like a batch.
    """
    keep = frozenset(non_split_inputs or ())
    bound = bind_arguments(signature, args, kwargs)
    arguments = [a for a in _arguments(bound, input_split_axes or {}) if keep.isdisjoint(a.key)]
    tensors: list[_SplitTensor] = []
    cut = [a for a in arguments if _scan(a.value, a.axis, a.key[-1], tensors)]
    _check_sizes(tensors, num_microbatches, allow_uneven)
    count = _num_used(tensors, num_microbatches, allow_uneven)
    microbatches = []
    for index in range(count):
        sliced = {a.key: _slice(a.value, a.axis, index, count) for a in cut}
        num_samples = _bounds(tensors[0].size, index, count)[1] if tensors else None
        microbatches.append(Microbatch(*_unbind(bound, sliced), num_samples))
    return microbatches


class _Argument(NamedTuple):
    """One argument of the call. key: (parameter,), or (parameter, keyword) for what **kwargs took up."""

    key: tuple[str, ...]
    value: Any
    axis: int


def _arguments(bound: inspect.BoundArguments, axes: Mapping[str, int]) -> Iterator[_Argument]:
    for name, value in bound.arguments.items():
        axis = axes.get(name, 0)
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for keyword, element in value.items():
                yield _Argument((name, keyword), element, axes.get(keyword, axis))
        else:
            yield _Argument((name,), value, axis)


def _unbind(
    bound: inspect.BoundArguments, sliced: Mapping[tuple[str, ...], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn the arguments back into (args, kwargs), with slices in place of what was cut."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments[name] = {keyword: sliced.get((name, keyword), v) for keyword, v in value.items()}
        else:
            arguments[name] = sliced.get((name,), value)
    new = inspect.BoundArguments(bound.signature, arguments)
    return new.args, new.kwargs


def _scan(value: Any, axis: int, path: str, tensors: list[_SplitTensor]) -> bool:
    """Note every tensor that will be cut; return whether anything below `value` changes from call to call."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return False
        if not -value.dim() <= axis < value.dim():
            raise ShapeError(
                f"argument '{path}' is {list(value.shape)} and has no axis {axis} to split on",
                remedy=f"give an axis below {value.dim()} in input_split_axes, or add the argument to "
                "non_split_inputs",
            )
        tensors.append(_SplitTensor(path, axis, value.shape[axis]))
        return True
    if isinstance(value, (torch.nn.Module, type)):
        return False
    if callable(getattr(value, "smp_slice", None)):
        return True
    _refuse_lookalikes(value, path)
    inside = contents(value)
    if inside is None:
        return False
    changes = False
    for label, element in zip(*inside, strict=True):
        changes |= _scan(element, axis, path + label, tensors)
    return changes


def _refuse_lookalikes(value: Any, path: str) -> None:
    if isinstance(value, torch.utils.data.DataLoader):
        raise UsageError(
            f"argument '{path}' of the step function is a DataLoader; a step takes one batch",
            remedy="loop outside and pass each batch: `for batch in loader: train_step(model, batch)`",
        )
    if isinstance(value, PackedSequence):
        raise UsageError(
            f"argument '{path}' is a PackedSequence, whose samples are interleaved and cannot be cut by rows",
            remedy="pass the padded tensor and its lengths and pack inside the step, or add it to "
            "non_split_inputs",
        )


def _check_sizes(tensors: Sequence[_SplitTensor], num_microbatches: int, allow_uneven: bool) -> None:
    sizes = {t.size for t in tensors}
    for tensor in tensors:
        if tensor.size % num_microbatches == 0 or (allow_uneven and len(sizes) == 1):
            continue
        raise ShapeError(
            f"argument '{tensor.path}' has size {tensor.size} on axis {tensor.axis}, "
            f"which does not divide into {num_microbatches} microbatches{_others(tensor, tensors)}",
            remedy=_remedy(tensor, tensors, num_microbatches, allow_uneven),
        )
    if len(sizes) > 1 and num_microbatches > 1:
        odd = _odd_one_out(tensors)
        # No sizes in the text: they change from batch to batch, and this is to be said once.
        once(
            _logger,
            logging.WARNING,
            "step argument '%s' differs from '%s' in the size of the axis it is split on. "
            "If it has no batch axis, name that argument in non_split_inputs of @smp.step",
            odd.path,
            next(t.path for t in tensors if t.size != odd.size),
        )


def _others(tensor: _SplitTensor, tensors: Sequence[_SplitTensor]) -> str:
    """Text that shows how the sizes of other tensors differ, or nothing if they don't."""
    differing = [t for t in tensors if t.size != tensor.size]
    if not differing:
        return ""
    shown = ", ".join(f"'{t.path}' {t.size}" for t in differing[:4])
    return f" (others differ: {shown}{', ...' if len(differing) > 4 else ''})"


def _odd_one_out(tensors: Sequence[_SplitTensor]) -> _SplitTensor:
    """The first tensor whose size is the rarest: most likely the one without a batch axis."""
    sizes = [t.size for t in tensors]
    return min(tensors, key=lambda t: sizes.count(t.size)) if sizes.count(sizes[0]) > 1 else tensors[1]


def _remedy(
    tensor: _SplitTensor, tensors: Sequence[_SplitTensor], num_microbatches: int, allow_uneven: bool
) -> str:
    if allow_uneven:
        tensor = _odd_one_out(tensors)
    if allow_uneven or any(t.size != tensor.size and t.size % num_microbatches == 0 for t in tensors):
        return (
            f"if '{tensor.path}' has no batch axis, name that argument in non_split_inputs of @smp.step "
            "(or its batch axis in input_split_axes)"
        )
    return (
        f"use a batch size that is a multiple of {num_microbatches}, and drop_last=True in the DataLoader so "
        "that the last batch is whole; or change 'microbatches'"
    )


def _num_used(tensors: Sequence[_SplitTensor], num_microbatches: int, allow_uneven: bool) -> int:
    if not (allow_uneven and tensors):
        return num_microbatches
    return max(1, min(num_microbatches, tensors[0].size))


def _bounds(size: int, index: int, count: int) -> tuple[int, int]:
    """Start and length of part `index` of `count`: equal parts, the remainder spread over the first ones."""
    base, extra = divmod(size, count)
    return index * base + min(index, extra), base + (index < extra)


def _slice(value: Any, axis: int, index: int, count: int) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0 or count == 1:
            return value
        start, length = _bounds(value.shape[axis], index, count)
        narrow = value.narrow_copy if value.layout is torch.sparse_coo else value.narrow
        return narrow(axis, start, length)
    if isinstance(value, (torch.nn.Module, type)):
        return value
    smp_slice = getattr(value, "smp_slice", None)
    if callable(smp_slice):
        return smp_slice(count, index, axis)
    inside = contents(value)
    if inside is None:
        return value
    old = inside[1]
    new = [_slice(element, axis, index, count) for element in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return value  # nothing in it is cut: the very same object goes to every microbatch
    return with_contents(value, new)
