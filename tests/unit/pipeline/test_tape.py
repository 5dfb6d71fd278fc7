"""Backward over a tape: every rank is a thread with the same tape, gradients travel by queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.errors import PipelineError
from shardwright.pipeline.placed import Value
from shardwright.pipeline.spec import Spec, spec_of
from shardwright.pipeline.tape import Entry, Tape

TIMEOUT_S = 5.0


class Rank:
    """One rank: its tape, and how gradients travel from and to it. `log`: what it did, in order."""

    device = torch.device("cpu")

    def __init__(self, number: int, wires: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank = number
        self.tape = Tape()
        self.log: list[tuple[Any, ...]] = []
        self._wires = wires
        self._values: list[Value] = []

    # what a frame does for its tape

    def gradient_moves(self, source: int, to: int) -> None:
        self.log.append(("move", source, to))

    def backward_runs(self, entry: Entry) -> None:
        self.log.append(("run", entry.label))

    def gradient_arrived(self, parameter: Tensor) -> None:
        self.log.append(("arrived", tuple(parameter.shape)))

    def send_gradient(self, tensor: Tensor, to: int) -> None:
        self._wires[self.rank, to].put(tensor.clone())

    def receive_gradient(self, spec: Spec, source: int) -> Tensor:
        tensor = self._wires[source, self.rank].get(timeout=TIMEOUT_S)
        assert tuple(tensor.shape) == spec.shape
        return tensor

    # what a frame does in forward: every rank computes everything here, and keeps what it owns

    def value(self, tensor: Tensor, owner: int, requires_grad: bool) -> Value:
        spec = spec_of(tensor.detach().requires_grad_(requires_grad))
        made = Value(None, len(self._values), spec, owner, tensor.detach())  # type: ignore[arg-type]
        self._values.append(made)
        return made

    def leaf(self, parameter: Tensor, owner: int, sink: Callable[[Tensor], None] | None = None) -> Value:
        made = self.value(parameter, owner, True)

        def add(gradient: Tensor) -> None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        self.tape.record(Entry("leaf", owner, (), (made.id,), ((),), sink=sink or add), [made])
        return made

    def call(
        self, label: str, owner: int, function: Callable[..., Any], *inputs: Value, shared: Sequence[Any] = ()
    ) -> Any:
        leaves = []
        for value in inputs:
            assert value.tensor is not None
            leaves.append(value.tensor.detach().requires_grad_(value.spec.requires_grad))
        result = function(*leaves)
        results = list(result) if isinstance(result, tuple) else [result]
        positions = [i for i, v in enumerate(inputs) if v.spec.requires_grad]
        made = [self.value(t, owner, t.requires_grad) for t in results]
        entry = Entry(
            label,
            owner,
            tuple(inputs[p].id for p in positions),
            tuple(v.id for v in made),
            tuple(_reached(t, [leaves[p] for p in positions]) for t in results),
            shared=shared,
        )
        if owner == self.rank:
            entry.leaves = [leaves[p] for p in positions]
            entry.roots = [torch.autograd.graph.get_gradient_edge(t) if t.requires_grad else None for t in results]
        if any(t.requires_grad for t in results):
            self.tape.record(entry, made)
        return tuple(made) if isinstance(result, tuple) else made[0]

    def backward(self, *roots: Value) -> list[int]:
        given = [(v, torch.ones(v.spec.shape) if v.holder == self.rank else None) for v in roots]
        return self.tape.backward(given, self)


def _reached(result: Tensor, leaves: list[Tensor]) -> tuple[int, ...]:
    if not result.requires_grad:
        return ()
    found = torch.autograd.grad(result.sum(), leaves, allow_unused=True, retain_graph=True) if leaves else ()
    return tuple(i for i, gradient in enumerate(found) if gradient is not None)


def on_ranks(number: int, program: Callable[[Rank], Any]) -> list[Any]:
    """Run a program on all ranks; returns what each returned, or raised."""
    wires: dict[tuple[int, int], queue.Queue[Tensor]] = {
        (a, b): queue.Queue() for a in range(number) for b in range(number)
    }
    results: list[Any] = [None] * number

    def run(rank: int) -> None:
        try:
            results[rank] = program(Rank(rank, wires))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * TIMEOUT_S)
        assert not thread.is_alive()
    assert all(wire.empty() for wire in wires.values()), "a gradient was sent that nobody received"
    return results


def weight(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


# ------------------------------------------------------------------ reached_by


def entry(inputs: Sequence[int], outputs: Sequence[int], *depends: Sequence[int]) -> Entry:
    return Entry("", 0, tuple(inputs), tuple(outputs), tuple(tuple(d) for d in depends))


def tape_of(*entries: Entry) -> Tape:
    tape = Tape()
    for made in entries:
        values = [Value(None, o, Spec((), (), torch.float32, True), 0, None) for o in made.outputs]  # type: ignore[arg-type]
        tape.record(made, values)
    return tape


def test_only_what_the_root_depends_on_is_walked_last_first() -> None:
    tape = tape_of(
        entry([], [0], []),
        entry([0], [1], [0]),
        entry([0], [2], [0]),  # a branch that the root doesn't use
        entry([1], [3], [0]),
        entry([3], [4], [0]),  # after the root
    )
    assert tape.reached_by([3]) == ([3, 1, 0], {3, 1, 0})
    assert tape.reached_by([2]) == ([2, 0], {2, 0})
    assert tape.reached_by([4, 2]) == ([4, 3, 2, 1, 0], {4, 3, 2, 1, 0})


def test_each_output_has_dependencies_of_its_own() -> None:
    tape = tape_of(entry([], [0], []), entry([], [1], []), entry([0, 1], [2, 3], [0], [1]), entry([2], [4], [0]))
    assert tape.reached_by([4]) == ([3, 2, 0], {4, 2, 0})
    assert tape.reached_by([3]) == ([2, 1], {3, 1})


def test_a_root_without_an_entry_reaches_nothing() -> None:
    assert tape_of(entry([], [0], [])).reached_by([7]) == ([], set())


# ------------------------------------------------------------------ gradients


def test_a_module_that_is_reused_and_a_residual_across_ranks() -> None:
    """a on 0, b on 1, a again, and a's first result added on rank 2: gradients equal one process."""

    def program(me: Rank) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        a, b, x = weight(1), weight(2), weight(3)
        v = me.leaf(x, 0)
        first = me.call("a", 0, lambda t: (t * a).tanh(), v)
        h = me.call("b", 1, lambda t: (t * b).tanh(), first)
        h = me.call("a", 0, lambda t: (t * a).tanh(), h)
        loss = me.call("add", 2, lambda s, t: (s * t).sum(), first, h)
        me.backward(loss)
        return a.grad, b.grad, x.grad

    a, b, x = weight(1), weight(2), weight(3)
    first = (x * a).tanh()
    (first * (((first * b).tanh()) * a).tanh()).sum().backward()
    ranks = on_ranks(3, program)
    assert torch.equal(ranks[0][0], a.grad)
    assert torch.equal(ranks[1][1], b.grad)
    assert torch.allclose(ranks[0][2], x.grad, rtol=1e-6)
    assert ranks[1][0] is None
    assert ranks[2] == (None, None, None)


