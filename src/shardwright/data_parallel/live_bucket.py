"""One bucket at work: gradients into its flat buffer, the reduction, and the result back into `.grad`.

The buffer is allocated at the first reduction and reused for ever: the first touch of fresh memory costs
several times a copy.

There are two ways to hold a gradient, which differ in who owns the memory while a reduction is under way:

- *copied*: `.grad` is a tensor of its own. It keeps this rank's gradient until the result is written back, so
  a changed gradient is simply packed and reduced again.
- *view*: `.grad` is the bucket's memory itself, which a reduction overwrites. From the start on `.grad` is
  therefore None, so that a late gradient lands in a tensor of its own; it is reduced apart and added.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.data_parallel.buckets import Bucket
from shardwright.data_parallel.comm_hook import Waitable
from shardwright.log import get_logger, once

_logger = get_logger(__name__)

StartReduction = Callable[["LiveBucket", Tensor, Sequence[Tensor]], Waitable]


class LiveBucket(ABC):
    """One planned bucket, and where it stands in the step.

    Calls of a step, in order: `start`, `count`, `wait`, `reduce_again` if something changed, `write_back` if
    the rank contributes, `rest`.

    gradient_as_view: from `start` on, `.grad` is None.
    waiting_for: ids of parameters whose gradient is not ready yet.
    changed: a gradient was announced after the start.
    divided_by: of every rank's gradients before they are summed, so that sums of float16 don't overflow.
    """

    divided_by: int = 1

    def __init__(self, plan: Bucket, parameters: Sequence[Parameter], gradient_as_view: bool) -> None:
        self.plan = plan
        self.parameters = list(parameters)
        self._ids = frozenset(id(p) for p in parameters)
        self._as_view = gradient_as_view
        self.rest()

    def rest(self) -> None:
        """Forget the step; the buffer and the gradients stay."""
        self.waiting_for = set(self._ids)
        self.started = False
        self.changed = False
        self._present = [False] * len(self.parameters)
        self._packed: list[tuple[Tensor, int] | None] = []
        self._pending: Waitable | None = None

    @abstractmethod
    def start(self, contribute: bool) -> None:
        """Pack this rank's gradients, or zeros if it does not contribute, and start to reduce them."""

    @abstractmethod
    def wait(self, divisor: float) -> None:
        """Wait for the reduction.   divisor: of the sum."""

    @abstractmethod
    def reduce_again(self, divisor: float, contribute: bool) -> None:
        """After `wait`: take in what changed on some rank since the start, and wait for that."""

    @abstractmethod
    def write_back(self, had_gradient: Sequence[bool], divisor: float) -> None:
        """Hand out what was reduced, where there was a gradient on some rank; the others keep None."""

    def count(self) -> tuple[list[bool], bool]:
        """Return which parameters have a gradient on this rank, and whether any changed since the start."""
        gradients = [p.grad for p in self.parameters]
        changed = self.changed or any(map(_has_changed, gradients, self._packed))
        return [had or g is not None for had, g in zip(self._present, gradients, strict=True)], changed

    def _note_packed(self) -> None:
        """Remember which gradients were packed, so that a change of them is seen."""
        self._packed = [None if p.grad is None else (p.grad, p.grad._version) for p in self.parameters]

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        return [slot.view_of(flat) for slot in self.plan.slots]

    def _pack(self, views: Sequence[Tensor]) -> None:
        """Put the gradients where `views` show, zeros where there is none."""
        empty: list[Tensor] = []
        present: list[Tensor] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                empty.append(view)
                continue
            self._present[index] = True
            present.append(view)
            if gradient is not view:
                targets.append(view)
                sources.append(self._dense(gradient, index))
            if self._as_view:
                parameter.grad = None
        if empty:
            torch._foreach_zero_(empty)
        if targets:
            torch._foreach_copy_(targets, sources)
        if present and self.divided_by != 1:
            torch._foreach_div_(present, self.divided_by)

    def _dense(self, gradient: Tensor, index: int) -> Tensor:
        if gradient.layout is torch.strided:
            return gradient
        once(
            _logger,
            logging.INFO,
            "the sparse gradient of '%s' is reduced over replicas as a dense one",
            self.plan.slots[index].name,
        )
        return gradient.to_dense()


class ReplicatedBucket(LiveBucket):
    """A bucket that every rank gets back whole, in a buffer that stays.

    reduction: starts the reduction of a flat buffer, with the gradients as views of it.   num_shares: the buffer is
    padded so that it can be cut into so many.
    """

    def __init__(
        self,
        plan: Bucket,
        parameters: Sequence[Parameter],
        gradient_as_view: bool,
        reduction: StartReduction,
        num_shares: int = 1,
    ) -> None:
        super().__init__(plan, parameters, gradient_as_view)
        self._reduction = reduction
        self._num_elements = plan.padded_elements(num_shares)
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []

    def start(self, contribute: bool) -> None:
        """Pack this rank's gradients, or zeros if it does not contribute, and start to reduce them."""
        self.started = True
        if self._flat is None:
            self._flat = torch.zeros(self._num_elements, dtype=self.plan.dtype, device=self.plan.device)
            self._views = self._views_of(self._flat)
        if contribute:
            self._pack(self._views)
            self._note_packed()
        else:
            self._flat.zero_()
            for parameter, view in zip(self.parameters, self._views, strict=True):
                if parameter.grad is view:
                    parameter.grad = None
        self._pending = self._reduction(self, self._flat, self._views)

    def wait(self, divisor: float) -> None:
        """Wait for the reduction.

        divisor: of the sum. In the copied way the division happens in `write_back`, in the same pass.
        """
        assert self._flat is not None
        assert self._pending is not None
        self._pending.wait()
        if self._as_view:
            _divide(self._flat, divisor)

    def reduce_again(self, divisor: float, contribute: bool) -> None:
        """After `wait`: take in what changed on some rank since the start, and wait for that."""
        assert self._flat is not None
        if not self._as_view:
            if contribute:
                self._pack(self._views)
            else:
                self._flat.zero_()
            self._reduction(self, self._flat, self._views).wait()
            return
        late = torch.zeros_like(self._flat)
        late_views = self._views_of(late)
        if contribute:
            self._pack(late_views)
        self._reduction(self, late, late_views).wait()
        self._flat.add_(_divide(late, divisor))

    def write_back(self, had_gradient: Sequence[bool], divisor: float) -> None:
        """Give every parameter that had a gradient on some rank the reduced one; the others keep None."""
        for parameter, view, had in zip(self.parameters, self._views, had_gradient, strict=True):
            if not had:
                continue
            if self._as_view:
                parameter.grad = view
            elif parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = _divide(view.clone(), divisor)
            elif divisor == 1:
                parameter.grad.copy_(view)
            else:
                torch.div(view, divisor, out=parameter.grad)


def _has_changed(gradient: Tensor | None, packed: tuple[Tensor, int] | None) -> bool:
    """True if a gradient was written to, replaced or created since it was packed."""
    if gradient is None or packed is None:
        return (gradient is None) != (packed is None)
    return gradient is not packed[0] or gradient._version != packed[1]


def _divide(tensor: Tensor, divisor: float) -> Tensor:
    return tensor if divisor == 1 else tensor.div_(divisor)
