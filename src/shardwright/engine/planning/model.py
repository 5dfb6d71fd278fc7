"""A model as one tensor parallel rank would hold it: its tree, what a forward does, and what a microbatch keeps.

Everything happens on fake tensors, in one process. Equal blocks are run a few times only (`partition.shorten`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from shardwright.config.schema import Config
from shardwright.engine.distribution import Distribution
from shardwright.engine.planning.memory import Device, Held
from shardwright.errors import ShardwrightError
from shardwright.partition.footprint import Footprint
from shardwright.partition.meter import Loss, measure
from shardwright.partition.records import Trace
from shardwright.partition.shorten import lengthened_trace, shortened
from shardwright.partition.trace import trace
from shardwright.partition.tree import ModuleTree, build_tree
from shardwright.tensor_parallel.scope import set_tensor_parallelism
from shardwright.tensor_parallel.substitute import substitute
from shardwright.topology.pretend import pretended
from shardwright.transport.differentiable import shapes_only

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Subject:
    """What a plan is made for: a model that needs no weights, and the inputs of one microbatch.

    loss: from the model's output to the number to minimise; None: see `meter.measure`.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    loss: Loss | None = None
    has_inputs: bool = True

    @property
    def num_samples(self) -> int:
        """Length of the first dim of the first tensor among the inputs."""
        leaves = tree_flatten((self.args, dict(self.kwargs or {})))[0]
        return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


@dataclass(frozen=True)
class View:
    """One rank's part of a model, before it is cut over stages.

    footprint: None if a microbatch could not be run; `note` says why.   blocks: repeated modules, worth to be recomputed.
    held: its parameters by name.   input_bytes: of one microbatch.
    """

    tree: ModuleTree
    footprint: Footprint | None
    note: str
    blocks: tuple[str, ...]
    held: Mapping[str, Held]
    input_bytes: int


def look(subject: Subject, config: Config, world_size: int, *, device: Device = "cpu") -> View:
    """Replace, cast and trace a copy of the model as this configuration says.

    device: where the job would run.
    Called by: any process without a world, alone. Collectives: none.
    Raises: ConfigError if the tensor parallel degree can cut nothing of the model.
    """
    dtype = next((dtype for key, dtype in HALF.items() if getattr(config, key)), None)
    distributed = config.tensor_parallel_degree > 1
    module = subject.module
    if distributed or dtype is not None:
        module = copy.deepcopy(module).to("meta")
    args, kwargs = subject.args, dict(subject.kwargs or {})
    with pretended(config, world_size), shapes_only():
        if distributed:
            set_tensor_parallelism(module, True)
            module, _ = substitute(module)
        if dtype is not None:
            module = module.to(dtype)
            args, kwargs = tree_map(lambda leaf: _cast_leaf(leaf, dtype), (args, kwargs))
        scaled = Distribution(module) if distributed else None
        held = {
            name: Held(
                name,
                p.numel(),
                p.numel() * p.element_size(),
                p.requires_grad,
                scaled is not None and scaled.is_scaled(p),
            )
            for name, p in module.named_parameters()
        }
        tree = build_tree(module)
        with _kernels_of(device), shortened(module) as runs:
            seen = trace(module, args, kwargs, how="fake" if subject.has_inputs else "none", may_run=not distributed)
            footprint, note = _footprint(module, args, kwargs, subject) if seen.how == "fake" else (None, seen.reason)
        if footprint is None and runs and subject.has_inputs:  # perhaps it needs all its blocks
            with _kernels_of(device):
                seen = trace(module, args, kwargs, how="fake", may_run=not distributed)
                footprint, note = _footprint(module, args, kwargs, subject) if seen.how == "fake" else (None, seen.reason)
            runs = ()
    seen = lengthened_trace(seen, runs)
    return View(
        tree=tree.with_trace(seen),
        footprint=None if footprint is None else footprint.lengthened(runs),
        note=note,
        blocks=_blocks(module, seen),
        held=held,
        input_bytes=sum(
            leaf.numel() * leaf.element_size() for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)
        ),
    )


class _FusedAttention(TorchFunctionMode):
    """Attention drops nothing: fused kernels of GPUs drop inside, where those of CPUs would hold whole matrices."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _kernels_of(device: Device) -> AbstractContextManager[object]:
    return nullcontext() if device == "cpu" else _FusedAttention()


def _footprint(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], subject: Subject
) -> tuple[Footprint | None, str]:
    try:
        return measure(module, args, kwargs, loss=subject.loss), ""
    except ShardwrightError:
        raise
    except Exception as error:  # any model may do anything; the plan then goes without activations
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0][:200]}"


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _blocks(module: nn.Module, seen: Trace) -> tuple[str, ...]:
    """Members of the outermost lists of two and more modules of one class that hold parameters and ran."""
    found: list[str] = []
    for name, parent in module.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in found):
            continue
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            start = f"{name}." if name else ""
            children = [
                (start + key, type(child))
                for key, child in parent._modules.items()
                if child is not None and start + key in seen.records
            ]
            kinds = [kind for _, kind in children]
            found += [child for child, kind in children if kinds.count(kind) > 1]
    return tuple(found)


def scaled_up(view: View, times: int) -> View:
    """The view of a microbatch `times` as large: all but gradients grows with it, what is computed as well."""
    if times == 1:
        return view
    records = {
        name: replace(
            record,
            **{
                number: getattr(record, number) * times
                for number in (
                    "flops", "work", "saved_bytes", "trailing_flops", "trailing_work", "trailing_saved_bytes",
                    "output_bytes", "entry_bytes",
                )
            },
        )
        for name, record in view.tree.trace.records.items()
    }  # fmt: skip
    return replace(
        view,
        tree=view.tree.with_trace(replace(view.tree.trace, records=records)),
        footprint=None if view.footprint is None else view.footprint.enlarged(times),
        input_bytes=view.input_bytes * times,
    )