def test_sums_are_taken_in_reverse_program_order() -> None:
    """1e8 + 1 - 1e8 in floats: the order shows in the sum."""
    scales = [1.0, 1e8, -1e8]

    def program(me: Rank) -> Tensor | None:
        x = torch.ones(1, requires_grad=True)
        v = me.leaf(x, 0)
        parts = [me.call(f"part {s}", 0, lambda t, s=s: t * s, v) for s in scales]
        loss = me.call("sum", 0, lambda *ts: torch.stack(ts).sum(), *parts)
        me.backward(loss)
        return x.grad

    x = torch.ones(1, requires_grad=True)
    torch.stack([x * s for s in scales]).sum().backward()
    expected = torch.tensor([(-1e8 + 1e8) + 1.0])
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert torch.equal(on_ranks(1, program)[0], expected)


def test_all_ranks_run_and_move_the_same_in_the_same_order() -> None:
    def program(me: Rank) -> list[tuple[Any, ...]]:
        w = weight(1)
        h = me.call("first", 0, lambda t: t * w, me.leaf(weight(0), 0))
        side = me.call("side", 1, lambda t: t * 2, h)  # not used
        assert side is not None
        h = me.call("second", 1, lambda t: t.exp(), h)
        loss = me.call("loss", 1, lambda t: t.sum(), h)
        assert me.backward(loss) == [4, 3, 1, 0]
        return me.log

    first, second = on_ranks(2, program)
    assert first == second
    assert first == [("run", "loss"), ("run", "second"), ("move", 1, 0), ("run", "first"), ("run", "leaf")]


def test_a_missing_gradient_becomes_zeros_for_a_producer_elsewhere() -> None:
    class Blocks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    def program(me: Rank) -> Tensor | None:
        w = weight(1)
        h = me.call("first", 0, lambda t: t * w, me.leaf(weight(0), 0))
        made = me.call("blocks", 1, lambda t: t * 1, h)
        entry = me.tape.entries[-1]
        if me.rank == 1:  # what is recorded says that a gradient flows; then none does
            leaf = entry.leaves[0]  # type: ignore[index]
            entry.roots = [torch.autograd.graph.get_gradient_edge(Blocks.apply(leaf))]
        me.backward(me.call("loss", 1, lambda t: t.sum(), made))
        return w.grad

    assert torch.equal(on_ranks(2, program)[0], torch.zeros(3))


