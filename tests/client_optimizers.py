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
