"""Optimizers as client scripts write them: a torch optimizer inside, and an interface of their own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class ClientOptimizer:
    """The shape of the half precision optimizers that scripts bring along; it does nothing of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.overflow = False
        self.loss_scaler: Any = None
        self.cleared_with: list[bool] = []

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("must not be pickled")

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        self.cleared_with.append(set_grads_to_None)
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def clip_master_grads(self, max_norm: float) -> str:
        return f"the client's own, {max_norm}"

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer_state_dict": self.optimizer.state_dict(), "overflow": self.overflow}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(content["optimizer_state_dict"])


class ClientFP16Optimizer:
    """Half precision as client scripts bring it along: masters made after the first step, a scaler and index maps of
    their own, read/write properties, no pickling."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: Any, scale: float, agree: Any = None) -> None:
        self.optimizer = optimizer
        self.model = model
        self.scale = scale
        self.agree = agree
        self.overflow = False
        self.first_closure_call_this_step = True
        self.master_params_created = False
        self.fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp16_groups: list[list[torch.Tensor]] = []

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def _get_state(self) -> Any:
        return self.optimizer.state

    def _set_state(self, value: Any) -> None:
        self.optimizer.state = value

    state = property(_get_state, _set_state)

    def _get_param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _set_param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    param_groups = property(_get_param_groups, _set_param_groups)

    def init_master_params(self) -> None:
        """Put fp32 copies into the groups."""
        for group in self.optimizer.param_groups:
            self.fp16_groups.append([])
            self.fp32_from_fp16_groups.append([])
            for i, parameter in enumerate(group["params"]):
                if parameter.dtype not in (torch.float16, torch.bfloat16):
                    raise TypeError(f"Received {parameter.type()}")
                master = torch.nn.Parameter(parameter.detach().clone().float())
                self.fp16_groups[-1].append(parameter)
                self.fp32_from_fp16_groups[-1].append(master)
                group["params"][i] = master
                if parameter in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.master_params_created = True

    def _pairs(self) -> Any:
        for halves, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            yield from zip(halves, masters, strict=True)

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        for parameter in [p for group in [*groups, *self.fp16_groups] for p in group]:
            if parameter.grad is not None:
                parameter.grad = None if set_grads_to_None else torch.zeros_like(parameter)

    def backward(self, loss: Any, update_master_grads: bool = True) -> None:
        self.model.backward(loss.float() * self.scale)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        found = any(not torch.isfinite(h.grad).all() for h, _ in self._pairs() if h.grad is not None)
        self.overflow = found if self.agree is None else self.agree(found)
        if not self.overflow:
            for half, master in self._pairs():
                master.grad = None if half.grad is None else half.grad.float() / self.scale

    def step(self, closure: Any = None) -> None:
        if self.overflow:
            self.scale /= 2
            return
        self.optimizer.step()
        with torch.no_grad():
            for half, master in self._pairs():
                half.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scaler": self.scale,
            "dynamic_loss_scale": True,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.scale = content["loss_scaler"]
        self.overflow = content["overflow"]
        self.optimizer.load_state_dict(content["optimizer_state_dict"])
        with torch.no_grad():
            for masters, saved in zip(self.fp32_from_fp16_groups, content["fp32_from_fp16"], strict=True):
                for master, value in zip(masters, saved, strict=True):
                    master.copy_(value)
