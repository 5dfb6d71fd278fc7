"""What a step call returns: the results of its microbatches, collected leaf by leaf.

A tensor leaf becomes a `StepOutput`; any other leaf becomes a plain list with one entry per microbatch; the
nesting around them keeps its classes (api.md 3.4 and 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ShapeError, UsageError
from shardwright.pipeline.containers import contents, is_dataclass_instance, with_contents


class StepOutput:
    """The tensors that one returned value had in each microbatch.

    Neither iterable nor indexable on purpose: transformers' ModelOutput would unpack an iterable first field.
    Use `outputs` for the list.

    outputs: one tensor per microbatch, in order.
    weights: number of samples per microbatch where they differ (uneven forward-only steps); None when equal.
    """

    __slots__ = ("_weights", "outputs")

    def __init__(self, outputs: Sequence[Tensor], weights: Sequence[int] | None = None) -> None:
        self.outputs: list[Tensor] = list(outputs)
        self._weights = tuple(weights) if weights is not None and len(set(weights)) > 1 else None

    def reduce_mean(self) -> Tensor:
        """Return the mean over microbatches, each counting by its number of samples."""
        stacked = self.stack()
        if not (stacked.is_floating_point() or stacked.is_complex()):
            stacked = stacked.to(torch.get_default_dtype())
        if self._weights is None:
            return stacked.mean(0)
        shares = torch.tensor(self._weights, dtype=torch.float64) / sum(self._weights)
        shares = shares.to(stacked).reshape(-1, *(1,) * (stacked.dim() - 1))
        return (stacked * shares).sum(0)

    def reduce_sum(self) -> Tensor:
        """Return the sum over microbatches."""
        return self.stack().sum(0)

    def concat(self) -> Tensor:
        """Return the microbatches joined along the batch dimension (0); numbers become one row each."""
        return torch.cat([t.unsqueeze(0) if t.dim() == 0 else t for t in self.outputs])

    def stack(self) -> Tensor:
        """Return the microbatches stacked along a new first dimension.

        Raises: ShapeError if the microbatches returned different shapes.
        """
        shapes = [list(t.shape) for t in self.outputs]
        if any(shape != shapes[0] for shape in shapes):
            raise ShapeError(
                f"microbatches returned tensors of different shapes: {shapes}",
                remedy="use concat(), or reduce the value to one number per microbatch inside the step",
            )
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return a new StepOutput of detached tensors."""
        return StepOutput([t.detach() for t in self.outputs], self._weights)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{list(t.shape)}" for t in self.outputs)
        dtype = self.outputs[0].dtype if self.outputs else None
        return f"StepOutput({len(self.outputs)} microbatches of {dtype}: {shapes})"


def collect_outputs(
    results: Sequence[Any], *, detach_outputs: bool = True, weights: Sequence[int] | None = None
) -> Any:
    """Turn one result per microbatch into one result whose leaves hold all microbatches.

    Called by: the step decorator, after the last microbatch, on every rank.
    results: what the step body returned, in microbatch order; all nested alike.
    detach_outputs: detach tensors (the default of @smp.step).
    weights: samples per microbatch, for `reduce_mean` after an uneven split.
    Returns: the nesting of results[0] with StepOutput and list leaves.
    Raises: UsageError naming the place where two microbatches returned different structures.
    """
    return _collect(list(results), "", detach_outputs, weights)


def _collect(values: list[Any], path: str, detach: bool, weights: Sequence[int] | None) -> Any:
    first = values[0]
    if all(isinstance(v, Tensor) for v in values):
        return StepOutput([v.detach() for v in values] if detach else values, weights)
    nested = [_structure(v) for v in values]
    if all(n is None for n in nested):
        return [v.detach() if detach and isinstance(v, Tensor) else v for v in values]
    for index, (value, inside) in enumerate(zip(values, nested, strict=True)):
        if type(value) is not type(first) or inside is None or nested[0] is None or inside[0] != nested[0][0]:
            raise UsageError(
                f"the step returned values of different structure{_at(path)}: "
                f"microbatch 0 gave {_shape_of(first)}, microbatch {index} gave {_shape_of(value)}",
                remedy="return the same keys, lengths and classes from every microbatch",
            )
    labels = nested[0][0] if nested[0] is not None else []
    columns = zip(*(n[1] for n in nested if n is not None), strict=True)
    collected = [
        _collect(list(column), path + label, detach, weights)
        for label, column in zip(labels, columns, strict=True)
    ]
    return with_contents(first, collected)


def _structure(value: Any) -> tuple[list[str], list[Any]] | None:
    """Contents of a value whose nesting is kept; None for a leaf.

    Sets have no order to match microbatches by, and a dataclass without tensors is an ordinary result object:
    both are leaves.
    """
    if isinstance(value, (set, frozenset)):
        return None
    if is_dataclass_instance(value) and not isinstance(value, dict):
        return contents(value, dataclass_too=True) if _holds_tensor(value) else None
    return contents(value)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    inside = contents(value, dataclass_too=True)
    return inside is not None and any(_holds_tensor(element) for element in inside[1])


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _shape_of(value: Any) -> str:
    inside = _structure(value)
    name = type(value).__name__
    return name if inside is None else f"{name} with {', '.join(inside[0]) or 'nothing'}"
