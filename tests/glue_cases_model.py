"""Cases of glue with parameters and buffers, grad modes, and what bypasses torch functions (rules 2 and 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from glue_cases import GlueModel, case, finish

# ------------------------------------------------------------------ parameters and buffers in glue


@case
def root_parameter(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    return finish(m, m.b(m.a(x)) * m.scale, y)


@case(reordered="each use of a weight is added on its own")
def weight_of_another_stage(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.c(m.b(m.a(x) + m.emb(y)))
    return F.cross_entropy(F.linear(h, m.emb.weight), y)


@case(reordered="each use of a weight is added on its own")
def weight_as_argument(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.weighted(m.a(x), m.a.linear.weight)
    h = m.weighted(h, weight=m.b.linear.weight)
    return finish(m, m.b(h), y)


@case
def expanded_parameter(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = torch.cat([m.cls_token.expand(len(x), -1), m.a(x)], 1)
    return finish(m, m.b(h.unflatten(1, (2, 6)).sum(1)), y)


@case(reordered="each use of a weight is added on its own")
def weights_penalised(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    penalty = sum(p.pow(2).sum() for p in m.parameters())
    norm = torch.stack([p.norm() for p in m.b.parameters()]).sum()
    tied = m.b.linear.weight @ m.c.linear.weight.T
    return finish(m, m.b(m.a(x)), y) + 0.01 * penalty + 0.1 * norm + tied.mean()


@case(reordered="each use of a weight is added on its own")
def parameter_twice(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x) * m.scale)
    w = m.scale
    h = h + w.data + w.detach() * 2 + w
    with torch.no_grad():
        h = h + m.scale * 0
    rest = {
        "wants": w.requires_grad,
        "shape": tuple(w.shape),
        "type": type(w).__name__,
        "leaf": w.is_leaf,
        "n": w.norm().item(),
    }
    return finish(m, h, y), rest


@case
def buffer_read(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    return finish(m, m.b(m.a(x)) + m.table + m.table[y[0]], y), {"sum": m.table.sum(), "list": str(m.table.tolist())}


@case
def buffer_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    m.seen += 1
    with torch.no_grad():
        m.table.mul_(0.9).add_(h.mean(0), alpha=0.1)
        m.table[0] = h[0, 0]
    return finish(m, h / m.seen + m.table, y), {"seen": m.seen.item()}


@case
def buffer_read_early_and_changed_late(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x + m.table))
    with torch.no_grad():
        m.table.lerp_(h.mean(0), 0.5)
    m.seen = m.seen + h.detach().sum()
    return finish(m, h, y) * m.seen, {"table": m.table.clone()}


@case
def buffer_reassigned(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    m.seen = m.seen + 1
    m.table = 0.9 * m.table + 0.1 * h.detach().mean(0)
    return finish(m, h / m.seen + m.table, y), {"table": m.table.clone()}


@case
def frozen_and_conditional(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.a(x)
    with torch.no_grad():
        h = m.b(h)
    h = h + m.cls_token
    with torch.enable_grad():
        h = h * m.scale
    with torch.set_grad_enabled(False):
        note = (h * 2).requires_grad
    return finish(m, h, y), {"note": note}


@case
def without_grad(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        h = m.b(m.a(x)) + m.scale
    with torch.inference_mode():
        g = m.b(m.a(x)) * m.scale
        flag = g.requires_grad
        n = g.sum().item()
    return finish(m, m.b(m.a(x)) + h, y), {"flag": flag, "n": n, "h": h.requires_grad}


@case
def autocast(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.b(m.a(x))
        kinds = [h.dtype, (h @ m.scale).dtype, h.softmax(-1).dtype, (h + m.scale).dtype, m.scale.dtype]
        h = F.linear(h, m.emb.weight)
        kinds.append(h.dtype)
        h = h.softmax(-1)
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ m.head.weight
            kinds.append(h.dtype)
        h = h * m.cls_token
        loss = F.mse_loss(m.c(h), x)
    kinds += [h.dtype, loss.dtype]
    return loss, {"kinds": str(kinds)}


@case
def default_dtype(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    torch.set_default_dtype(torch.float64)
    try:
        n = (h > 0) * 1.5
        k = (h > 0).long() / 3
        z = torch.zeros(6) + h.long()
    finally:
        torch.set_default_dtype(torch.float32)
    same = (h > 0) * 1.5
    return finish(m, h + same, y), {"n": n, "k": k, "z": z, "same": same}


# ------------------------------------------------------------------ what bypasses torch functions


class RoundThrough(Function):
    """Rounds, and passes the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class ScaledProduct(Function):
    """Takes plain values beside tensors, saves tensors, returns two tensors of which one isn't differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, weight: Tensor, flag: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        ctx.flag = flag
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * weight * factor, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        assert ctx.flag == "flag"
        return gradient * weight * ctx.factor, None, (gradient * x).sum(0) * ctx.factor, None


class NewStyle(Function):
    """With `setup_context`, as torch.func wants it."""

    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.power * x ** (ctx.power - 1) * 3, None


class AddInPlace(Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 5


@case
def straight_through(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = RoundThrough.apply(m.a(x))
    h = m.b(h)
    rounded = h + (torch.round(h) - h).detach()
    return RoundThrough.apply(finish(m, rounded, y))


@case
def function_with_plain_arguments(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h, index = ScaledProduct.apply(m.b(m.a(x)), 1.5, m.scale, "flag")
    h = NewStyle.apply(h, 3)
    return finish(m, h, y), {"index": index, "wants": index.requires_grad}


@case
def function_on_parameters_only(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    w = RoundThrough.apply(m.b.linear.weight)
    return finish(m, F.linear(m.a(x), w), y)


@case
def function_on_ordinary_tensors(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    leaf = (x * 2).requires_grad_(True)
    return finish(m, m.b(m.a(RoundThrough.apply(leaf))), y)


@case(reordered="a recomputed block adds its gradients on its own")
def checkpointed_blocks(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    h = checkpoint(m.a, x, use_reentrant=False)
    h = checkpoint(lambda t: m.b(t) * m.scale, h, use_reentrant=False)
    h = checkpoint(lambda t, k=1: m.c(m.b(t)) * k, h, use_reentrant=True)
    return finish(m, h, y)


@case
def functions_of_functions(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    weight = torch.ones(6) * 2
    row = torch.func.grad(lambda t: (t * t).sum())(weight)
    mapped = torch.vmap(lambda t: t * 2)(x)
    return finish(m, h * row + mapped, y)


class Negated(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return -t

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -g


@case
def function_within_vmap(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    """As transformers 4.57 builds its masks."""
    return finish(m, m.b(m.a(x)) + torch.vmap(torch.vmap(Negated.apply))(x), y)


def tanh_of_product(t: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(t * w) * 2


@case
def script_function(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    traced = m.notes.setdefault("traced", torch.jit.trace(tanh_of_product, (x, x)))
    return finish(m, traced(m.b(m.a(x)), m.scale) + traced(x, x), y)


@case(slow=True)
def compiled_functions(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    def twice(t: Tensor) -> Tensor:
        return torch.tanh(t) * 2 + t.sum() * m.scale

    f = m.notes.setdefault("compiled", torch.compile(twice, backend="eager"))
    inside = m.notes.setdefault("module", torch.compile(Gain(), backend="eager"))
    return finish(m, inside(f(m.b(m.a(x)))) + f(x), y)


class Gain(torch.nn.Module):
    """Not part of the model: made in glue."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@case
def modules_made_in_glue(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = Gain()(m.b(m.a(x)))
    h = torch.nn.functional.layer_norm(torch.nn.ReLU(inplace=True)(h * 1), (6,))
    h = torch.nn.LayerNorm(6, elementwise_affine=False)(h) + torch.nn.Softmax(-1)(h)
    return finish(m, h, y)
