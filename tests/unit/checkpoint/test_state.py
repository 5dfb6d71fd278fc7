"""State dicts to manifest entries, and optimizer state matched by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.checkpoint import state
from shardwright.checkpoint.manifest import OBJECT
from shardwright.checkpoint.state import TensorRow
from shardwright.errors import CheckpointError


def row(name: str, *shape: int) -> TensorRow:
    return TensorRow(name, shape, "float32", (0,) * len(shape), shape)


def test_model_entries_say_which_slice_lies_where() -> None:
    table = [TensorRow("w", (4, 3), "float32", (2, 0), (2, 3))]
    content = {"w": torch.zeros(2, 3), "m._extra_state": {"a": 1}, state.PARTIAL_MARK: True}
    entries = state.model_entries("model_0_1.pt", content, table)
    assert [(entry.name, entry.shape, entry.dtype) for entry in entries] == [
        ("w", (4, 3), "float32"),
        ("m._extra_state", (), OBJECT),
    ]
    assert (entries[0].slices[0].key, entries[0].slices[0].offset) == (("w",), (2, 0))


def test_a_tensor_that_the_table_gets_wrong_is_named() -> None:
    with pytest.raises(CheckpointError, match="'w'"):
        state.model_entries("f", {"w": torch.zeros(2)}, [])
    with pytest.raises(CheckpointError, match=r"'w' is \[2\], its tensor table says \[3\]"):
        state.model_entries("f", {"w": torch.zeros(2)}, [row("w", 3)])


def test_optimizer_entries_slice_like_the_parameter_or_stand_alone() -> None:
    table = [TensorRow("w", (4, 3), "float32", (2, 0), (2, 3))]
    values = {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3), "plain": 5, "prev": [torch.zeros(7)]}
    }
    found = {e.state: e for e in state.optimizer_entries("optimizer", "o.pt", values, ["w"], table)}
    assert found["exp_avg"].shape == (4, 3)
    assert found["exp_avg"].slices[0].offset == (2, 0)
    assert found["exp_avg"].slices[0].key == ("state", 0, "exp_avg")
    assert found["step"].shape == ()
    assert found["plain"].dtype == OBJECT
    assert found["prev/0"].slices[0].key == ("state", 0, "prev", 0)


def test_optimizer_entries_of_pieces_say_which_elements_they_are() -> None:
    table = [TensorRow("w", (4, 3), "float32", (2, 0), (2, 3)), TensorRow("e", (5,), "float32", (0,), (5,))]
    values = {
        0: {"step": torch.tensor([3.0, 4.0]), "exp_avg": torch.zeros(2)},
        1: {"exp_avg": torch.zeros(0), "step": torch.tensor(3.0)},
    }
    spans = {"w": [4, 6, 6], "e": [5, 5, 5]}
    found = {(e.name, e.state): e for e in state.optimizer_entries("optimizer", "o.pt", values, ["w", "e"], table, spans)}
    assert found["w", "exp_avg"].shape == (4, 3)
    assert found["w", "exp_avg"].slices[0].span == (4, 6)
    assert found["w", "exp_avg"].slices[0].shape == (2, 3)
    assert found["w", "step"].slices[0].span is None
    assert ("e", "exp_avg") not in found


def two_groups(names: list[list[str]], *, without_state: str | None = None) -> dict[str, Any]:
    flat = [name for group in names for name in group]
    starts = [0, len(names[0])]
    return {
        "state": {i: {"m": torch.tensor(float(ord(n)))} for i, n in enumerate(flat) if n != without_state},
        "param_groups": [
            {"lr": 0.1 * (g + 1), "params": list(range(start, start + len(group)))}
            for g, (start, group) in enumerate(zip(starts, names, strict=True))
        ],
        state.PARAM_NAMES: flat,
    }


def test_moments_follow_their_parameter_when_the_order_changed() -> None:
    saved = two_groups([["a", "c"], ["b", "d"]])
    attached = state.attach_by_name(saved, [["c", "a"], ["d", "b"]], strict=True)
    assert {i: chr(int(v["m"])) for i, v in attached["state"].items()} == {0: "c", 1: "a", 2: "d", 3: "b"}
    assert [group["params"] for group in attached["param_groups"]] == [[0, 1], [2, 3]]
    assert [group["lr"] for group in attached["param_groups"]] == [0.1, 0.2]


def test_a_parameter_without_state_stays_without() -> None:
    attached = state.attach_by_name(
        two_groups([["a"], ["b"]], without_state="a"), [["a"], ["b"]], strict=True
    )
    assert list(attached["state"]) == [1]


def test_changed_groups_are_refused_by_name() -> None:
    saved = two_groups([["a", "c"], ["b"]])
    with pytest.raises(CheckpointError, match="2 parameter groups, now 1"):
        state.attach_by_name(saved, [["a", "b", "c"]], strict=True)
    with pytest.raises(CheckpointError, match="group 0 has changed: only saved: c; only present: z"):
        state.attach_by_name(saved, [["a", "z"], ["b"]], strict=True)
    assert list(state.attach_by_name(saved, [["a", "z"], ["b"]], strict=False)["state"]) == [0, 2]


def test_empty_groups_work() -> None:
    saved: dict[str, Any] = {"state": {}, "param_groups": [{"lr": 1.0, "params": []}], state.PARAM_NAMES: []}
    assert state.attach_by_name(saved, [[]], strict=True)["param_groups"] == [{"lr": 1.0, "params": []}]


def test_a_tensor_without_value_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no value"):
        state.detached({"w": torch.empty(2, device="meta")})
