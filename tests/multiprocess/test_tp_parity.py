"""Training over any tensor parallel layout equals training in one process: loss, every gradient, weights, norms.

The cases are a covering set (see `covering` and `tp_parity`), and some by hand. `make test` runs a few on two and four
processes; `make test-all` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

import tp_parity
from harness import RankPool
from tp_parity import Case


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


QUICK = [
    Case("mlp"),
    Case("gpt2"),
    Case("llama", optimize="memory", prescaled=True),
    Case("bert", optimize="memory"),
    Case("gpt2", pp=2, prescaled=True),
    Case("gpt2", pp=2, optimize="memory", tied="replicate", options=(("distribute_embedding", True),)),
]
FAMILIES = ["gptj", "gptneo", "gptneox", "mistral", "qwen2", "roberta", "qwen3", "t5", "mixtral", "vit"]
"""The adapters that the covering set leaves out."""

HEAVY = [
    Case("llama", tp=4, optimize="memory"),  # fewer key-value heads than tp ranks
    Case("gpt2", blocks=True, optimize="memory"),
    Case("gpt2", pp=2, blocks=True),
    Case("gpt2", pp=2, blocks=True, prescaled=True, partition="manual", placement="PTD"),
    Case("bert", tp=4, pp=2, optimize="memory", placement="TPD"),
    Case("gpt2_untied", tp=4, options=(("distribute_embedding", True),)),
    *(Case(model, tp=4, optimize=mode) for model, mode in zip(FAMILIES, cycle(("speed", "memory")))),
    *(Case(model, pp=2, optimize=mode) for model, mode in zip(FAMILIES, cycle(("memory", "speed")))),
    *(Case(model, pp=2, optimize=mode, prescaled=True) for model, mode in zip(FAMILIES, cycle(("speed", "memory")))),
    *(Case(model, rdp=2, optimize=mode) for model, mode in zip(FAMILIES, cycle(("speed", "memory")))),
    *(Case(model, rdp=2, optimize=mode, prescaled=True) for model, mode in zip(FAMILIES, cycle(("memory", "speed")))),
]


def _cases() -> list[object]:
    heavy = [*HEAVY, *(case for case in tp_parity.matrix() if case not in QUICK)]
    return [
        *(pytest.param(case, id=case.title) for case in QUICK),
        *(pytest.param(case, id=case.title, marks=pytest.mark.heavy) for case in heavy),
    ]


@pytest.mark.parametrize("case", _cases())
def test_layout_equals_one_process(case: Case, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{case.num_ranks}")
    ranks = pool.run(tp_parity.train, case, config=case.config(), timeout_s=180)
    tp_parity.check(case, ranks, tp_parity.expected(case))
