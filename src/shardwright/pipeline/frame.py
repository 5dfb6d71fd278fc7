"""One microbatch in flight: its values, its tape, its messages, and the calls made in its name.

A frame lives on one thread on every rank of the pipeline group. All its methods are called at the same point
of the same program on all ranks; what differs is only who holds what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch

from shardwright.errors import PipelineError, UnsupportedOperationError
from shardwright.pipeline import messages, shared
from shardwright.pipeline.placed import PlacedTensor, Value, glue_off, native
from shardwright.pipeline.schedule import Event, strays
from shardwright.pipeline.spec import Spec, carries_grad, contiguous_stride, for_wire, spec_of, wire_stride
from shardwright.pipeline.streams import Streams
from shardwright.pipeline.tape import Entry, Tape, gradient_spec
from shardwright.topology import context, rng

if TYPE_CHECKING:
    from shardwright.pipeline.runtime import Registered, Runtime
    from shardwright.pipeline.unit import Unit


class Handle(Protocol):
    def wait(self) -> Any: ...


class Turns(Protocol):
    """The executor, as a frame sees it."""

    uses: shared.SharedUses

    def wait_turn(self, frame: Frame) -> None:
        """Set this microbatch aside; returns when it is chosen again."""

    def in_order(self, frame: Frame) -> None:
        """Set this microbatch aside until those before it are as far."""

    def stay_in_line(self, frame: Frame) -> None:
        """Set this microbatch aside until those before it that have left the expected program are as far."""

    def forward_done(self, frame: Frame) -> None:
        """Called once, before the first backward; returns when backward may begin."""


class Call(NamedTuple):
    """One call in words: what ran, on which pp rank, what came out."""

    label: str
    owner: int
    outputs: tuple[Spec, ...]


class Frame:
    """Microbatch `index` of a step.

    turns: gives the baton away before a wait, and takes it back.
    seed: base of the random streams of this step, equal on the pipeline group.
    gradient_scale: what the loss is multiplied with in backward (1 / num_microbatches to average over them). It is asked
        then: the first step may load a checkpoint with another loss scale.
    is_steady: others of the step come before it, or it is the only one.
    expected: the program for which the rank's turns were planned, if they were.
    converted: ordinary tensors that glue turned into placed ones (see `aliasing.convert`).
    program: what this microbatch made the ranks do, for the schedule.
    calls: the same in words, for agreement.
    in_backward: it has called backward.   strayed: it left the expected program, with event number `strayed_at`, or
        because others did (None).   finished: it came to its end.
    told: outcomes of units that were announced in this microbatch, see `spec_cache`.
    """

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        turns: Turns,
        *,
        seed: int,
        gradient_scale: Callable[[], float] = lambda: 1.0,
        expected: Sequence[Event] | None = None,
        is_steady: bool = True,
    ) -> None:
        self.runtime = runtime
        self.index = index
        self.rank = runtime.rank
        self.device = runtime.device
        self.seed = rng.derive_seed(seed, index)
        self.streams = Streams(self.seed, runtime.overlay, index)
        self.tape = Tape()
        self.program: list[Event] = []
        self.calls: list[Call] = []
        self.gradient_scale = gradient_scale
        self.checkpointing = 0
        self.uses = turns.uses
        self.step = runtime.num_steps
        self.told: dict[Any, Any] = {}
        self.strayed = False
        self.strayed_at: int | None = None
        self.finished = False
        self.is_steady = is_steady
        self._expected = expected
        self.in_backward = False
        self._turns = turns
        self._num_values = 0
        self._num_streams = 0
        self._leaves: dict[tuple[int, bool], PlacedTensor] = {}
        self._script_leaves: dict[int, tuple[PlacedTensor, int, torch.Tensor]] = {}
        self._sent: dict[int, list[Handle]] = {}
        self.converted: list[Any] = []
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._unit_entries: dict[str, list[Entry]] = {}

    @contextmanager
    def within_checkpoint(self) -> Iterator[None]:
        """While open, glue runs whose activations should be recomputed: every unit called in it recomputes its own."""
        self.checkpointing += 1
        try:
            yield
        finally:
            self.checkpointing -= 1

    def note(self, event: Event) -> None:
        """Enter an event into the program; called before what it stands for."""
        at = len(self.program)
        stray = not self.strayed and strays(event, at, self._expected)
        self.program.append(event)
        if stray:
            self.strayed = True
            self.strayed_at = at
            with context.own_view():
                self._turns.wait_turn(self)

    # ------------------------------------------------------------------ values

    def new_value(self, spec: Spec, holder: int, tensor: torch.Tensor | None) -> Value:
        value = Value(self, self._num_values, spec, holder, tensor)
        self._num_values += 1
        return value

    def fetch(self, value: Value, rank: int) -> None:
        """Make sure that pp rank `rank` holds the value: at most one message, from holder to rank."""
        if rank in value.copies:
            return
        value.copies.add(rank)
        self.note(Event("move", value.holder, rank))
        if self.rank == value.holder:
            assert value.tensor is not None
            self.send(for_wire(value.tensor.detach(), value.spec), rank)
        elif self.rank == rank:
            value.tensor = self.receive(value.spec, value.holder)

    def parameter_leaf(self, registered: Registered) -> PlacedTensor:
        """The placed value that glue sees for a parameter or buffer: held by its owner."""
        with native():
            real = registered.tensor
            wants_grad = real.requires_grad and torch.is_grad_enabled()
            known = self._leaves.get((id(registered), wants_grad))
            if known is not None:
                return known
            if registered.is_buffer:
                assigned = shared.read_buffer(self, registered)
                if assigned is not None:
                    return assigned
            shape = tuple(real.shape)
            spec = Spec(shape, contiguous_stride(shape), real.dtype, wants_grad)
            tensor = real.detach() if self.rank == registered.owner else None
            if tensor is not None and registered.is_buffer:
                tensor = tensor.clone()  # modules may change it while it is sent
            value = self.new_value(spec, registered.owner, tensor)
            if wants_grad:
                parameter = cast(torch.nn.Parameter, real)

                def accumulate(gradient: torch.Tensor) -> None:
                    torch.autograd.backward(parameter, gradient)

                entry = Entry(registered.name, registered.owner, (), (value.id,), ((),), sink=accumulate)
                entry.shared = (parameter,)
                self.tape.record(entry, [value])
            placed = PlacedTensor.of(value)
            placed._untracked = f"it is a view of '{registered.name}', which its owner holds"
            self._leaves[(id(registered), wants_grad)] = placed
            return placed

    def forget_leaf(self, registered: Registered) -> None:
        """A parameter or buffer was changed: the next read is a new value."""
        for wants_grad in (False, True):
            self._leaves.pop((id(registered), wants_grad), None)

    def buffer_changes(self, registered: Registered) -> None:
        """Called before glue changes a parameter or buffer in place."""
        registered.changed = True
        self.in_order(registered)

    def script_leaf(self, tensor: torch.Tensor) -> PlacedTensor:
        """An ordinary tensor that requires grad becomes a leaf held by pipeline rank 0, whose copy counts."""
        with native():
            known = self._script_leaves.get(id(tensor))
            if known is not None and known[1] == tensor._version:
                return known[0]
            spec = spec_of(tensor)
            value = self.new_value(spec, 0, tensor.detach() if self.rank == 0 else None)

            def accumulate(gradient: torch.Tensor) -> None:
                torch.autograd.backward(tensor, gradient, retain_graph=not tensor.is_leaf)

            self.tape.record(Entry("step input", 0, (), (value.id,), ((),), sink=accumulate), [value])
            placed = PlacedTensor.of(value)
            self._script_leaves[id(tensor)] = (placed, tensor._version, tensor)
            return placed

    def has_made(self, tensor: torch.Tensor) -> None:
        """Remember that this microbatch made an ordinary tensor."""
        self._made[id(tensor)] = weakref.ref(tensor)

    def made(self, tensor: torch.Tensor) -> bool:
        """Did this microbatch make it? If not, others may use it too."""
        known = self._made.get(id(tensor))
        return known is not None and known() is tensor

    def in_order(self, thing: Any) -> None:
        """Before this microbatch uses what others use too: let those before it come as far (see `shared`)."""
        if self.uses.is_last(self, thing):
            return
        self.note(Event("order"))
        with context.own_view():
            self._turns.in_order(self)
        self.uses.note(self, thing)

    def stay_in_line(self) -> None:
        """Before a call that must not come before those of earlier microbatches."""
        with context.own_view():
            self._turns.stay_in_line(self)

    def begin_in_order(self) -> None:
        """Let the microbatches before this one come through forward before it does anything."""
        self.in_order(self.runtime.overlay)
        self.runtime.overlay.begin(self.index)

    def new_leaf(self, value: Value) -> PlacedTensor:
        """The same value, requiring grad from here on (its gradient goes no further)."""
        spec = Spec(value.spec.shape, value.spec.stride, value.spec.dtype, True)
        leaf = self.new_value(spec, value.holder, value.tensor)
        leaf.copies = set(value.copies)
        self.tape.record(Entry("leaf", leaf.holder, (), (leaf.id,), ((),), sink=lambda gradient: None), [leaf])
        return PlacedTensor.of(leaf)

    def detached(self, value: Value) -> PlacedTensor:
        """The same value, not requiring grad from here on."""
        spec = Spec(value.spec.shape, value.spec.stride, value.spec.dtype, False)
        cut = self.new_value(spec, value.holder, value.tensor)
        cut.copies = set(value.copies)
        return PlacedTensor.of(cut)

    def adopt_foreign(self, placed: PlacedTensor, *, detach: bool = False) -> Value:
        """A value of another microbatch that Python kept: usable as a constant."""
        old = placed._value
        if old.spec.requires_grad and torch.is_grad_enabled() and not detach:
            raise UnsupportedOperationError(
                f"a tensor of microbatch {old.frame.index} that requires grad is used in microbatch {self.index}",
                where=self.where("glue"),
                remedy="detach() what is kept from one microbatch to the next",
            )
        spec = Spec(old.spec.shape, old.spec.stride, old.spec.dtype, False)
        value = self.new_value(spec, old.holder, old.tensor)
        value.copies, value.born = set(old.born), old.born
        return value

    # ------------------------------------------------------------------ calls

    def run_here(
        self,
        run: Callable[[list[torch.Tensor]], Any],
        inputs: Sequence[Value],
        streams: Callable[[int], Any] | None = None,
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run real code on this rank on detached leaves and on derived random streams; (result, leaves)."""
        leaves = []
        seed = self.stream(0)
        with native(), context.own_view(), (streams or rng.torch_forked)(seed):
            for value in inputs:
                assert value.tensor is not None
                leaf = value.tensor.detach()
                if value.spec.requires_grad:
                    leaf.requires_grad_(True)
                leaves.append(leaf)
            result = run(leaves)
        return result, leaves

    def stream(self, number: int) -> int:
        """The seed on which the next call runs; the n-th of its streams, if it has several."""
        return rng.derive_seed(self.seed, self._num_streams + number)

    def record(
        self,
        label: str,
        owner: int,
        inputs: Sequence[Value],
        outputs: Sequence[Spec],
        depends: Sequence[tuple[int, ...]],
        results: Sequence[torch.Tensor] | None,
        leaves: Sequence[torch.Tensor] | None,
        unit: Unit | None = None,
    ) -> list[Value]:
        """Enter a call that was made: its result values, and its entry if a gradient can flow through it."""
        with glue_off():
            kept = [None] * len(outputs) if results is None else [t.detach() for t in results]
        values = [self.new_value(spec, owner, tensor) for spec, tensor in zip(outputs, kept, strict=True)]
        self.calls.append(Call(label, owner, tuple(outputs)))
        self._num_streams += 1 if unit is None else unit.num_streams
        self.note(Event("call", owner, cost=self.runtime.cost.get(label, 0.0)))
        if any(spec.requires_grad for spec in outputs):
            positions = [i for i, v in enumerate(inputs) if v.spec.requires_grad]
            place = {p: k for k, p in enumerate(positions)}
            entry = Entry(
                label,
                owner,
                tuple(inputs[p].id for p in positions),
                tuple(v.id for v in values),
                tuple(tuple(place[p] for p in d if p in place) for d in depends),
            )
            if results is not None and leaves is not None:
                with glue_off():
                    if unit is not None:
                        self._share(entry, unit)
                    entry.leaves = [leaves[p] for p in positions]
                    entry.roots = [_root(t) for t in results]
            self.tape.record(entry, values)
        return values

    def _share(self, entry: Entry, unit: Unit) -> None:
        """Mark the parameters that this call has in common with other calls of the microbatch."""
        earlier = self._unit_entries.setdefault(unit.name, [])
        earlier.append(entry)
        if len(earlier) == 1:
            entry.shared = unit.tied
        else:
            earlier[0].shared = entry.shared = unit.trainable

    # ------------------------------------------------------------------ backward

    def backward(self, tensors: Sequence[PlacedTensor], gradients: Sequence[Any] | None) -> None:
        """Backward from placed tensors over this microbatch's tape, on all ranks."""
        from shardwright.pipeline.aliasing import resolve

        roots: list[tuple[Value, torch.Tensor | None]] = []
        for i, placed in enumerate(tensors):
            value = resolve(self, placed)
            if not value.spec.requires_grad:
                raise PipelineError(
                    "model.backward() was given a tensor that does not require grad",
                    where=self.where("backward"),
                    remedy="compute the loss from the model's output, with gradients enabled",
                )
            given = None if gradients is None else gradients[i]
            roots.append((value, self._seed_gradient(value, given)))
        if not self.in_backward:
            self.in_backward = True
            self.note(Event("gate"))
            self._turns.forward_done(self)
        with native(), context.own_view():
            self.tape.backward(roots, self)

    def _seed_gradient(self, value: Value, given: Any) -> torch.Tensor | None:
        if given is None and value.spec.numel != 1:
            raise PipelineError(
                f"model.backward() needs grad_tensors for a tensor of shape {list(value.spec.shape)}",
                where=self.where("backward"),
                remedy="reduce the loss to one number, or pass grad_tensors",
            )
        if isinstance(given, PlacedTensor):
            from shardwright.pipeline.aliasing import resolve

            gradient = resolve(self, given)
            self.fetch(gradient, value.holder)
            given = gradient.tensor
        if self.rank != value.holder:
            return None
        scale = self.gradient_scale()
        if given is None:
            shape, dtype = value.spec.shape, value.spec.dtype
            return torch.full(shape, scale, dtype=dtype, device=self.device)
        given = given.to(device=self.device, dtype=value.spec.dtype)
        return given * scale if scale != 1.0 else given

    def gradient_moves(self, source: int, to: int) -> None:
        self.note(Event("move", source, to))

    def backward_runs(self, entry: Entry) -> None:
        self.note(Event("call", entry.owner, cost=2 * self.runtime.cost.get(entry.label, 0.0)))

    def gradient_arrived(self, parameter: torch.nn.Parameter) -> None:
        self.runtime.gradient_arrived(parameter)

    def send_gradient(self, tensor: torch.Tensor, to: int) -> None:
        self.send(tensor.contiguous(), to)

    def receive_gradient(self, spec: Spec, source: int) -> torch.Tensor:
        return self.receive(gradient_spec(spec), source)

    # ------------------------------------------------------------------ messages

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._sent.setdefault(to, []).append(self.runtime.wire.send(tensor, to, self.index))

    def receive(self, spec: Spec, source: int) -> torch.Tensor:
        """Receive a tensor of a known spec; other microbatches run meanwhile."""
        received: torch.Tensor = self.wait(self.post_receive(spec, source))
        self._answered_by(source)
        return received

    def post_receive(self, spec: Spec, source: int) -> Handle:
        buffer = torch.empty_strided(spec.shape, wire_stride(spec), dtype=spec.dtype, device=self.device)
        return self.runtime.wire.receive(buffer, source, self.index)

    def wait(self, handle: Handle) -> Any:
        with context.own_view():
            self._turns.wait_turn(self)
            return handle.wait()

    def _answered_by(self, rank: int) -> None:
        """A rank that has sent something had received all that was sent to it before that: let go of it."""
        for handle in self._sent.pop(rank, ()):
            handle.wait()

    def release(self) -> None:
        """The step is over: let go of everything, so that nothing of it waits for Python's garbage collector."""
        self.tape = Tape()
        self._leaves.clear()
        self._script_leaves.clear()
        self._unit_entries.clear()
        self.converted.clear()
        self.told.clear()
        del self._turns

    def settle_sends(self) -> None:
        """Wait until everything this microbatch sent has arrived; called when all ranks are at the end of the
        step."""
        for rank in list(self._sent):
            self._answered_by(rank)

    def announce(self, holder: int, payload: Any, *, once: bool = False) -> Any:
        """Tell the group a Python value that only `holder` knows; returns it on every rank.

        once: it is about something new, so the next step won't announce it. The same on all ranks.
        """
        if self.runtime.size == 1:
            return payload
        self.note(Event("tell", holder, once=once))
        if self.rank != holder:
            told = messages.receive_value(self.runtime.wire, holder, self.index, self.wait)
            self._answered_by(holder)
            return told
        others = [r for r in range(self.runtime.size) if r != holder]
        for rank in others:
            self._sent.setdefault(rank, []).extend(messages.send_value(self.runtime.wire, payload, [rank], self.index))
        return payload

    # ------------------------------------------------------------------ words

    def where(self, label: str) -> str:
        return f"pipeline rank {self.rank}, microbatch {self.index}, '{label}'"


def _root(result: torch.Tensor) -> Any:
    """What backward needs of a result: its place in the graph, without keeping its memory."""
    if not carries_grad(result):
        return None
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(result)