def test_several_outputs_and_roots() -> None:
    def program(me: Rank) -> Tensor | None:
        x = weight(0)
        left, right, unused = me.call("split", 1, lambda t: (t * 2, t * 3, t * 5), me.leaf(x, 0))
        assert unused is not None
        one = me.call("one", 0, lambda t: t.sum(), left)
        me.backward(one, right)
        return x.grad

    assert torch.equal(on_ranks(2, program)[0], torch.full((3,), 5.0))


def test_the_same_root_twice_counts_twice() -> None:
    def program(me: Rank) -> Tensor | None:
        x = weight(0)
        loss = me.call("loss", 1, lambda t: t.sum(), me.leaf(x, 0))
        me.backward(loss, loss)
        return x.grad

    assert torch.equal(on_ranks(2, program)[0], torch.full((3,), 2.0))


# ------------------------------------------------------------------ several backwards


def test_backwards_through_different_entries_add_up() -> None:
    """They meet in a parameter only, which frees nothing."""

    def program(me: Rank) -> Tensor | None:
        x = weight(0)
        v = me.leaf(x, 0)
        me.backward(me.call("one", 1, lambda t: t.sum(), v))
        me.backward(me.call("two", 1, lambda t: (t * 2).sum(), v))
        return x.grad

    assert torch.equal(on_ranks(2, program)[0], torch.full((3,), 3.0))


def test_a_second_backward_through_an_entry_raises_on_all_ranks_before_anything_runs() -> None:
    def program(me: Rank) -> Any:
        x, w = weight(0), weight(1)
        h = me.call("trunk", 0, lambda t: t * w, me.leaf(x, 0))
        one = me.call("one", 1, lambda t: t.sum(), h)
        two = me.call("two", 1, lambda t: (t * 2).sum(), h)
        me.backward(one)
        kept, me.log = x.grad, []
        with pytest.raises(PipelineError, match=r"second time \(entry 1, 'trunk'\)"):
            me.backward(two)
        assert me.log == []
        assert x.grad is kept
        return "raised"

    assert on_ranks(2, program) == ["raised", "raised"]


def test_only_what_was_used_is_freed() -> None:
    def program(me: Rank) -> None:
        x = weight(0)
        v = me.leaf(x, 0)
        one = me.call("one", 0, lambda t: t.exp().sum(), v)
        two = me.call("two", 0, lambda t: t.exp().sum(), v)
        me.backward(one)
        leaf, first, second = me.tape.entries
        assert (first.roots, first.leaves) == (None, None)
        assert second.roots is not None
        assert (leaf.used, first.used, second.used) == (True, True, False)
        me.backward(two)
        assert second.roots is None

    assert on_ranks(1, program) == [None]


# ------------------------------------------------------------------ parameters, errors


def test_a_parameter_used_by_several_entries_adds_its_sum_once() -> None:
    def program(me: Rank) -> Any:
        w = torch.nn.Parameter(torch.ones(3))
        w.grad = torch.full((3,), 1e8)  # of another microbatch
        seen: list[Tensor | None] = []

        def use(t: Tensor) -> Tensor:
            return t * w

        h = me.call("first", 0, use, me.leaf(weight(0), 0), shared=[w])
        h = me.call("second", 0, use, h, shared=[w])
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        me.backward(me.call("loss", 0, lambda t: t.sum(), h))
        assert me.log[-1] == ("arrived", (3,))
        return w.grad, seen

    x = weight(0).detach()
    gradient, seen = on_ranks(1, program)[0]
    assert torch.equal(gradient, torch.full((3,), 1e8) + (x + x))
    assert all(float(part.abs().max()) < 1e7 for part in seen)


def test_an_error_in_backward_is_the_users_own_and_names_its_place() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("in backward")

    def program(me: Rank) -> None:
        h = me.call("transformer.h.2", 0, lambda t: t * 1, me.leaf(weight(0), 0))
        entry = me.tape.entries[-1]
        entry.roots = [torch.autograd.graph.get_gradient_edge(Fails.apply(entry.leaves[0]))]  # type: ignore[index]
        me.backward(me.call("loss", 0, lambda t: t.sum(), h))

    error = on_ranks(1, program)[0]
    assert type(error) is ZeroDivisionError
    assert error.shardwright_place == "backward of transformer.h.2"  # type: ignore[attr-defined]
