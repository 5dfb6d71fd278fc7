"""Tests of adapters run in a world of one, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwright.torch as smp


@pytest.fixture
def world_of_one(request: pytest.FixtureRequest) -> Iterator[None]:
    """`smp.init`; shut down afterwards. Parametrise indirectly with other settings."""
    smp.init({"log_level": "warning", **getattr(request, "param", {})})
    yield
    smp.shutdown()
