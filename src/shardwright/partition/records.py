"""What one traced forward tells about each module: plain numbers, no tensors.

Work is attributed so that it adds up: every operation is counted once.

- An operation belongs to the innermost running module that holds parameters (itself or below). Modules
  without any, such as an activation function or dropout, count as code of the module that calls them.
- An operation that a module runs itself *after* one of its children has finished is kept with that child, as
  `trailing`: when the module is split over stages, such code runs where its largest operand lies, which is
  where the last child ran. A residual addition so counts with its attention or MLP, a loss with the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TraceKind = Literal["fake", "real", "none"]


@dataclass(frozen=True)
class ModuleRecord:
    """One module that holds parameters, as the trace saw it (sums over all its calls).

    first_call: position of its first call among the first calls of all modules.
    work: the roofline sum of `cost.operation_work`, in FLOP equivalents, forward only; flops: the plain
    FLOPs.
    saved_bytes: what autograd would keep for the backward of this microbatch.
    output_bytes: tensors returned.
    entry_bytes: computed values alive when it is first called that are read afterwards: what would cross if a
        stage began here.
    """

    first_call: int
    num_calls: int
    flops: int = 0
    work: float = 0.0
    saved_bytes: int = 0
    trailing_flops: int = 0
    trailing_work: float = 0.0
    trailing_saved_bytes: int = 0
    output_bytes: int = 0
    entry_bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """A forward pass in numbers. `how` is what was done, `reason` why not something better (empty if nothing
    failed).

    borrowed: pairs (user, holder): module `user` computes with a parameter that `holder` has, which is not
    below it.
    """

    how: TraceKind
    records: dict[str, ModuleRecord] = field(default_factory=dict)
    borrowed: tuple[tuple[str, str], ...] = ()
    reason: str = ""


UNTRACED = Trace(how="none")
