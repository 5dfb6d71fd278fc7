"""What a wrap does about tensor parallelism: replace marked modules, say so, and know how weights are renamed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from shardwright.engine.state import StateDict, Translate, state
from shardwright.log import get_logger, rank_zero
from shardwright.memory.checkpointing_marks import carry_mark
from shardwright.partition import manual
from shardwright.partition.plan import compress_names
from shardwright.partition.table import render_table
from shardwright.pipeline.unit import carry_marks
from shardwright.tensor_parallel import randomness
from shardwright.tensor_parallel.registry import Renaming
from shardwright.tensor_parallel.substitute import Replaced, Report, substitute
from shardwright.topology import context

_log = get_logger(__name__)

def distribute(module: nn.Module) -> nn.Module:
    """Replace the marked modules of a model; returns its root, which may be a new one.

    Called by: every rank, in `smp.DistributedModel`. Collectives: see `substitute`.
    """
    randomness.begin()
    root, report = substitute(module, _carry_requests)
    state.module_manager.translate_functions[:] = translations(report.replaced)
    state.module_manager.renamings[:] = [
        (f"{found.name}." if found.name else "", found.renaming) for found in report.replaced if found.renaming is not None
    ]
    if rank_zero():
        _tell(report)
    return root


def _carry_requests(original: nn.Module, made: nn.Module) -> None:
    """What the script asked of a module holds for the one in its place."""
    stage = manual.assigned_stage(original)
    if stage is not None:
        manual.set_partition(made, stage)
    carry_marks(original, made)
    lost = carry_mark(original, made)
    if lost and rank_zero():
        _log.warning(
            "activation checkpointing was asked for modules inside a %s that is now a %s without them: %s. Mark its layers"
            " after the wrap, such as model.get_module().transformer.seq_layers",
            type(original).__name__,
            type(made).__name__,
            _shown(lost),
        )


def _tell(report: Report) -> None:
    """The table of a wrap, on rank 0."""
    degree = context.world().table.degrees.tp
    if report.replaced:
        _log.info("Tensor parallelism (degree %d):\n%s", degree, table(report.replaced))
    elif degree > 1:
        _log.warning(
            "tensor_parallel_degree is %d, but no module is distributed: tp ranks only share the batch. Mark modules with"
            " smp.tensor_parallelism() or smp.set_tensor_parallelism()",
            degree,
        )


def table(replaced: Sequence[Replaced]) -> str:
    """One row for each kind of replacement."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for found in replaced:
        weights = "carried over" if not found.fresh else f"fresh: {found.fresh}"
        groups.setdefault((found.original, found.distributed, weights), []).append(found.name or "(root)")
    rows = [(_shown(names), *kind) for kind, names in groups.items()]
    return render_table(("module", "class", "distributed as", "weights"), rows, wrap_column=0)


def _shown(names: Sequence[str], limit: int = 6) -> str:
    compressed = compress_names(names)
    more = f" and {len(compressed) - limit} more" if len(compressed) > limit else ""
    return ", ".join(compressed[:limit]) + more


# ------------------------------------------------------------------ names of the plain model


def translations(replaced: Sequence[Replaced]) -> list[tuple[Translate, Translate]]:
    """For each family of replaced modules: state dicts of the whole model to the original's names, and back."""
    families: dict[tuple[str, str], list[tuple[str, Renaming]]] = {}
    for found in replaced:
        if found.renaming is not None:
            prefix = f"{found.name}." if found.name else ""
            families.setdefault((found.family, found.original), []).append((prefix, found.renaming))
    return [(partial(_to_original, members), partial(_to_distributed, members)) for members in families.values()]


def _to_original(members: Sequence[tuple[str, Renaming]], content: StateDict) -> StateDict:
    return renamed(content, [(prefix, renaming.to_huggingface) for prefix, renaming in members])


def _to_distributed(members: Sequence[tuple[str, Renaming]], content: StateDict) -> StateDict:
    return renamed(content, [(prefix, renaming.to_distributed) for prefix, renaming in members])


def renamed(
    content: StateDict, members: Sequence[tuple[str, Callable[[StateDict], StateDict]]]
) -> StateDict:
    """A copy of a state dict with the part below each prefix renamed; marks of the library stay."""
    result = {name: value for name, value in content.items() if name.startswith("_smp_")}
    rest = {name: value for name, value in content.items() if name not in result}
    for prefix, rename in members:
        part = {name[len(prefix) :]: rest.pop(name) for name in list(rest) if name.startswith(prefix)}
        result.update((prefix + name, value) for name, value in rename(part).items())
    return {**rest, **result}


def in_own_names(content: StateDict, own_names: Sequence[str], tied: Sequence[Sequence[str]]) -> StateDict:
    """A full state dict in the wrapped model's names; one in the original's names is translated.

    tied: groups of names that are one tensor; translation gives one of them.
    """
    if not state.module_manager.translate_functions or content.keys() <= set(own_names):
        return content
    for _, to_distributed in state.module_manager.translate_functions:
        content = to_distributed(content)
    for names in tied:
        known = next((name for name in names if name in content), None)
        if known is not None:
            content.update((name, content[known]) for name in names if name not in content)
    return content


def in_original_names(content: StateDict) -> StateDict:
    """A full state dict of the wrapped model in the names that it had before modules were replaced.

    Not where transformers does this itself, when it saves: under the original's launcher.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and transformers.utils.is_sagemaker_mp_enabled():
        return content
    for to_original, _ in state.module_manager.translate_functions:
        content = to_original(content)
    return content
