"""A model with long runs of equal blocks, cut short for a dry run, and what was seen stretched to full length again.

Blocks are equal if they have the same class and their modules' parameters, buffers and plain attributes agree (numbers of
layers apart), and each has parameters of its own. Of a run in a list of modules the first two and the last stay; the second
stands for those left out, for its neighbours are blocks like itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwright.partition.records import ModuleRecord, Trace

_KEPT = 3
_NUMBERS = ("idx", "index", "layer_id", "layer_number", "block_id")


@dataclass(frozen=True)
class Run:
    """Equal blocks that follow each other in a list. model: the one that stands for `left_out`."""

    model: str
    left_out: tuple[str, ...]

    def clones(self, name: str) -> Iterator[str]:
        """For a name in `model`, the same in each block left out; nothing for others."""
        if name == self.model or name.startswith(f"{self.model}."):
            for block in self.left_out:
                yield block + name[len(self.model) :]

    def holds(self, name: str) -> bool:
        """Does a name belong to `model`?"""
        return name == self.model or name.startswith(f"{self.model}.")


@contextmanager
def shortened(root: nn.Module) -> Iterator[tuple[Run, ...]]:
    """Inside, the model has no more than three blocks of each run of equal ones. Nothing else is changed."""
    runs: list[Run] = []
    before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    try:
        for name, found in list(root.named_modules()):
            if isinstance(found, nn.ModuleList | nn.Sequential) and len(found) > _KEPT:
                start = f"{name}." if name else ""
                cut = _runs(found, start)
                if any(run.model.startswith(f"{above.model}.") for run in cut for above in runs):
                    continue
                if not any(start.startswith(f"{gone}.") for run in runs for gone in run.left_out):
                    before.append((found, dict(found._modules)))
                    for run in cut:
                        for block in run.left_out:
                            del found._modules[block[len(start) :]]
                    runs += cut
        yield tuple(runs)
    finally:
        for found, children in before:
            found._modules.clear()
            found._modules.update(children)


def _runs(blocks: nn.ModuleList | nn.Sequential, start: str) -> list[Run]:
    found: list[Run] = []
    names: list[str] = []
    last: Any = None
    uses = Counter(id(p) for block in blocks for p in block.parameters())
    for key, block in [*blocks._modules.items(), ("", None)]:
        tied = block is not None and any(uses[id(p)] > 1 for p in block.parameters())
        kind = None if block is None or tied else _kind(block)
        if kind is not None and kind == last:
            names.append(start + key)
            continue
        if len(names) > _KEPT:
            found.append(Run(names[1], tuple(names[2:-1])))
        names, last = [start + key], kind
    return found


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What equal blocks have in common."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        parts.append((name, type(module), module.training))
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                parts.append((key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        for key, value in vars(module).items():
            if isinstance(value, str | bool | float | int) and not _is_number(key):
                parts.append((key, value))
    return tuple(parts)


def _is_number(key: str) -> bool:
    """Does an attribute say which block of the model this is, or is it a note of ours?"""
    return key.startswith("_shardwright") or any(number in key for number in _NUMBERS)


def lengthened_trace(trace: Trace, runs: tuple[Run, ...]) -> Trace:
    """What a trace of the full model would have seen."""
    records: Mapping[str, ModuleRecord] = trace.records
    for run in runs:
        ordered = sorted(records, key=lambda name: records[name].first_call)
        inside = [name for name in ordered if run.holds(name)]
        longer: list[tuple[str, ModuleRecord]] = []
        for name in ordered:
            longer.append((name, records[name]))
            if inside and name == inside[-1]:
                longer += [(block + m[len(run.model) :], records[m]) for block in run.left_out for m in inside]
        records = {name: replace(record, first_call=place) for place, (name, record) in enumerate(longer)}
    borrowed = dict.fromkeys(trace.borrowed)
    for run in runs:
        for user, holder in list(borrowed):
            for clone in run.clones(user):
                borrowed[clone, next(_same_block(run, clone, holder), holder)] = None
    return replace(trace, records=dict(records), borrowed=tuple(borrowed))


def _same_block(run: Run, clone: str, holder: str) -> Iterator[str]:
    """`holder` in the block that `clone` is in, if it is in a block at all."""
    for block, name in zip(run.left_out, run.clones(holder), strict=False):
        if clone == block or clone.startswith(f"{block}."):
            yield name
