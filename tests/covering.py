"""Covering arrays: few rows of settings in which every pair of values occurs somewhere.

Faults of a system with many settings almost always need one or two particular values, not all of them.
Rows that cover every pair therefore find what the full product would find, at a small part of its price.
Method: greedy choice of the row that covers most new pairs for its cost (Cohen et al. 1997, "The AETG
system"), with lazily updated scores, which is exact because a row's score only ever falls.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

Row = dict[str, Hashable]
Pair = tuple[str, Hashable, str, Hashable]


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    """Every pair of settings in a row, with axes in the row's order."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def allowed_rows(axes: Mapping[str, Sequence[Hashable]], allowed: Callable[[Row], bool]) -> list[Row]:
    """The full product of the axes without the rows that can't exist."""
    product = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [row for row in product if allowed(row)]


def covering_rows(
    axes: Mapping[str, Sequence[Hashable]],
    *,
    allowed: Callable[[Row], bool] = lambda row: True,
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[Row]:
    """Choose rows until every pair that some allowed row has is covered.

    axes: name to values.   allowed: says whether a row can exist.   cost: positive; dear rows are avoided.
    Returns: rows in the order of choice, so that the first ones cover most. Equal arguments, equal rows.
    """
    rows = allowed_rows(axes, allowed)
    # Mixed once, so that ties don't always fall to the first value of an axis.
    random.Random(0).shuffle(rows)
    pairs = [pairs_of(row) for row in rows]
    missing = set().union(*pairs)
    # Negative score first, then position: ties go to the earliest row.
    heap = [(-len(pairs[index]) / cost(row), index) for index, row in enumerate(rows)]
    heapq.heapify(heap)
    chosen: list[Row] = []
    while missing:
        _, index = heapq.heappop(heap)
        score = -len(pairs[index] & missing) / cost(rows[index])
        if heap and (score, index) > heap[0]:
            heapq.heappush(heap, (score, index))
            continue
        chosen.append(rows[index])
        missing -= pairs[index]
    return chosen
