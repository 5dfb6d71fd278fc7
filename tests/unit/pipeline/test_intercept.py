"""What a step intercepts is put back as it was found."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwright.pipeline.intercept import installed


def test_wraps_of_others_hold_during_and_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Module.__init__
    seen: list[type] = []

    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        seen.append(type(self))
        plain(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__init__", wrapped)
    with installed():
        nn.Linear(1, 1)
    assert nn.Module.__init__ is wrapped
    nn.ReLU()
    assert seen == [nn.Linear, nn.ReLU]
