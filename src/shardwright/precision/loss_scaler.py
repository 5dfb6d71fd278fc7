"""What the loss is multiplied with before backward, so that small gradients don't vanish in fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.errors import UsageError


class LossScaler:
    """A scale that stays as it is.

    Per optimizer step: the scale is read any number of times, then `update_scale` comes once.
    All ranks see the same overflows, so their scales stay equal without communication.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise UsageError(f"the loss scale is {scale}, expected a positive number")
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The present scale."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.cur_scale = float(scale)

    def update_scale(self, overflow: bool) -> None:
        """Take note of one optimizer step, and whether its gradients were not finite."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return dict(vars(self))

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Go on where another scaler was: its scale and counters. Settings stay those of this one's making."""
        for name in self._counters():
            if name in content:
                setattr(self, name, content[name])

    def _counters(self) -> tuple[str, ...]:
        return ("cur_scale",)


class DynamicLossScaler(LossScaler):
    """A scale that shrinks after an overflow and grows after a while without one.

    init_scale: to begin with.   scale_factor: what it shrinks and grows by.
    scale_window: it grows when a clean step comes this many steps (or a multiple) after the last overflow.
    min_scale: it doesn't shrink below.
    delayed_shift: so many overflows it takes to shrink (hysteresis).
    consecutive_hysteresis: every clean step forgives the overflows before; False: only growing does.
    Source: the update rule of Megatron-LM's and Apex's dynamic loss scalers; Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(init_scale)
        if not scale_factor > 1:
            raise UsageError(f"scale_factor is {scale_factor}, expected more than 1")
        for name, value in (("scale_window", scale_window), ("delayed_shift", delayed_shift)):
            if value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        self.scale_factor = float(scale_factor)
        self.scale_window = int(scale_window)
        self.min_scale = float(min_scale)
        self.delayed_shift = int(delayed_shift)
        self.consecutive_hysteresis = bool(consecutive_hysteresis)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = self.delayed_shift

    def update_scale(self, overflow: bool) -> None:
        """One step of the rule."""
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _counters(self) -> tuple[str, ...]:
        return ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


_ARGUMENTS = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


def make_scaler(static_scale: float | None, dynamic: bool, arguments: Mapping[str, Any]) -> LossScaler:
    """The scaler that the arguments of `smp.DistributedOptimizer` ask for.

    Raises: UsageError naming an argument that a dynamic scaler doesn't have.
    """
    if not dynamic:
        return LossScaler(1.0 if static_scale is None else static_scale)
    unknown = [name for name in arguments if name not in _ARGUMENTS]
    if unknown:
        raise UsageError(
            f"dynamic_loss_args has {unknown[0]!r}, which the dynamic loss scaler doesn't know",
            remedy=f"its arguments are {', '.join(_ARGUMENTS)}",
        )
    return DynamicLossScaler(**arguments)
