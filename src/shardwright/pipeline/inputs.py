"""Step inputs come from pipeline rank 0: structure, tensors and plain values are sent to its group once per step.

What is each rank's own stays so: modules, optimizers, devices, and every object that holds no data of the batch. Data
are containers and mappings, objects with `smp_slice` and all that they hold (a list of boxes), dataclasses with tensors in
them, NumPy arrays and the like; a device in an object with `smp_slice` is that of the rank that has the object now. On
other ranks the values passed for those are ignored (they may be dummies).
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import AgreementError, UsageError
from shardwright.pipeline import messages
from shardwright.pipeline.containers import contents, is_dataclass_instance, with_contents
from shardwright.pipeline.microbatch import Microbatch
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.spec import Spec, for_wire, spec_of, wire_stride
from shardwright.topology import context
from shardwright.transport.structure import Builder, Node, Walker, is_data

_CHANNEL = 0

Split = Callable[[Any, Any], list[Microbatch]]


@dataclass(frozen=True)
class _Call:
    """A step call in transit: nodes of its arguments, and the tensors that follow.

    tensors: spec, and whether it is on the CPU, per tensor.   opaques: values that travel pickled, by number.
    """

    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...]
    cells: tuple[Node, ...]
    tensors: tuple[tuple[Spec, bool], ...]
    opaques: dict[int, Any]
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
        walker = _InputWalker()
        call = _Call(
            tuple(walker.describe(a) for a in args),
            tuple((k, walker.describe(v)) for k, v in kwargs.items()),
            tuple(walker.contents),
            tuple((spec_of(t), t.device.type == "cpu") for t in walker.tensors),
            {n: v for n, v in enumerate(walker.opaques) if is_data(v)},
            seed,
            step,
        )
        data = _pack(call)
    except Exception as error:
        for handle in messages.send_bytes(wire, _pack_error(error), others, _CHANNEL):
            handle.wait()
        raise
    handles = messages.send_bytes(wire, data, others, _CHANNEL)
    for tensor, (spec, _) in zip(walker.tensors, call.tensors, strict=True):
        ready = for_wire(tensor.detach(), spec)
        handles += [wire.send(ready, rank, _CHANNEL) for rank in others]
    runtime.begin_step({id(v): v for v in walker.opaques})
    if any(spec.stride != wire_stride(spec) for spec, _ in call.tensors):
        # Every rank must see the same strides: those in which the tensors travelled.
        tensors = [
            t if s.stride == wire_stride(s) else t.contiguous()
            for t, (s, _) in zip(walker.tensors, call.tensors, strict=True)
        ]
        builder = Builder(tensors, [], walker.contents, dict(enumerate(walker.opaques)))
        again = tuple(builder.value(n) for n in call.args), {k: builder.value(n) for k, n in call.kwargs}
        microbatches = split(*again)
    for handle in handles:
        handle.wait()
    return microbatches, seed


def receive_inputs(
    runtime: Runtime, signature: inspect.Signature, split: Split, args: Any, kwargs: Any, step: str
) -> tuple[list[Microbatch], int]:
    """On the other pipeline ranks: take rank 0's inputs, and this rank's own modules and objects.

    Raises: AgreementError if pipeline rank 0 is in another step function.
    """
    call = messages.receive_value(runtime.wire, 0, _CHANNEL, lambda handle: handle.wait())
    if isinstance(call, Exception):
        raise call
    try:
        if call.step != step:
            raise AgreementError(
                f"ranks of a pipeline group are in different step functions: pipeline rank 0 in {call.step},"
                f" pipeline rank {runtime.rank} in {step}",
                remedy="make every rank of a pipeline group call the same step functions, equally often: no branches"
                " on torch.distributed.get_rank(), no loops over data of different length",
            )
        return _take(runtime, call, split, args, kwargs), call.seed
    except Exception as error:
        context.world().board.report(error)
        raise


def _take(runtime: Runtime, call: _Call, split: Split, args: Any, kwargs: Any) -> list[Microbatch]:
    handles = []
    for spec, on_cpu in call.tensors:
        device = torch.device("cpu") if on_cpu else runtime.device
        buffer = torch.empty_strided(spec.shape, wire_stride(spec), dtype=spec.dtype, device=device)
        handles.append(runtime.wire.receive(buffer, 0, _CHANNEL))
    tensors = [h.wait().requires_grad_(s.requires_grad) for h, (s, _) in zip(handles, call.tensors, strict=True)]
    def missing(node: Node) -> Any:
        if node[1] == _DEVICE_OF_BATCH:
            return torch.device("cpu") if node[3] else runtime.device
        return _Own(node[1])

    builder = Builder(tensors, [], call.cells, call.opaques, missing)
    own: dict[int, Any] = {}
    graft = _Graft(own)
    made_args = [
        graft(builder.value(node), args[i] if i < len(args) else _MISSING, f"argument {i}")
        for i, node in enumerate(call.args)
    ]
    made_kwargs = {
        k: graft(builder.value(node), kwargs.get(k, _MISSING), f"argument '{k}'") for k, node in call.kwargs
    }
    runtime.begin_step(own)
    return split(tuple(made_args), made_kwargs)


# ---------------------------------------------------------------------- what is sent

_DEVICE_OF_BATCH = "the batch's torch.device"


class _InputWalker(Walker):
    """Knows when it is inside an object that slices itself. Only pipeline rank 0's counts, so nothing there is own."""

    def __init__(self) -> None:
        super().__init__(lambda value: not self._inside and _is_own(value))
        self._inside = False

    def describe(self, value: Any) -> Node:
        if self._inside and type(value) is torch.device:
            return ("opaque", _DEVICE_OF_BATCH, self._opaque_number(value), value.type == "cpu")
        return super().describe(value)

    def _read(self, value: Any) -> Node:
        before, self._inside = self._inside, self._inside or _slices_itself(value)
        try:
            return super()._read(value)
        finally:
            self._inside = before


