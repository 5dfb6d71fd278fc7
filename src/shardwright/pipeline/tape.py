"""One microbatch's calls and the edges between them, and backward over them.

Every rank of the pipeline group keeps the same tape. An entry is one call (a unit or a glue op): its inputs
are detached leaves on the rank that ran it, so each entry is an autograd graph of its own. Backward walks
the entries in reverse, alike on all ranks; the owner runs `torch.autograd.backward` for its entry; gradients
go back along the edges that the values came by, and sum where the value was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwright.errors import PipelineError
from shardwright.pipeline import blame
from shardwright.pipeline.placed import Value
from shardwright.pipeline.spec import Spec, contiguous_stride


@dataclass(slots=True)
class Entry:
    """One recorded call.

    inputs: ids of the values that require grad, in order.   outputs: ids of all results.
    depends: per output, the positions in `inputs` that its gradient reaches.
    leaves, roots: on the owner, the detached inputs and the results' places in the autograd graph.
    sink: for leaves of the tape (parameters, step inputs): what to do with the gradient, on the owner. Nothing is
        freed there, so several backwards may come to it.
    shared: on the owner, parameters that other entries of this microbatch use too (see `_Partials`).
    """

    label: str
    owner: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    depends: tuple[tuple[int, ...], ...]
    leaves: Sequence[torch.Tensor] | None = None
    roots: Sequence[Any] | None = None
    sink: Callable[[torch.Tensor], None] | None = None
    shared: Sequence[torch.nn.Parameter] = ()
    used: bool = False


class Mover(Protocol):
    """How gradients travel; the frame does it."""

    rank: int
    device: torch.device

    def gradient_moves(self, source: int, to: int) -> None: ...

    def backward_runs(self, entry: Entry) -> None: ...

    def gradient_arrived(self, parameter: torch.nn.Parameter) -> None: ...

    def send_gradient(self, tensor: torch.Tensor, to: int) -> None: ...

    def receive_gradient(self, spec: Spec, source: int) -> torch.Tensor: ...

    def where(self, label: str) -> str: ...


@dataclass
class Tape:
    """The entries of one microbatch; `producer` maps a value that requires grad to its entry."""

    entries: list[Entry] = field(default_factory=list)
    producer: dict[int, int] = field(default_factory=dict)
    specs: dict[int, Spec] = field(default_factory=dict)

    def record(self, entry: Entry, outputs: Sequence[Value]) -> None:
        index = len(self.entries)
        self.entries.append(entry)
        for value in outputs:
            if value.spec.requires_grad:
                self.producer[value.id] = index
                self.specs[value.id] = value.spec

    def reached_by(self, roots: Sequence[int]) -> tuple[list[int], set[int]]:
        """Entries to walk for these roots, last first, and all values that get a gradient. Pure."""
        wanted = {v for v in roots if v in self.producer}
        walk: list[int] = []
        last = max((self.producer[v] for v in wanted), default=-1)
        for index in range(last, -1, -1):
            entry = self.entries[index]
            hit = [i for i, v in enumerate(entry.outputs) if v in wanted]
            if not hit:
                continue
            walk.append(index)
            for i in hit:
                wanted.update(entry.inputs[k] for k in entry.depends[i])
        return walk, wanted

    def backward(self, roots: Sequence[tuple[Value, torch.Tensor | None]], mover: Mover) -> list[int]:
        """Run backward from `roots`; each gradient is given on the rank that holds its root, None elsewhere.

        Returns the walked entries, last first. Raises on all ranks alike if one was used before.
        """
        walk, wanted = self.reached_by([value.id for value, _ in roots])
        for index in walk:
            if self.entries[index].used and self.entries[index].sink is None:
                raise PipelineError(
                    "model.backward() reached a part of the microbatch's graph for the second time"
                    f" (entry {index}, '{self.entries[index].label}'), and its buffers are freed",
                    remedy="sum the losses and call model.backward() once, or make the graphs independent",
                )
        me = mover.rank
        partials = _Partials()
        gradients: dict[int, torch.Tensor] = {}
        contributors: dict[int, set[int]] = {}
        for value, gradient in roots:
            contributors.setdefault(value.id, set()).add(value.holder)
            if gradient is not None:
                _accumulate(gradients, value.id, gradient)
        for index in walk:
            entry = self.entries[index]
            entry.used = True
            self._collect(entry, wanted, gradients, contributors, mover)
            for position, source in enumerate(entry.inputs):
                if any(position in entry.depends[i] for i, v in enumerate(entry.outputs) if v in wanted):
                    contributors.setdefault(source, set()).add(entry.owner)
            mover.backward_runs(entry)
            if entry.owner == me:
                self._run(entry, gradients, mover, partials)
        for parameter in partials.add_up():
            mover.gradient_arrived(parameter)
        return walk

    def _collect(
        self,
        entry: Entry,
        wanted: set[int],
        gradients: dict[int, torch.Tensor],
        contributors: dict[int, set[int]],
        mover: Mover,
    ) -> None:
        """Bring the gradients of the entry's outputs to its owner."""
        me = mover.rank
        for value in entry.outputs:
            if value not in wanted:
                continue
            for rank in sorted(contributors.get(value, ())):
                if rank == entry.owner:
                    continue
                mover.gradient_moves(rank, entry.owner)
                if rank == me:
                    spec = self.specs[value]
                    gradient = gradients.pop(value, None)
                    if gradient is None:
                        gradient = torch.zeros(spec.shape, dtype=spec.dtype, device=mover.device)
                    mover.send_gradient(gradient, entry.owner)
                elif entry.owner == me:
                    _accumulate(gradients, value, mover.receive_gradient(self.specs[value], rank))

    def _run(self, entry: Entry, gradients: dict[int, torch.Tensor], mover: Mover, partials: _Partials) -> None:
        found = [(i, gradients.pop(v)) for i, v in enumerate(entry.outputs) if v in gradients]
        if not found:
            return
        partials.swap_in(entry.shared)
        try:
            if entry.sink is not None:
                entry.sink(found[0][1])
            else:
                assert entry.roots is not None
                assert entry.leaves is not None
                torch.autograd.backward([entry.roots[i] for i, _ in found], [g for _, g in found])
                reached = {position for i, _ in found for position in entry.depends[i]}
                for position, (value, leaf) in enumerate(zip(entry.inputs, entry.leaves, strict=True)):
                    if leaf.grad is None:
                        continue
                    if position not in reached:
                        raise PipelineError(
                            f"'{entry.label}' sends a gradient to an input that the same kind of call did not depend on"
                            " before",
                            where=mover.where(entry.label),
                            remedy="mark the module with smp.dynamic_shapes(module)",
                        )
                    _accumulate(gradients, value, leaf.grad)
        except Exception as error:
            blame.set_place(error, f"backward of {entry.label}")
            raise
        finally:
            entry.roots = entry.leaves = None
            partials.swap_out(entry.shared)


