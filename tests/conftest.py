"""Fixtures for all tests. Test modules and helpers are imported by plain name: this folder is on the path."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from hypothesis import HealthCheck, settings  # noqa: E402

from harness import RankPool  # noqa: E402
from s3_server import S3Server  # noqa: E402

# Two cores that other processes use as well: how long an example takes says nothing.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


# A shell starts background jobs with interrupts ignored, and children inherit that; tests interrupt theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    """Two rank processes that stay up for the whole session."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """An object store for the whole session, since processes keep the client that they have made."""
    with S3Server() as running:
        yield running


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    """Four rank processes that stay up for the whole session."""
    with RankPool(4) as pool:
        yield pool
