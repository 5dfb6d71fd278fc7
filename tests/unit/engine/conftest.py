"""Engine tests run in a world of one, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwright.torch as smp


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """`smp.init` with two microbatches; shut down afterwards."""
    smp.init({"microbatches": 2, "log_level": "warning"})
    yield
    smp.shutdown()