class _Partials:
    """Gradients of parameters that several entries of one microbatch use, summed apart from `.grad`.

    They are added to `.grad` once, when the microbatch's backward is done, as one process does. So the order of the sum
    over microbatches is theirs, and does not depend on the schedule.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._kept: dict[torch.nn.Parameter, torch.Tensor | None] = {}

    def swap_in(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            self._kept[parameter] = parameter.grad
            parameter.grad = self._sums.get(parameter)
            in_parts.add(id(parameter))

    def swap_out(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            self._sums[parameter] = parameter.grad
            parameter.grad = self._kept.pop(parameter)
            in_parts.discard(id(parameter))

    def add_up(self) -> list[torch.nn.Parameter]:
        """Add the sums to `.grad`; returns the parameters that got one."""
        arrived = []
        for parameter, total in self._sums.items():
            if total is not None:
                parameter.grad = total if parameter.grad is None else parameter.grad + total
                arrived.append(parameter)
        return arrived


# Ids of parameters whose `.grad` holds a part of one microbatch's gradient right now: hooks on them should wait.
in_parts: set[int] = set()


def gradient_spec(spec: Spec) -> Spec:
    """In which form the gradient of a value travels."""
    return Spec(spec.shape, contiguous_stride(spec.shape), spec.dtype, False)


def _accumulate(gradients: dict[int, torch.Tensor], value: int, gradient: torch.Tensor) -> None:
    have = gradients.get(value)
    gradients[value] = gradient if have is None else have + gradient
