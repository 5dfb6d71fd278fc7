"""LAMB and NovoGrad against their formulas, written down plainly, for all combinations of arguments."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright.torch as smp
from shardwright.errors import UsageError

SHAPES = ((3, 5), (7,), (), (1, 1, 2))
STEPS = 4


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    values[1].zero_()  # a parameter of norm zero
    return values


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    found: list[Tensor | None] = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]
    if step == 0:
        found[3] = None  # its first gradient comes in the second step
    return found


Update = Callable[[Tensor, Tensor, dict[str, Any], int, float], None]


def run(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Train two groups, and one that is empty."""
    parameters = [torch.nn.Parameter(v) for v in start(dtype)]
    groups = [{"params": parameters[:2], "lr": 0.3}, {"params": []}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = make(groups)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step, dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [p.detach() for p in parameters]


def expected(update: Update, options: dict[str, Any], max_norm: float | None = None) -> list[Tensor]:
    parameters = start()
    states: list[dict[str, Any]] = [{} for _ in parameters]
    group = [{**options, "lr": 0.3}] * 2 + [{**options, "weight_decay": 0.0}] * 2
    for step in range(STEPS):
        found = gradients(step)
        norm = math.sqrt(sum(float((g * g).sum()) for g in found if g is not None))
        divisor = norm / max_norm if max_norm and norm > max_norm else 1.0
        for p, g, state, settings in zip(parameters, found, states, group, strict=True):
            if g is not None:
                update(p, g / divisor, {**settings, "state": state}, step + 1, norm)
    return parameters


def lamb(p: Tensor, g: Tensor, o: dict[str, Any], step: int, norm: float) -> None:
    """You et al. 2020, algorithm 2."""
    (beta1, beta2), state, decay = o["betas"], o["state"], o["weight_decay"]
    if not o["adam_w_mode"]:
        g = g + decay * p
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1 if o["grad_averaging"] else 1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    m, v = state["m"], state["v"]
    if o["bias_correction"]:
        m, v = m / (1 - beta1**step), v / (1 - beta2**step)
    update = m / (v.sqrt() + o["eps"])
    if o["adam_w_mode"]:
        update = update + decay * p
    ratio = 1.0
    if (o["use_nvlamb"] or decay != 0) and float(p.norm()) > 0 and float(update.norm()) > 0:
        ratio = float(p.norm() / update.norm())
    p -= o["lr"] * ratio * update


def novograd(p: Tensor, g: Tensor, o: dict[str, Any], step: int, norm: float) -> None:
    """Ginsburg et al. 2019, algorithm 1."""
    (beta1, beta2), state, decay = o["betas"], o["state"], o["weight_decay"]
    size = float(g.norm()) if o["norm_type"] == 2 else float(g.abs().max())
    before = state.get("v", 0.0 if o["init_zero"] else size)
    if o["norm_type"] == 2:
        state["v"] = math.sqrt(beta2 * before**2 + (1 - beta2) * size**2)
    else:
        state["v"] = beta2 * before + (1 - beta2) * size
    v = state["v"]
    if o["bias_correction"]:
        v = v / math.sqrt(1 - beta2**step)
    share = 1 - beta1 if o["grad_averaging"] else 1
    if o["reg_inside_moment"]:
        state["m"] = beta1 * state.get("m", 0) + share * (g / (v + o["eps"]) + decay * p)
    else:
        state["m"] = beta1 * state.get("m", 0) + share * g
    m = state["m"] / (1 - beta1**step) if o["bias_correction"] else state["m"]
    p -= o["lr"] * (m if o["reg_inside_moment"] else m / (v + o["eps"]) + decay * p)


def combinations(*names: str) -> Iterator[dict[str, bool]]:
    for values in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


def close(got: Sequence[Tensor], want: Sequence[Tensor], rtol: float) -> bool:
    return all(torch.allclose(g.double(), w, rtol=rtol, atol=rtol) for g, w in zip(got, want, strict=True))


COMMON = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9, None])
def test_lamb_follows_the_paper(max_grad_norm: float | None) -> None:
    for flags in combinations("bias_correction", "grad_averaging", "adam_w_mode", "use_nvlamb"):
        options = {**COMMON, "eps": 1e-6, **flags}
        got = run(lambda groups, o=options: smp.optimizers.FusedLAMB(groups, max_grad_norm=max_grad_norm, **o))  # type: ignore[misc]
        assert close(got, expected(lamb, options, max_grad_norm), 1e-12), flags


