"""The covering array generator, and the parity matrix made with it."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

import parity
from covering import allowed_rows, covering_rows, pairs_of

AXES = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(
    lambda sizes: {f"axis{i}": list(range(size)) for i, size in enumerate(sizes)}
)


@given(AXES)
@settings(max_examples=50, deadline=None)
def test_every_pair_is_covered_without_repeats(axes):
    rows = covering_rows(axes)
    covered = set().union(*map(pairs_of, rows))
    assert covered == {
        (a, x, b, y) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]
    }
    assert len({tuple(row.items()) for row in rows}) == len(rows)


@given(AXES)
@settings(max_examples=20, deadline=None)
def test_far_fewer_rows_than_the_full_product(axes):
    sizes = sorted((len(values) for values in axes.values()), reverse=True)
    rows = covering_rows(axes)
    assert sizes[0] * sizes[1] <= len(rows) <= 3 * sizes[0] * sizes[1]


def test_forbidden_rows_never_appear_and_the_rest_is_still_covered():
    axes = {"a": (1, 2, 3), "b": (1, 2, 3), "c": ("x", "y")}

    def allowed(row):
        return row["a"] != row["b"] or row["c"] == "x"

    rows = covering_rows(axes, allowed=allowed)
    assert all(map(allowed, rows))
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, allowed_rows(axes, allowed)))


def test_expensive_rows_are_taken_only_where_nothing_else_covers():
    axes = {"a": (1, 2), "b": (1, 2), "c": (1, 2, 3)}
    rows = covering_rows(axes, cost=lambda row: 100.0 if row["a"] == row["b"] == 2 else 1.0)
    assert sum(row["a"] == row["b"] == 2 for row in rows) == 1


def test_same_arguments_give_the_same_rows():
    axes = {"a": (1, 2, 3), "b": "xyz", "c": (True, False)}
    assert covering_rows(axes) == covering_rows(axes)


def test_parity_matrix_has_every_value_twice_and_every_possible_pair():
    rows = [vars(case) for case in parity.matrix()]
    counts = Counter((axis, value) for row in rows for axis, value in row.items())
    assert all(counts[axis, value] >= 2 for axis, values in parity.AXES.items() for value in values)
    possible = set().union(*map(pairs_of, allowed_rows(parity.AXES, parity._allowed)))
    assert set().union(*map(pairs_of, rows)) == possible
    assert sum(case.num_ranks == 8 for case in parity.matrix()) <= 3
