"""Training over any layout equals training in one process: loss, every gradient, weights, buffers.

The cases are a covering set (see `covering` and `parity`). `make test` runs one of each model, on two
processes; `make test-all` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import parity
from harness import RankPool


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


def _marked() -> list[object]:
    """All cases; all but the first two-process case of each model are heavy."""
    seen: set[str] = set()
    params = []
    for case in parity.matrix():
        quick = case.num_ranks == 2 and case.model not in seen
        if quick:
            seen.add(case.model)
        params.append(pytest.param(case, id=case.title, marks=() if quick else pytest.mark.heavy))
    return params


@pytest.mark.parametrize("case", _marked())
def test_layout_equals_one_process(case: parity.Case, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{case.num_ranks}")
    ranks = pool.run(parity.train, case, config=case.config(), timeout_s=120)
    parity.check(case, ranks, parity.expected(case))
