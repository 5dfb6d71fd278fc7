"""NovoGrad: momentum of gradients that are divided by a running norm, one number for each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.optim.norms import Norms, OwnNorms, in_full, write_back


class FusedNovoGrad(torch.optim.Optimizer):
    """NovoGrad with the arguments and the arithmetic of `apex.optimizers.FusedNovoGrad`.

    params, lr, betas, eps, weight_decay: as in Adam.
    bias_correction: divide the momentum by 1 - beta1**step, the running norm by sqrt(1 - beta2**step).
    reg_inside_moment: add weight decay to the divided gradient before it enters the momentum; False: the gradient
        enters as it is, and division and weight decay come after.
    grad_averaging: the gradient enters the momentum with 1 - beta1; False: with 1.
    norm_type: 2, or 0 (or inf) for the largest absolute value.
    init_zero: the running norm begins at zero; False: at the first gradient's norm.
    set_grad_none: what `zero_grad()` does without an argument.
    norms: where norms come from; the engine sets it when the model is cut, see `optim.norms`.

    State: `exp_avg` of each parameter's shape, `exp_avg_sq`, the running norm (not its square), a number; the step
    number is in the group. A state without `exp_avg_sq` goes on as if the next gradient were the first. Half
    precision parameters are updated in fp32.
    Source: Ginsburg et al. 2019, arXiv:1905.11286, algorithm 1; it divides before the momentum, as reg_inside_moment
    does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise UsageError("FusedNovoGrad has no AMSGrad variant", remedy="leave out amsgrad=True")
        if norm_type not in (0, 2, math.inf):
            raise UsageError(f"norm_type is {norm_type}, expected 2, or 0 for the largest absolute value")
        self.norms: Norms = OwnNorms()
        self.reg_inside_moment = reg_inside_moment
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; without an argument as `set_grad_none` says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collectives: those of `norms`, one for each group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in parameters):
            raise UsageError("FusedNovoGrad takes no sparse gradients", remedy="use torch.optim.SparseAdam for them")
        gradients, values = in_full([p.grad for p in parameters]), in_full(parameters)
        order = 2.0 if group["norm_type"] == 2 else math.inf
        norms = self.norms.of_each(parameters, gradients, order)
        if not parameters:
            return
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        corrections = (1.0, 1.0)
        if group["bias_correction"]:
            corrections = (1 - beta1 ** group["step"], math.sqrt(1 - beta2 ** group["step"]))
        running = self._running_norms(group, parameters, norms, beta2)
        divisors = [
            (norm / corrections[1] + group["eps"]).to(value.device, value.dtype)
            for norm, value in zip(running.unbind(), values, strict=True)
        ]
        stored = [self._momentum(p) for p in parameters]
        momentum = in_full(stored)
        if self.reg_inside_moment:
            gradients = list(torch._foreach_div(gradients, divisors))
            if decay:
                torch._foreach_add_(gradients, values, alpha=decay)
        torch._foreach_mul_(momentum, beta1)
        torch._foreach_add_(momentum, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        write_back(stored, momentum)
        updates = list(torch._foreach_div(momentum, corrections[0]))
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, divisors)
            if decay:
                torch._foreach_add_(updates, values, alpha=decay)
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(values, updates)
        write_back(parameters, values)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum

    def _running_norms(self, group: dict[str, Any], parameters: list[Tensor], norms: Tensor, beta2: float) -> Tensor:
        """Take the new norms into the running ones: [len(parameters)], fp64."""
        start = torch.zeros_like(norms) if group["init_zero"] else norms
        before = torch.stack(
            [
                self.state[p]["exp_avg_sq"].to(norms) if "exp_avg_sq" in self.state[p] else start[i]
                for i, p in enumerate(parameters)
            ]
        )
        if group["norm_type"] == 2:
            running = (beta2 * before.square() + (1 - beta2) * norms.square()).sqrt()
        else:
            running = beta2 * before + (1 - beta2) * norms
        for parameter, norm in zip(parameters, running.unbind(), strict=True):
            self.state[parameter]["exp_avg_sq"] = norm.to(torch.float32)
        return running
