"""Debugging helpers; the original keeps them in `smdistributed.modelparallel.test.torch.utils`."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.checkpoint import rank_files
from shardwright.engine.model import DistributedModel
from shardwright.errors import UsageError
from shardwright.topology import context

__all__ = ["dump_model", "verify"]


def dump_model(model: DistributedModel, f: str) -> None:
    """Write the parameters and buffers that this rank holds to `{f}_{pp}_{tp}_{rdp}`.

    Called by: any rank by itself, between steps.   Collectives: none.
    """
    rank_files.save(_held(model), f, v3=True)


def verify(model: DistributedModel, f: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare what this rank holds with what `dump_model` wrote, in a job of the same layout.

    Called by: any rank by itself, between steps.   Collectives: none.
    Raises: UsageError naming the first tensors that differ, and by how much.
    """
    dumped, held = rank_files.load(f), _held(model)
    problems = [f"'{name}' is only {'in the dump' if name in dumped else 'held'}" for name in dumped.keys() ^ held.keys()]
    for name in dumped.keys() & held.keys():
        problem = _difference(dumped[name], held[name], rtol, atol)
        if problem:
            problems.append(f"'{name}' {problem}")
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + ("; ..." if len(problems) > 5 else "")
        raise UsageError(
            f"{len(problems)} of {len(held)} tensors differ from the dump '{f}': {shown}",
            where=context.world().describe(),
            remedy="compare at the same step and layout, or allow for rounding with rtol and atol",
        )


def _held(model: DistributedModel) -> dict[str, torch.Tensor]:
    named: list[tuple[str, Any]] = [*model.local_named_parameters(), *model.local_named_buffers()]
    return {name: getattr(tensor, "_local_tensor", tensor).detach().cpu() for name, tensor in named}


def _difference(dumped: torch.Tensor, held: torch.Tensor, rtol: float, atol: float) -> str | None:
    if dumped.shape != held.shape or dumped.dtype != held.dtype:
        return f"is {held.dtype} {list(held.shape)}, the dump has {dumped.dtype} {list(dumped.shape)}"
    if torch.allclose(held, dumped, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return f"differs by up to {(held.double() - dumped.double()).abs().max().item():.3g}"
