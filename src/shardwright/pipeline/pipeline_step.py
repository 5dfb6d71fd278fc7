"""One step over several stages: every rank of the pipeline group runs the body on pipeline rank 0's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from shardwright.errors import RemoteRankError, ShardwrightError
from shardwright.pipeline import agreement, aliasing, shared
from shardwright.pipeline.executor import Executor
from shardwright.pipeline.frame import Frame
from shardwright.pipeline.glue import GlueMode
from shardwright.pipeline.inputs import receive_inputs, send_inputs
from shardwright.pipeline.intercept import installed
from shardwright.pipeline.microbatch import Microbatch
from shardwright.pipeline.placed import PlacedTensor, Value, enter_frame
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.schedule import Event, Kind, Policy, plan_policies, safe_policies
from shardwright.pipeline.spec import for_wire, wire_stride
from shardwright.topology import context
from shardwright.transport.structure import Builder, Walker

_CHANNEL = 0


class Around(Protocol):
    """The engine's part in each microbatch."""

    def microbatch_begins(self, index: int, num_microbatches: int) -> None: ...


class PipelineSteps:
    """Runs the steps of one model on one rank of its pipeline group; remembers what it learns of each program.

    gradient_scale: what each microbatch's loss counts, given their number.
    """

    def __init__(self, runtime: Runtime, kind: Kind, gradient_scale: Callable[[int], float]) -> None:
        self.runtime = runtime
        self._kind: Kind = kind
        self._gradient_scale = gradient_scale
        self._policies: dict[Any, list[Policy]] = {}
        self._programs: dict[Any, Sequence[Event]] = {}

    def run(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        split: Callable[[Any, Any], list[Microbatch]],
        around: Around,
        args: Any,
        kwargs: Any,
    ) -> tuple[list[Any], list[int] | None]:
        """Run one step; returns each microbatch's result, with real tensors on every rank, and their sizes."""
        runtime = self.runtime
        seed = int(torch.randint(0, 2**62, (), dtype=torch.int64).item())
        if runtime.rank == 0:
            microbatches, seed = send_inputs(runtime, signature, split, args, kwargs, seed)
        else:
            microbatches, seed = receive_inputs(runtime, signature, split, args, kwargs)
        count = len(microbatches)
        key = (id(function), count, torch.is_grad_enabled())
        policies = self._policies.get(key) or self._safe(count)

        def make_frame(index: int, executor: Executor) -> Frame:
            return Frame(runtime, index, executor, seed=seed, gradient_scale=self._gradient_scale(count))

        def body(frame: Frame) -> _Published:
            microbatch = microbatches[frame.index]
            enter_frame(frame)
            try:
                with GlueMode(), context.script_view():
                    around.microbatch_begins(frame.index, count)
                    result = function(*microbatch.args, **microbatch.kwargs)
                    with torch.no_grad():
                        return _Published(frame, result)
            finally:
                enter_frame(None)

        executor = Executor(body, make_frame, policies[runtime.rank], gate=self._kind == "simple")
        try:
            with installed():
                published = executor.run()
            results = [p.collect() for p in published]
            for frame in executor.frames:
                frame.settle_sends()
            self._settle()
            agreement.check(runtime, executor.frames)
        except BaseException as error:
            self._fail(error)
            raise
        self._learn(key, executor.frames, count)
        sizes = [m.num_samples for m in microbatches]
        return results, None if any(s is None for s in sizes) else [s for s in sizes if s is not None]

    def _safe(self, count: int) -> list[Policy]:
        active = context.world().config.active_microbatches
        return safe_policies(self._kind, count, active, self.runtime.size)

    def _learn(self, key: Any, frames: Sequence[Frame], count: int) -> None:
        """Plan the next step of this kind if its program is the same for all microbatches and known before."""
        programs = [f.program for f in frames]
        program = programs[0]
        steady = all(p == program for p in programs) and not any(e.kind == "tell" for e in program)
        if not steady:
            self._policies[key] = self._safe(count)
            self._programs.pop(key, None)
        elif self._programs.get(key) != program:
            self._programs[key] = program
            active = context.world().config.active_microbatches
            self._policies[key] = plan_policies(self._kind, count, active, self.runtime.size, program)

    def _settle(self) -> None:
        """Objects outside the step that glue made placed hold real values again, on the ranks that need them."""
        runtime = self.runtime
        for _, tensor in sorted(runtime.converted.items(), key=lambda item: item[0]):
            aliasing.restore(tensor, _everywhere(runtime, tensor._value))
        runtime.converted.clear()
        for registered in shared.step_ends(runtime):
            assert registered.home is not None
            module, name = registered.home
            now: Any = module._buffers[name]
            real = _everywhere(runtime, now._value).detach().clone()
            module._buffers[name] = real
            runtime.replace(registered, real)

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks, unless they raise the same by themselves."""
        if isinstance(error, RemoteRankError):
            return
        where = getattr(error, "shardwright_where", None)
        if where is None and isinstance(error, ShardwrightError):
            where = error.where
        context.world().board.report(
            error, module=where, microbatch=getattr(error, "shardwright_microbatch", None)
        )


def _everywhere(runtime: Runtime, value: Value) -> torch.Tensor:
    """The real tensor of a value on every rank of the group, after the step."""
    others = [r for r in range(runtime.size) if r not in value.born]
    if runtime.rank in others:
        shape, stride = value.spec.shape, wire_stride(value.spec)
        buffer = torch.empty_strided(shape, stride, dtype=value.spec.dtype, device=runtime.device)
        received: torch.Tensor = runtime.wire.receive(buffer, value.holder, _CHANNEL).wait()
        return received
    assert value.tensor is not None
    if runtime.rank == value.holder:
        ready = for_wire(value.tensor, value.spec)
        for handle in [runtime.wire.send(ready, r, _CHANNEL) for r in others]:
            handle.wait()
    return value.tensor


class _Published:
    """What a microbatch's body returned; its placed tensors are on their way to every rank of the group."""

    def __init__(self, frame: Frame, result: Any) -> None:
        walker = Walker()
        self._root = walker.describe(result)
        self._cells = walker.cells
        self._contents = walker.contents
        self._result = result
        self._tensors: list[Any] = []
        for tensor in walker.tensors:
            if type(tensor) is PlacedTensor:
                self._tensors.append(self._send(frame, aliasing.resolve(frame, tensor)))
            else:
                registered = frame.runtime.registered.get(id(tensor))
                if registered is not None:
                    leaf = frame.parameter_leaf(registered)
                    self._tensors.append(self._send(frame, leaf._value))
                else:
                    self._tensors.append(tensor)
        self._placed = any(a is not b for a, b in zip(self._tensors, walker.tensors, strict=True))

    def _send(self, frame: Frame, value: Any) -> Any:
        others = [r for r in range(frame.runtime.size) if r not in value.copies]
        if frame.rank == value.holder:
            for rank in others:
                frame.send(for_wire(value.tensor, value.spec), rank)
        if frame.rank in others:
            return frame.post_receive(value.spec, value.holder)
        return value.tensor

    def collect(self) -> Any:
        """The result with real tensors; waits for those on their way."""
        if not self._placed:
            return self._result
        tensors = [t if isinstance(t, torch.Tensor) else t.wait() for t in self._tensors]
        builder = Builder(tensors, self._cells, self._contents)
        for number in range(len(self._cells)):
            builder.write(number)
        return builder.value(self._root)
