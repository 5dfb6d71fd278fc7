"""Small pieces of glue code, each with one trait that could break it silently, and the model they run in.

A case is the forward of `GlueModel`: it takes (model, x, y), returns the loss, or (loss, anything else to
compare), and is run by one plain process and by pipeline stages alike. Cases are in `glue_cases_*`, found by
name in `CASES`.

x: [BATCH, WIDTH], different in every microbatch.   y: [BATCH] integers below CLASSES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 4
WIDTH = 6
CLASSES = 5

Body = Callable[["GlueModel", Tensor, Tensor], Any]


@dataclass(frozen=True)
class Case:
    """One piece of glue.

    reordered: why sums may be taken in another order than in one process; "" asks for bitwise equality.
    slow: needs imports that take seconds.
    """

    name: str
    body: Body
    reordered: str = ""
    slow: bool = False


CASES: dict[str, Case] = {}


def case(body: Body | None = None, *, reordered: str = "", slow: bool = False) -> Any:
    """Register a function as a case under its own name."""

    def register(body: Body) -> Body:
        assert body.__name__ not in CASES, body.__name__
        CASES[body.__name__] = Case(body.__name__, body, reordered, slow)
        return body

    return register if body is None else register(body)


class Block(nn.Module):
    """A linear layer and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Weighted(nn.Module):
    """Uses a weight that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, weight) + self.bias)


class GlueModel(nn.Module):
    """Blocks on different stages, and parameters and buffers that belong to the root, on stage 0.

    a, emb: stage 0.   b, weighted, norm: stage 1.   c, head: the last stage.
    """

    table: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.emb = nn.Embedding(CLASSES, WIDTH)
        self.b = Block()
        self.weighted = Weighted()
        self.norm = nn.LayerNorm(WIDTH)
        self.c = Block()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.cls_token = nn.Parameter(torch.randn(1, WIDTH) * 0.1)
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.notes: dict[str, Any] = {}

    def forward(self, name: str, x: Tensor, y: Tensor) -> Any:
        result = CASES[name].body(self, x, y)
        return result if isinstance(result, tuple) else (result, None)

    def stages(self, num_stages: int) -> dict[str, int]:
        """Module name to stage, for `num_stages` >= 2."""
        last = num_stages - 1
        return {"a": 0, "emb": 0, "b": 1, "weighted": 1, "norm": 1, "c": last, "head": last}


def make_model(seed: int = 0) -> GlueModel:
    torch.manual_seed(seed)
    return GlueModel()


def make_batch(num_microbatches: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = BATCH * num_microbatches
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def finish(m: GlueModel, h: Tensor, y: Tensor) -> Tensor:
    """From hidden states to the loss, over the last stage."""
    return F.cross_entropy(m.head(m.c(h)), y)


# ------------------------------------------------------------------ run and compare


@dataclass
class Seen:
    """What a case showed: per microbatch the loss and the rest; then gradients and buffers."""

    losses: Tensor
    rest: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def run_plain(name: str, num_microbatches: int = 2) -> Seen:
    """The case in one plain process."""
    model = make_model()
    x, y = make_batch(num_microbatches)
    seen = Seen(torch.empty(0))
    losses = []
    for xs, ys in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
        loss, rest = model(name, xs, ys)
        (loss / num_microbatches).backward()
        losses.append(loss.detach())
        seen.rest.append(rest)
    seen.losses = torch.stack(losses)
    seen.gradients = {n: p.grad for n, p in model.named_parameters()}
    seen.buffers = dict(model.named_buffers())
    return seen


def differences(case: Case, want: Seen, got: Seen) -> list[str]:
    """Words for everything that differs; empty if nothing does. `got` may hold only a stage's gradients."""
    close = bool(case.reordered)
    found: list[str] = []
    _compare("loss", want.losses, got.losses, close, found)
    for index, (w, g) in enumerate(zip(want.rest, got.rest, strict=True)):
        _compare(f"microbatch {index}, result", w, g, close, found)
    for name, gradient in got.gradients.items():
        _compare(f"gradient of {name}", want.gradients[name], gradient, close, found)
    for name, buffer in got.buffers.items():
        _compare(f"buffer {name}", want.buffers[name], buffer, close, found)
    return found


def _compare(what: str, want: Any, got: Any, close: bool, found: list[str]) -> None:
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        if want.dtype != got.dtype or want.shape != got.shape:
            found.append(f"{what}: {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
        elif not _equal(want.detach(), got.detach(), close):
            found.append(f"{what}: {got.detach().flatten()[:4]}, expected {want.detach().flatten()[:4]}")
    elif type(want) is not type(got):
        found.append(f"{what}: {got!r}, expected {want!r}")
    elif isinstance(want, dict) and list(want) == list(got):
        for key in want:
            _compare(f"{what}[{key!r}]", want[key], got[key], close, found)
    elif isinstance(want, (list, tuple)) and len(want) == len(got):
        for index, (w, g) in enumerate(zip(want, got, strict=True)):
            _compare(f"{what}[{index}]", w, g, close, found)
    elif want != got and not (want != want and got != got):  # nan is nan
        found.append(f"{what}: {got!r}, expected {want!r}")


def _equal(want: Tensor, got: Tensor, close: bool) -> bool:
    if not close or not want.is_floating_point():
        return torch.equal(want, got) or bool(torch.allclose(want, got, rtol=0, atol=0, equal_nan=True))
    return bool(torch.allclose(want, got, rtol=1e-5, atol=1e-6))
