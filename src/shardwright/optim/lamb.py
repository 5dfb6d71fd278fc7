"""LAMB: Adam whose step is as long, for each parameter, as the parameter's own norm says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.optim.norms import Norms, OwnNorms, in_full, write_back


class FusedLamb(torch.optim.Optimizer):
    """LAMB with the arguments and the arithmetic of `apex.optimizers.FusedLAMB`.

    params, lr, betas, eps, weight_decay: as in Adam.
    bias_correction: divide both moments by 1 - beta**step.
    adam_w_mode: add weight_decay * parameter to the update; False: to the gradient.
    grad_averaging: the gradient enters its mean with 1 - beta1; False: with 1.
    max_grad_norm: all gradients are divided by norm / max_grad_norm where the norm of all of them together is above
        it; None or 0: never.
    use_nvlamb: scale the step by the parameter's norm also in groups without weight decay.
    set_grad_none: what `zero_grad()` does without an argument.
    norms: where norms come from; the engine sets it when the model is cut, see `optim.norms`.

    State: `exp_avg`, `exp_avg_sq` of each parameter's shape; the step number is in its group. Half precision
    parameters are updated in fp32.
    Source: You et al. 2020, arXiv:1904.00962, algorithm 2, with the identity as function phi.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise UsageError("FusedLamb has no AMSGrad variant", remedy="leave out amsgrad=True")
        self.norms: Norms = OwnNorms()
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; without an argument as `set_grad_none` says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collectives: those of `norms`, three in all however many groups there are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = [_Part.of(self, group) for group in self.param_groups]
        parameters = [p for part in parts for p in part.parameters]
        max_norm = self.defaults["max_grad_norm"]
        if max_norm:
            norm = self.norms.of_all(parameters, [g for part in parts for g in part.gradients])
            for part in parts:
                part.divide_gradients((norm / max_norm).clamp(min=1.0))
        updates = [part.adam(self.adam_w_mode) for part in parts]
        weights = self.norms.of_each(parameters, [v for part in parts for v in part.values], 2.0)
        lengths = self.norms.of_each(parameters, [u for update in updates for u in update], 2.0)
        ratios = torch.where((weights != 0) & (lengths != 0), weights / lengths, 1.0)
        first = 0
        for part, update in zip(parts, updates, strict=True):
            last = first + len(part.parameters)
            scaled = self.use_nvlamb or part.group["weight_decay"] != 0
            part.apply(update, ratios[first:last] if scaled else torch.ones_like(ratios[first:last]))
            first = last
        return loss


@dataclass
class _Part:
    """The parameters of one group that have a gradient, and their state, in at least fp32."""

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]
    values: list[Tensor]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> _Part:
        group["step"] = group.get("step", 0) + 1
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in parameters):
            raise UsageError("FusedLamb takes no sparse gradients", remedy="use torch.optim.SparseAdam for them")
        states = [optimizer.state[p] for p in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return _Part(group, parameters, in_full([p.grad for p in parameters]), states, in_full(parameters))

    def divide_gradients(self, by: Tensor) -> None:
        """On copies: the script's gradients stay."""
        self.gradients = [g / by.to(g.device, g.dtype) for g in self.gradients]

    def adam(self, decoupled: bool) -> list[Tensor]:
        """Advance the moments; returns the update of each parameter, not yet scaled."""
        group, gradients = self.group, self.gradients
        if not gradients:
            return []
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        corrections = (1 - beta1 ** group["step"], 1 - beta2 ** group["step"]) if group["bias_correction"] else (1, 1)
        if decay and not decoupled:
            gradients = list(torch._foreach_add(gradients, self.values, alpha=decay))
        stored = [[s[name] for s in self.states] for name in ("exp_avg", "exp_avg_sq")]
        mean, square = (in_full(tensors) for tensors in stored)
        torch._foreach_mul_(mean, beta1)
        torch._foreach_add_(mean, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, gradients, gradients, 1 - beta2)
        write_back(stored[0], mean)
        write_back(stored[1], square)
        denominators = torch._foreach_div(square, corrections[1])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(mean, corrections[0])
        torch._foreach_div_(updates, denominators)
        if decay and decoupled:
            torch._foreach_add_(updates, self.values, alpha=decay)
        return list(updates)

    def apply(self, updates: list[Tensor], ratios: Tensor) -> None:
        """Move the parameters by lr * ratio * update."""
        if not updates:
            return
        factors = (self.group["lr"] * ratios).unbind()
        torch._foreach_mul_(updates, [f.to(u.device, u.dtype) for f, u in zip(factors, updates, strict=True)])
        torch._foreach_sub_(self.values, updates)
        write_back(self.parameters, self.values)