@pytest.mark.parametrize("norm_type", [2, 0])
def test_novograd_follows_the_paper(norm_type: int) -> None:
    for flags in combinations("bias_correction", "grad_averaging", "reg_inside_moment", "init_zero"):
        options = {**COMMON, "eps": 1e-8, "norm_type": norm_type, **flags}
        got = run(lambda groups, o=options: smp.optimizers.FusedNovoGrad(groups, **o))  # type: ignore[misc]
        # The running norm is kept in fp32.
        assert close(got, expected(novograd, options), 1e-6), flags


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_are_updated_in_full(dtype: torch.dtype) -> None:
    """One step from the same rounded values: the result is the full one, rounded once."""
    for cls, update, extra in (
        (smp.optimizers.FusedLamb, lamb, {"adam_w_mode": True, "use_nvlamb": False, "eps": 1e-6}),
        (smp.optimizers.FusedNovoGrad, novograd, {"norm_type": 2, "init_zero": False, "eps": 1e-8}),
    ):
        value = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
        slope = 1e-4 * torch.randn(50, generator=torch.Generator().manual_seed(2)).to(dtype)
        parameter = torch.nn.Parameter(value.clone())
        parameter.grad = slope
        cls([parameter], lr=0.1, weight_decay=0.1).step()
        full = value.float()
        settings = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "bias_correction": True, "state": {}}
        update(full, slope.float(), {**settings, "grad_averaging": True, "reg_inside_moment": False, **extra}, 1, 0.0)
        assert torch.allclose(parameter.detach().float(), full, rtol=torch.finfo(dtype).eps)
        assert parameter.dtype == dtype


@pytest.mark.parametrize("cls", [smp.optimizers.FusedLamb, smp.optimizers.FusedNovoGrad])
def test_state_is_saved_and_goes_on(cls: Any) -> None:
    def train(optimizer: Any, parameter: Tensor, steps: range) -> None:
        for step in steps:
            parameter.grad = gradients(step, torch.float32)[0]
            optimizer.step()

    whole = torch.nn.Parameter(start(torch.float32)[0])
    once = cls([whole], lr=0.1)
    train(once, whole, range(4))
    first = torch.nn.Parameter(start(torch.float32)[0])
    before = cls([first], lr=0.1)
    train(before, first, range(2))
    second = torch.nn.Parameter(first.detach().clone())
    after = cls([second], lr=0.5)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(after, second, range(2, 4))
    assert torch.equal(whole, second)
    saved = before.state_dict()
    for state in saved["state"].values():
        del state["exp_avg_sq"]
    after.load_state_dict(saved)  # from an older version: it goes on with a fresh second moment
    train(after, second, range(4, 5))
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("cls", [smp.optimizers.FusedLamb, smp.optimizers.FusedNovoGrad])
def test_manners(cls: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match="AMSGrad"):
        cls([parameter], amsgrad=True)
    for set_grad_none in (True, False):
        optimizer = cls([parameter], set_grad_none=set_grad_none)
        parameter.grad = torch.ones(3)
        optimizer.zero_grad()
        assert (parameter.grad is None) == set_grad_none
        parameter.grad = torch.ones(3)
        optimizer.zero_grad(set_to_none=True)
        assert parameter.grad is None
    optimizer.step()
    assert torch.equal(parameter, torch.ones(3))

    def closure() -> Tensor:
        loss = (parameter * parameter).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    gradient = torch.full((3,), 5.0)
    parameter.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(parameter.grad, gradient)


def test_novograd_refuses_other_norms() -> None:
    with pytest.raises(UsageError, match="norm_type is 1"):
        smp.optimizers.FusedNovoGrad([torch.nn.Parameter(torch.ones(1))], norm_type=1)
