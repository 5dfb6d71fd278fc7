"""Step inputs come from pipeline rank 0: structure, tensors and plain values are sent to its group once per step.

What is each rank's own stays so: modules, optimizers, devices, and every object that is neither a container nor
has `smp_slice`. On other ranks the values passed for everything else are ignored (they may be dummies).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import AgreementError, UsageError
from shardwright.pipeline import messages
from shardwright.pipeline.containers import contents, with_contents
from shardwright.pipeline.microbatch import Microbatch
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.spec import Spec, for_wire, spec_of, wire_stride
from shardwright.transport.structure import Builder, Node, Walker

_CHANNEL = 0

Split = Callable[[Any, Any], list[Microbatch]]


@dataclass(frozen=True)
class _Call:
    """A step call in transit: nodes of its arguments, and the tensors that follow."""

    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...]
    cells: tuple[Node, ...]
    tensors: tuple[tuple[Spec, bool], ...]
    seed: int
    step: str


@dataclass(frozen=True)
class _Own:
    """Placeholder for a value that each rank has itself."""

    type_name: str


def send_inputs(
    runtime: Runtime, signature: inspect.Signature, split: Split, args: Any, kwargs: Any, seed: int, step: str
) -> tuple[list[Microbatch], int]:
    """On pipeline rank 0: check and split the inputs, then send them to the group.

    step: the step function, in words.
    Raises: what is wrong with them, after telling the others, which raise the same.
    """
    others = list(range(1, runtime.size))
    wire = runtime.wire
    try:
        signature.bind(*args, **kwargs)
        microbatches = split(args, kwargs)
        walker = Walker(_is_own)
        call = _Call(
            tuple(_describe(walker, a) for a in args),
            tuple((k, _describe(walker, v)) for k, v in kwargs.items()),
            tuple(walker.contents),
            tuple((spec_of(t), t.device.type == "cpu") for t in walker.tensors),
            seed,
            step,
        )
    except Exception as error:
        handles = messages.send_value(wire, error, others, _CHANNEL)
        for handle in handles:
            handle.wait()
        raise
    handles = messages.send_value(wire, call, others, _CHANNEL)
    for tensor, (spec, _) in zip(walker.tensors, call.tensors, strict=True):
        ready = for_wire(tensor.detach(), spec)
        handles += [wire.send(ready, rank, _CHANNEL) for rank in others]
    for handle in handles:
        handle.wait()
    return microbatches, seed


def receive_inputs(
    runtime: Runtime, signature: inspect.Signature, split: Split, args: Any, kwargs: Any, step: str
) -> tuple[list[Microbatch], int]:
    """On the other pipeline ranks: take rank 0's inputs, and this rank's own modules and objects.

    Raises: AgreementError if pipeline rank 0 is in another step call.
    """
    wire = runtime.wire
    call = messages.receive_value(wire, 0, _CHANNEL, lambda handle: handle.wait())
    if isinstance(call, Exception):
        raise call
    if call.step != step:
        raise AgreementError(
            f"ranks of a pipeline group are in different step functions: pipeline rank 0 in {call.step},"
            f" pipeline rank {runtime.rank} in {step}",
            remedy="make every rank of a pipeline group call the same step functions, equally often: no branches on"
            " torch.distributed.get_rank(), no loops over data of different length",
        )
    handles = []
    for spec, on_cpu in call.tensors:
        device = torch.device("cpu") if on_cpu else runtime.device
        buffer = torch.empty_strided(spec.shape, wire_stride(spec), dtype=spec.dtype, device=device)
        handles.append(wire.receive(buffer, 0, _CHANNEL))
    tensors = [h.wait().requires_grad_(s.requires_grad) for h, (s, _) in zip(handles, call.tensors, strict=True)]
    builder = Builder(tensors, [], call.cells, lambda node: _Own(node[1]))
    made_args = [
        _graft(builder.value(node), args[i] if i < len(args) else _MISSING, f"argument {i}")
        for i, node in enumerate(call.args)
    ]
    made_kwargs = {
        k: _graft(builder.value(node), kwargs.get(k, _MISSING), f"argument '{k}'") for k, node in call.kwargs
    }
    return split(tuple(made_args), made_kwargs), call.seed


_MISSING = object()


def _is_own(value: Any) -> bool:
    return not (isinstance(value, (list, dict, set)) or hasattr(value, "smp_slice"))


def _describe(walker: Walker, value: Any) -> Node:
    if isinstance(value, torch.device):
        return ("opaque", "torch.device")
    return walker.describe(value)


def _graft(value: Any, own: Any, path: str) -> Any:
    """`value` with every placeholder replaced by what this rank has at the same place."""
    if isinstance(value, _Own):
        if own is _MISSING:
            raise UsageError(
                f"{path} is a {value.type_name} on pipeline rank 0, and is missing on this rank",
                remedy="call the step function with the same arguments on every rank of a pipeline group",
            )
        return own
    inside = contents(value)
    if inside is None:
        return value
    mine = contents(own)
    own_parts = dict(zip(*mine, strict=True)) if mine is not None else {}
    parts = [_graft(v, own_parts.get(label, _MISSING), path + label) for label, v in zip(*inside, strict=True)]
    if all(a is b for a, b in zip(parts, inside[1], strict=True)):
        return value
    return with_contents(value, parts)
