"""Optimizer state dicts are joined and cut by name."""

from __future__ import annotations

import pytest
import torch

from shardwright.engine import optimizer_state
from shardwright.errors import UsageError

NAMES = [["a", "c"], ["b"]]
FULL = {
    "state": {0: {"m": torch.tensor(1.0)}, 2: {"m": torch.tensor(3.0)}},
    "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
}


def test_joining_what_was_cut_gives_the_whole() -> None:
    parts = [[["a"], []], [["c"], ["b"]]]
    cut = [optimizer_state.narrowed(FULL, NAMES, names) for names in parts]
    assert cut[0]["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": []}]
    assert cut[1]["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert set(cut[1]["state"]) == {1}
    named = [
        optimizer_state.by_name(c, {n: i for i, n in enumerate(n for g in names for n in g)})
        for c, names in zip(cut, parts, strict=True)
    ]
    assert optimizer_state.joined(named, cut[0]["param_groups"], NAMES) == FULL


def test_other_groups_are_refused_with_their_sizes() -> None:
    with pytest.raises(UsageError, match=r"2 parameter groups of \[2, 1\].*1 of \[3\]"):
        optimizer_state.narrowed(FULL, [["a", "b", "c"]], [["a", "b", "c"]])


def test_filtering_keeps_the_objects_and_the_names_in_step() -> None:
    params = [object(), object(), object()]
    group = {"params": params, "param_names": ["x", "y", "z"]}
    kept = params[::2]
    optimizer_state.filter_group(group, [True, False, True])
    assert group["params"] is params
    assert params == kept
    assert group["param_names"] == ["x", "z"]


def test_names_of_torch_follow_the_whole_groups() -> None:
    groups = [{"params": [0], "param_names": ["a"]}]
    assert optimizer_state.joined([], groups, [["a", "c"]])["param_groups"] == [
        {"params": [0, 1], "param_names": ["a", "c"]}
    ]


def test_a_copy_owns_its_tensors() -> None:
    tensor = torch.zeros(2)
    copy = optimizer_state.owned({"a": [tensor, (1, "x")]})
    copy["a"][0] += 1
    assert tensor.tolist() == [0, 0]
    assert copy["a"][1] == (1, "x")
