"""The loss scale over forced overflows, against the rule written down a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UsageError
from shardwright.precision.loss_scaler import DynamicLossScaler, LossScaler, make_scaler


@dataclass
class Rule:
    """api.md section 5, sentence by sentence, over the whole history at each step."""

    init_scale: float
    scale_factor: float
    scale_window: int
    min_scale: float
    delayed_shift: int
    consecutive_hysteresis: bool

    def scales(self, overflows: list[bool]) -> list[float]:
        scale, tolerance, last, found = self.init_scale, self.delayed_shift, -1, []
        for now, overflow in enumerate(overflows):
            if overflow and (tolerance == 1 or self.delayed_shift == 1):
                scale = max(self.min_scale, scale / self.scale_factor)
            elif overflow:
                tolerance -= 1
            elif (now - last) % self.scale_window == 0:
                tolerance, scale = self.delayed_shift, scale * self.scale_factor
            elif self.consecutive_hysteresis:
                tolerance = self.delayed_shift
            last = now if overflow else last
            found.append(scale)
        return found


ARGUMENTS = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 2.0**16, 2.0**32, 3.0]),
        "scale_factor": st.sampled_from([2.0, 1.5, 4.0]),
        "scale_window": st.integers(1, 7),
        "min_scale": st.sampled_from([1.0, 0.25, 128.0]),
        "delayed_shift": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
    }
)


@settings(max_examples=300, deadline=None)
@given(arguments=ARGUMENTS, overflows=st.lists(st.booleans(), max_size=60), resumed_at=st.integers(0, 60))
def test_scale_follows_the_rule(arguments: dict[str, Any], overflows: list[bool], resumed_at: int) -> None:
    rule = Rule(**arguments)
    scaler = make_scaler(None, True, arguments)
    found = []
    for step, overflow in enumerate(overflows):
        if step == resumed_at:
            saved = scaler.state_dict()
            scaler = make_scaler(None, True, arguments)
            scaler.load_state_dict(saved)
        scaler.update_scale(overflow)
        found.append(scaler.loss_scale)
    assert found == rule.scales(overflows)


def test_a_known_sequence() -> None:
    scaler = DynamicLossScaler(init_scale=2.0**4, scale_window=3, delayed_shift=2)
    scales = []
    for overflow in (1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1):
        scaler.update_scale(bool(overflow))
        scales.append(scaler.cur_scale)
    # Tolerated, shrinks, two clean, grows (tolerance refilled), tolerated, one clean, shrinks from here on.
    assert scales == [16, 8, 8, 8, 16, 16, 16, 8, 4, 2, 1, 1, 1]


def test_defaults_are_those_of_the_contract() -> None:
    assert vars(make_scaler(1.0, True, {})) == {
        "cur_scale": 2.0**32,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1.0,
        "delayed_shift": 1,
        "consecutive_hysteresis": False,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "cur_hysteresis": 1,
    }
    assert vars(make_scaler(None, False, {})) == {"cur_scale": 1.0}


def test_a_static_scale_stays() -> None:
    scaler = make_scaler(128.0, False, {"scale_window": 1})
    for overflow in (False, True):
        scaler.update_scale(overflow)
    assert scaler.loss_scale == 128.0
    scaler.loss_scale = 64
    assert scaler.cur_scale == 64.0
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.loss_scale == 64.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"window": 3}, "'window'"),
        ({"scale_window": 0}, "scale_window is 0"),
        ({"delayed_shift": 0}, "delayed_shift is 0"),
        ({"scale_factor": 1}, "scale_factor is 1"),
        ({"init_scale": 0}, "loss scale is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_scaler(None, True, arguments)
