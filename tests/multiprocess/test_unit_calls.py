"""How units are called: hooks, changes in place, modules called twice, stages visited again, buffers.

Loss, gradients, weights, buffers and outputs are compared with one process, bit for bit.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from harness import RankPool
from step_cases import Case, Verdict

WIDTH = 8
BATCH = 4
TWICE = "a module called twice"


def one_tensor(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)),), {}


def train(model: Any, x: Tensor) -> Any:
    out = model(x)
    loss = out.square().mean()
    model.backward(loss)
    return loss, out


class Block(nn.Module):
    """Two layers around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.Tanh()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Chain(nn.Module):
    """The given modules one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stages(*owners: int) -> dict[str, int]:
    return {f"blocks.{i}": owner for i, owner in enumerate(owners)}


# ------------------------------------------------------------------ hooks

RECORDED: ContextVar[list[Any]] = ContextVar("recorded")
GLOBAL: list[Any] = []


def record(module: nn.Module, args: Any, output: Tensor) -> None:
    """Every microbatch runs in a context of its own, so they don't mix."""
    RECORDED.get().append(output)


def record_globally(module: nn.Module, args: Any, output: Tensor) -> None:
    GLOBAL.append(output.detach())


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def shift(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def shift_keywords(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {"x": kwargs["x"] * 3}


def hook_roots(model: nn.Module) -> None:
    for block in model.blocks:
        block.register_forward_hook(record)
        block.register_forward_hook(double)
        block.register_forward_pre_hook(shift)


def hook_inside(model: nn.Module) -> None:
    for block in model.blocks:
        block.up.register_forward_hook(record)
        block.act.register_forward_hook(double)
        block.down.register_forward_pre_hook(shift)


def hook_with_keywords(model: nn.Module) -> None:
    model.blocks[1].register_forward_pre_hook(shift_keywords, with_kwargs=True)


def hook_gradients(model: nn.Module) -> None:
    def halve(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return (grad_input[0] * 0.5,)

    for block in model.blocks:
        block.act.register_full_backward_hook(halve)


def use_recorded(model: Any, x: Tensor) -> Any:
    """Every hook's tensors count in the loss."""
    RECORDED.set([])
    out = model(x)
    seen = RECORDED.get()
    loss = out.square().mean() + sum(r.square().mean() for r in seen)
    model.backward(loss)
    return loss, seen


def use_global(model: Any, x: Tensor) -> Any:
    GLOBAL.clear()
    out = model(x)
    seen = list(GLOBAL)
    loss = out.square().mean() * sum(r.mean() for r in seen)
    model.backward(loss)
    return loss, seen


def hook_globally(model: nn.Module) -> None:
    for block in model.blocks:
        block.act.register_forward_hook(record_globally)


class Patches(Chain):
    """In the style of older output recorders: for each call, the forwards of modules inside are wrapped."""

    def forward(self, x: Tensor) -> Any:
        seen: list[Tensor] = []
        plain = [(block, block.act.forward) for block in self.blocks]

        def wrap(forward: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                output = forward(*args, **kwargs)
                seen.append(output)
                return output

            return wrapped

        for block, forward in plain:
            block.act.forward = wrap(forward)  # type: ignore[union-attr, assignment]
        try:
            return super().forward(x), seen
        finally:
            for block, forward in plain:
                block.act.forward = forward  # type: ignore[union-attr, assignment]


def use_patched(model: Any, x: Tensor) -> Any:
    out, seen = model(x)
    loss = out.square().mean() + sum(r.square().mean() for r in seen)
    model.backward(loss)
    return loss, seen


def toggle_hooks(model: Any, step: int) -> None:
    """Hooks come and go between steps."""
    if step == 1:
        model._handles = [b.act.register_forward_hook(double) for b in model.blocks]
        model._handles += [b.register_forward_hook(record) for b in model.blocks]
    if step == 2:
        for handle in model._handles:
            handle.remove()


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](x=self.blocks[0](x=x))


# ------------------------------------------------------------------ results that are arguments, changes in place


class PassOn(nn.Module):
    """Identity and Dropout (in eval mode) behind a border; what they return is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.same = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH))
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        same = self.same[0](h)
        assert same is h
        same += 1
        dropped = self.drop(h)
        dropped *= 2
        h[:, 0] = 0.5
        return self.last(self.same[1](h) + dropped)


def evaluate_mode(model: Any, step: int) -> None:
    model.eval()


class InPlace(nn.Module):
    """Activations in place as units of their own, right behind a border; the input is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.more = AddsOne()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * 3
        view = h.view(-1)
        self.more(view)  # a view: h sees it
        out = self.act(h)
        assert out is h
        return self.last(out) + h + view.view_as(h)


class AddsOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class ChangesInput(nn.Module):
    """Adds to its first argument in place, and returns another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, count: Tensor) -> Tensor:
        out = self.linear(h.clone())
        h += out.detach() + 1
        count += 1
        return out


class GivesAway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = ChangesInput()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() * 2
        out = self.inner(h, self.count)
        return self.last(h) + out * self.count


class Flat(nn.Module):
    """Flatten and friends as units: results are views; then one or the other is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.flatten = nn.Flatten(0)
        self.halves = Halves()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        flat = self.flatten(h)
        flat += 0.5
        a, rest = self.halves(h)
        rest[0].mul_(2)
        self.act(a)
        return h + flat.view_as(h).sigmoid()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x[:1], (x[1:],)


class Overlap(nn.Module):
    """Returns a new tensor and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x) * 1
        return h, h[:, :4], h.t()


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Overlap()

    def forward(self, x: Tensor) -> Tensor:
        h, part, turned = self.inner(self.first(x))
        part *= 3
        h[0] = 1.0
        return h + turned.t().sigmoid() + part.sum()


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x) * 1
        return h[:, 2:], h[:, :4]


class ChangesChunk(nn.Module):
    """Two results that overlap and of which neither holds the other: refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Chunks()

    def forward(self, x: Tensor) -> Tensor:
        right, left = self.inner(self.first(x))
        left.mul_(2)
        return right.sum() + left.sum()


# ------------------------------------------------------------------ called twice, stages visited again


class Twice(nn.Module):
    """FF-09: one block at depth 2 and 5."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 3, 4, 2):
            x = self.blocks[index](x)
        return self.head(x)


class TwoModelCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return x if scale is None else x * scale


def call_twice(model: Any, x: Tensor) -> Any:
    first = model(x)
    second = model(first, scale=first.mean())
    loss = second.square().mean()
    model.backward(loss)
    return loss, first, second


def backward_twice(model: Any, x: Tensor) -> Any:
    losses = [model(x).square().mean(), model(x * 2).mean()]
    model.backward(losses[0])
    model.backward(losses[1])
    return losses


# ------------------------------------------------------------------ buffers and statistics


class Norms(nn.Module):
    """FF-31: convolution and batch norm, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU(inplace=True)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], 2, -1)
        for block in self.blocks:
            x = block(x)
        return x


def last_step_in_eval(model: Any, step: int) -> None:
    model.train(step < 3)


class Counter(nn.Module):
    """FF-32: a counter changed in place, one assigned anew, and one buffer of another module."""

    shared: Tensor
    counts: Tensor
    total: Tensor

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shared", shared)
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        self.total = self.total + x.detach().mean(0)
        return self.linear(x) * self.shared + self.total / self.counts


class Counters(nn.Module):
    counts: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        shared = torch.linspace(0.5, 1.5, WIDTH)
        self.first = Counter(shared)
        self.second = Counter(shared)
        self.num_calls = 0
        self.register_buffer("counts", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        self.total = self.total + x.detach().mean(0)
        h = self.second(self.first(x))
        self.seen = h.detach()
        self.num_calls += 1
        return h + self.total / self.counts + self.num_calls


class CountsAtEnd(nn.Module):
    """A statistic that each call takes up from the call before, after it has waited for another stage."""

    total: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        if self.in_place:
            self.total += h.detach().mean(0)
        else:
            self.total = self.total + h.detach().mean(0)
        return h + self.total


def use_attributes(model: Any, x: Tensor) -> Any:
    """Attributes that glue assigned, read after the call."""
    out = model(x)
    loss = (out - model.module.seen).mean()
    model.backward(out.square().mean())
    return loss, out


# ------------------------------------------------------------------ modes that change between steps


def freeze_and_thaw(model: Any, step: int) -> None:
    """Parts of a unit are frozen, set to eval mode, and thawed again."""
    block = model.blocks[1]
    for p in block.parameters():
        p.requires_grad_(step != 1)
    for p in model.blocks[0].parameters():
        p.requires_grad_(step != 2)
    block.act.train(step != 3)


class BlockWithDropout(nn.Module):
    """Dropout that is inert, so that its results can be compared; in eval mode it returns its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Dropout(1e-12)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


def eval_inside(model: Any, step: int) -> None:
    model.blocks[1].act.train(step % 2 == 0)


class DropOnly(nn.Module):
    """A unit whose dropout alone is behind the border: what it returns is the argument, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Sequential(nn.Dropout(1e-12)), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        d = self.inner[0](h)
        d = d * 1 if d is h else d + 0
        return self.inner[1](d)


def eval_drop(model: Any, step: int) -> None:
    model.inner[0][0].train(step % 2 == 0)


class Unused(nn.Module):
    """A result that nobody uses, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        self.blocks[1](h)
        with torch.no_grad():
            extra = self.blocks[2](h)
        return h + extra


class ReturnsArguments(nn.Module):
    """A unit that picks one of its arguments by value: which one gets the gradient is seen, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a if a.detach().sum() > 0 else b)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = ReturnsArguments()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x).abs() * x[0, 0].sign(), self.other(x))


