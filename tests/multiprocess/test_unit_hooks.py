"""The script's hooks on units and inside them: they run on every rank, and see placed tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_cases
from step_cases import Case, Verdict
from unit_models import Block, Chain, one_tensor, stages, train

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


# ------------------------------------------------------------------ hooks of torch itself


@contextmanager
def hooks_everywhere() -> Iterator[None]:
    """A hook on every module's call: it doubles what activations return, and records."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, nn.Tanh):
            RECORDED.get().append(output)
            return output * 2
        return None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def use_global_hooks(model: Any, x: Tensor) -> Any:
    with hooks_everywhere():
        return use_recorded(model, x)


def normalize_weights(model: Any) -> None:
    """Weights that torch computes before each call, the old way (hooks) and the new one (parametrization)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model.blocks[0].up)
        torch.nn.utils.weight_norm(model.blocks[1].down)
        torch.nn.utils.parametrizations.weight_norm(model.blocks[1].up)


CASES = [
    Case(
        "hooks_on_roots",
        lambda: Chain(Block(), Block(), Block()),
        use_recorded,
        one_tensor,
        stages(0, 1, 0),
        prepare=hook_roots,
        reordered="uses on two stages",
    ),
    Case(
        "hooks_inside",
        lambda: Chain(Block(), Block()),
        use_recorded,
        one_tensor,
        stages(0, 1),
        prepare=hook_inside,
        reordered="uses on two stages",
    ),
    Case("hooks_with_keywords", Keywords, train, one_tensor, stages(0, 1), prepare=hook_with_keywords),
    Case(
        "hooks_of_gradients", lambda: Chain(Block(), Block()), train, one_tensor, stages(0, 1), prepare=hook_gradients
    ),
    Case(
        "hooks_come_and_go",
        lambda: Chain(Block(), Block()),
        use_recorded,
        one_tensor,
        stages(0, 1),
        before_step=toggle_hooks,
        steps=3,
        reordered="uses on two stages",
    ),
    Case(
        "patched_forward",
        lambda: Patches(Block(), Block()),
        use_patched,
        one_tensor,
        stages(0, 1),
        reordered="uses on two stages",
    ),
    Case(
        "global_list",
        lambda: Chain(Block(), Block()),
        use_global,
        one_tensor,
        stages(0, 1),
        prepare=hook_globally,
        microbatches=1,
    ),
    Case(
        "global_list_mixed",
        lambda: Chain(Block(), Block()),
        use_global,
        one_tensor,
        stages(0, 1),
        prepare=hook_globally,
        error="microbatch 0 found a tensor of microbatch 1",
    ),
    Case(
        "global_hooks",
        lambda: Chain(Block(), Block()),
        use_global_hooks,
        one_tensor,
        stages(0, 1),
        microbatches=1,
        reordered="uses on two stages",
    ),
    Case("weight_norm", lambda: Chain(Block(), Block()), train, one_tensor, stages(0, 1), prepare=normalize_weights),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hooks(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