def _slices_itself(value: Any) -> bool:
    return callable(getattr(value, "smp_slice", None))


def _is_own(value: Any) -> bool:
    """Is this object each rank's own (as opposed to data of the batch)?"""
    if isinstance(value, (list, dict, set, Mapping)) or _slices_itself(value):
        return False
    return not (is_dataclass_instance(value) and _has_tensors(value))


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    inside = contents(value, dataclass_too=True)
    return inside is not None and any(_has_tensors(v) for v in inside[1])


def _pack(call: _Call) -> bytes:
    try:
        return messages.pack(call)
    except Exception as error:
        raise UsageError(
            f"the arguments of the step function can't be sent to other pipeline ranks: {error}",
            remedy="pass tensors and plain values in containers whose classes are defined at the top level of a module",
        ) from error


def _pack_error(error: Exception) -> bytes:
    """The error itself if it can travel, else one with its words."""
    try:
        data = messages.pack(error)
        pickle.loads(data)
        return data
    except Exception:
        return messages.pack(UsageError(f"pipeline rank 0 could not take the step's arguments: {error!r}"))


# ---------------------------------------------------------------------- what each rank has itself

_MISSING = object()


class _Graft:
    """Puts what this rank has itself into the places of the placeholders. own: takes note of it."""

    def __init__(self, own: dict[int, Any]) -> None:
        self._own = own

    def __call__(self, value: Any, mine: Any, path: str) -> Any:
        """`value` with every placeholder replaced by what `mine` has at the same place."""
        if isinstance(value, _Own):
            if mine is _MISSING:
                raise UsageError(
                    f"{path} is a {value.type_name} on pipeline rank 0, and is missing on this rank",
                    remedy="call the step function with the same arguments on every rank of a pipeline group",
                )
            self._own[id(mine)] = mine
            return mine
        inside = contents(value, dataclass_too=True)
        if inside is None:
            return value
        own_parts: dict[str, Any] = {}
        of_mine = contents(mine, dataclass_too=True)
        if of_mine is not None:
            own_parts = dict(zip(*of_mine, strict=True))
        parts = [self(v, own_parts.get(label, _MISSING), path + label) for label, v in zip(*inside, strict=True)]
        if all(a is b for a, b in zip(parts, inside[1], strict=True)):
            return value
        return with_contents(value, parts)