def signs_alike(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = one_tensor(step)
    x[0, 0] = x[2, 0] = 1.0 if step == 0 else -1.0
    return (x,), {}


CASES = [
    Case("hooks_on_roots", lambda: Chain(Block(), Block(), Block()), use_recorded, one_tensor, stages(0, 1, 0), prepare=hook_roots, reordered="uses on two stages"),
    Case("hooks_inside", lambda: Chain(Block(), Block()), use_recorded, one_tensor, stages(0, 1), prepare=hook_inside, reordered="uses on two stages"),
    Case("hooks_with_keywords", Keywords, train, one_tensor, stages(0, 1), prepare=hook_with_keywords),
    Case("hooks_of_gradients", lambda: Chain(Block(), Block()), train, one_tensor, stages(0, 1), prepare=hook_gradients),
    Case("hooks_come_and_go", lambda: Chain(Block(), Block()), use_recorded, one_tensor, stages(0, 1), before_step=toggle_hooks, steps=3, reordered="uses on two stages"),
    Case("patched_forward", lambda: Patches(Block(), Block()), use_patched, one_tensor, stages(0, 1), reordered="uses on two stages"),
    Case("global_list", lambda: Chain(Block(), Block()), use_global, one_tensor, stages(0, 1), prepare=hook_globally, microbatches=1),
    Case("global_list_mixed", lambda: Chain(Block(), Block()), use_global, one_tensor, stages(0, 1), prepare=hook_globally, error="microbatch 0 found a tensor of microbatch 1"),
    Case("pass_on", PassOn, train, one_tensor, {"same": 1, "drop": 1}, before_step=evaluate_mode),
    Case("in_place_units", InPlace, train, one_tensor, {"act": 1, "more": 1, "last": 1}, reordered="uses on two stages"),
    Case("changed_arguments", GivesAway, train, one_tensor, {"inner": 1}, microbatches=1, reordered="uses on two stages"),
    Case("views", Flat, train, one_tensor, {"flatten": 1, "halves": 1, "act": 1}),
    Case("overlapping_results", Overlapping, train, one_tensor, {"inner": 1}),
    Case("changed_chunk", ChangesChunk, train, one_tensor, {"inner": 1}, error="in-place 'mul_' on a tensor whose memory is shared"),
    Case("twice_on_two_stages", Twice, train, one_tensor, {"blocks.2": 1, "blocks.3": 0, "blocks.4": 1}, steps=3, reordered=TWICE),
    Case("twice_on_one_stage", Twice, train, one_tensor, {"blocks.2": 1, "blocks.3": 1, "blocks.4": 1, "head": 1}, steps=3, reordered=TWICE),
    Case("two_model_calls", TwoModelCalls, call_twice, one_tensor, stages(0, 1), reordered=TWICE),
    Case("two_backwards", TwoModelCalls, backward_twice, one_tensor, stages(0, 1), reordered=TWICE),
    Case("virtual_stages", lambda: Chain(*(Block() for _ in range(4))), train, one_tensor, stages(0, 1, 0, 1), microbatches=4, steps=3),
    Case("virtual_stages_simple", lambda: Chain(*(Block() for _ in range(4))), train, one_tensor, stages(1, 0, 1, 0), microbatches=4, steps=3, schedule="simple"),
    Case("virtual_stages_4", lambda: Chain(*(Block() for _ in range(8))), train, one_tensor, stages(0, 1, 2, 3, 0, 1, 2, 3), pp=4, microbatches=4, steps=3),
    Case("ff31_batch_norm", Norms, train, one_tensor, stages(0, 0, 1, 1), steps=4, before_step=last_step_in_eval),
    Case("ff32_buffers", Counters, use_attributes, one_tensor, {"second": 1}, steps=3, microbatches=4),
    Case("statistic_serial", lambda: CountsAtEnd(False), train, one_tensor, {"second": 1}, steps=3, microbatches=4, config={"active_microbatches": 1}),
    Case("statistic_serial_in_place", lambda: CountsAtEnd(True), train, one_tensor, {"second": 1}, steps=3, microbatches=4, config={"active_microbatches": 1}),
    Case("statistic_mixed", lambda: CountsAtEnd(False), train, one_tensor, {"second": 1}, steps=3, microbatches=4),
    Case("statistic_simple", lambda: CountsAtEnd(True), train, one_tensor, {"second": 1}, steps=4, microbatches=4, schedule="simple"),
    Case("changed_arguments_mixed", GivesAway, train, one_tensor, {"inner": 1}, timeout_s=6),
    Case("freeze_and_thaw", lambda: Chain(Block(), Block()), train, one_tensor, stages(0, 1), before_step=freeze_and_thaw, steps=5),
    Case("eval_inside", lambda: Chain(BlockWithDropout(), BlockWithDropout()), train, one_tensor, stages(0, 1), before_step=eval_inside, steps=4),
    Case("eval_drop", DropOnly, train, one_tensor, {"inner": 1}, before_step=eval_drop, steps=4),
    Case("unused_results", Unused, train, one_tensor, stages(0, 1, 1)),
    Case("picks_argument", Picks, train, signs_alike, {"inner": 1}, steps=2, error=r"'inner'(.|\n)*smp\.dynamic_shapes"),
]  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for pp in (2, 4):
        pool: RankPool = request.getfixturevalue(f"pool{pp}")
        found |= step_cases.run_cases(pool, [case for case in CASES if case.pp == pp])
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
