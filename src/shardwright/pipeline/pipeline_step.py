"""One step over several stages: every rank of the pipeline group runs the body on pipeline rank 0's
inputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from shardwright.pipeline import agreement, aliasing, blame, shared
from shardwright.pipeline.executor import Executor
from shardwright.pipeline.frame import Frame
from shardwright.pipeline.glue import GlueMode
from shardwright.pipeline.inputs import Split, receive_inputs, send_inputs
from shardwright.pipeline.intercept import installed
from shardwright.pipeline.microbatch import Microbatch
from shardwright.pipeline.placed import PlacedTensor, Value, enter_frame
from shardwright.pipeline.runtime import Runtime
from shardwright.pipeline.schedule import Kind, Order, cautious_limit
from shardwright.pipeline.spec import for_wire, wire_stride
from shardwright.pipeline.timetable import Timetable, make_timetable
from shardwright.topology import context
from shardwright.transport.structure import Builder, Walker

_CHANNEL = 0

_UNWIND_S = 2.0
"""How long microbatches may take to unwind after a failure."""


class Around(Protocol):
    """The engine's part in each microbatch."""

    def microbatch_begins(self, index: int, num_microbatches: int) -> None: ...


class PipelineSteps:
    """Runs the steps of one model on one rank of its pipeline group; remembers what it learns of each
    program.

    gradient_scale: what each microbatch's loss counts, given their number.
    """

    def __init__(self, runtime: Runtime, kind: Kind, gradient_scale: Callable[[int], float]) -> None:
        self.runtime = runtime
        self._kind: Kind = kind
        self._gradient_scale = gradient_scale
        self._known: WeakKeyDictionary[Callable[..., Any], dict[Any, _Known]] = WeakKeyDictionary()

    def run(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        split: Callable[[Any, Any], list[Microbatch]],
        around: Around,
        args: Any,
        kwargs: Any,
    ) -> tuple[list[Any], list[int] | None]:
        """Run one step; returns each microbatch's result, with real tensors on every rank, and their
        sizes."""
        runtime = self.runtime
        microbatches, seed = self._inputs(function, signature, split, args, kwargs)
        count = len(microbatches)
        key = (count, torch.is_grad_enabled(), _flavour(microbatches[0]))
        known = self._known.setdefault(function, {}).setdefault(key, _Known())
        table = known.table
        runtime.num_steps += 1

        def make_frame(index: int, executor: Executor) -> Frame:
            return Frame(
                runtime,
                index,
                executor,
                seed=seed,
                gradient_scale=functools.partial(self._gradient_scale, count),
                expected=None if table is None else table.program,
                is_steady=index > 0 or count == 1,
            )

        def body(frame: Frame) -> _Published:
            microbatch = microbatches[frame.index]
            if known.in_order:
                frame.begin_in_order()
            enter_frame(frame)
            try:
                with GlueMode(), context.script_view():
                    around.microbatch_begins(frame.index, count)
                    result = function(*microbatch.args, **microbatch.kwargs)
                    with torch.no_grad():
                        return _Published(frame, result)
            except Exception as error:
                blame.name_place(error, runtime, frame.index)
                raise
            finally:
                enter_frame(None)

        executor = Executor(body, make_frame, self._order(count, known), count, gated=self._kind == "simple")
        try:
            with installed():
                published = executor.run()
            results = [p.collect() for p in published]
            for frame in executor.frames:
                frame.settle_sends()
            self._settle(executor.frames)
            agreement.check(runtime, executor.frames)
        except BaseException as error:
            runtime.forget()
            self._fail(error, executor)
            raise
        runtime.learn()
        self._learn(known, executor.frames)
        for frame in executor.frames:
            frame.release()
        sizes = [m.num_samples for m in microbatches]
        return results, None if any(s is None for s in sizes) else [s for s in sizes if s is not None]

    def _inputs(
        self, function: Callable[..., Any], signature: inspect.Signature, split: Split, args: Any, kwargs: Any
    ) -> tuple[list[Microbatch], int]:
        """This step's microbatches and random seed, of pipeline rank 0; other ranks must be in the same
        call."""
        name = f"{getattr(function, '__name__', 'step')}()" + ("" if torch.is_grad_enabled() else " without gradients")
        seed = int(torch.randint(0, 2**62, (), dtype=torch.int64).item())  # drawn by all: their streams stay alike
        if self.runtime.rank == 0:
            return send_inputs(self.runtime, signature, split, args, kwargs, seed, name)
        return receive_inputs(self.runtime, signature, split, args, kwargs, name)

    def _order(self, count: int, known: _Known) -> Order:
        rank, gated = self.runtime.rank, self._kind == "simple"
        if known.table is not None:
            return Order(count, turns=known.table.turns[rank], gated=gated)
        active = context.world().config.active_microbatches
        limit = cautious_limit(self._kind, count, active, rank, self.runtime.size)
        return Order(count, limit=limit, gated=gated, in_line=known.is_new)

    def _learn(self, known: _Known, frames: Sequence[Frame]) -> None:
        """Plan the next step of this kind, if its program is the same for all microbatches."""
        known.is_new = False
        programs = [tuple(e for e in f.program if not e.once) for f in frames]
        differ = any(program != programs[0] for program in programs)
        if not known.in_order and self._needs_order(frames, differ):
            known.in_order, known.table = True, None  # the next step's program has one event more
        elif differ:
            known.table = None
        elif known.table is None or known.table.program != programs[0]:
            config = context.world().config
            known.table = make_timetable(
                self._kind,
                programs[0],
                len(frames),
                config.active_microbatches,
                self.runtime.size,
                optimize=config.optimize,
            )

    def _needs_order(self, frames: Sequence[Frame], differ: bool) -> bool:
        """Could a unit that looks at what it has kept be called out of order? See `kept`; the same on all ranks."""
        readers = self.runtime.readers
        for frame in frames if readers else ():
            calls = [call.label for call in frame.calls if call.label in readers]
            if len(calls) > (0 if differ else len(set(calls))) or any(readers[name] for name in calls):
                return True
        return False

    def _settle(self, frames: Sequence[Frame]) -> None:
        """Objects outside the step that glue made placed hold real values again, on the ranks that need
        them."""
        runtime = self.runtime
        runtime.overlay.settle()
        for frame in sorted(frames, key=lambda f: f.index):
            for tensor in frame.converted:
                aliasing.restore(tensor, _everywhere(runtime, tensor._value))
        for registered in shared.step_ends(runtime):
            assert registered.home is not None
            module, name = registered.home
            now: Any = module._buffers[name]
            real = _everywhere(runtime, now._value).detach().clone()
            module._buffers[name] = real
            runtime.replace(registered, real)

    def _fail(self, error: BaseException, executor: Executor) -> None:
        """Tell the other ranks; if ranks wait for each other in vain, find out whether they run different
        programs."""
        board = context.world().board
        board.report(
            error,
            module=getattr(error, "shardwright_place", None),
            microbatch=getattr(error, "shardwright_microbatch", None),
        )
        executor.settle(_UNWIND_S)
        agreement.explain(self.runtime, executor.frames, error)


@dataclass
class _Known:
    """What is known of one kind of step. in_order: each microbatch begins when those before it are through forward."""

    table: Timetable | None = None
    in_order: bool = False
    is_new: bool = True


def _flavour(microbatch: Microbatch) -> tuple[Any, ...]:
    """Plain arguments that may choose between programs: flags and words."""
    values = [*enumerate(microbatch.args), *microbatch.kwargs.items()]
    return tuple((k, v) for k, v in values if v is None or isinstance(v, (bool, str)))


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
        self._opaques = dict(enumerate(walker.opaques))
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
        builder = Builder(tensors, self._cells, self._contents, self._opaques)
        for number in range(len(self._cells)):
            builder.write(number)
        return builder.value(self._root)
