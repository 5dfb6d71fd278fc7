"""Names on disk and the comparison of layouts."""

from __future__ import annotations

import pytest

from shardwright.checkpoint import layout
from shardwright.checkpoint.layout import Layout
from shardwright.errors import CheckpointError


@pytest.mark.parametrize(
    ("tag", "folder"), [("step_4", "step_4_partial"), ("a_partial", "a_partial"), (7, "7_partial")]
)
def test_a_tag_is_given_with_or_without_the_suffix(tag: str | int, folder: str) -> None:
    assert layout.partial_folder(tag) == folder


@pytest.mark.parametrize(
    "tag", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "newest", "_partial", None, 1.5, True]
)
def test_a_tag_that_is_no_plain_name_is_refused(tag: object) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        layout.partial_folder(tag)  # type: ignore[arg-type]


def test_file_names_follow_the_contract() -> None:
    plain, sharded = Layout(2, 3, 4), Layout(2, 3, 4, shard_optimizer_state=True)
    assert layout.state_file(plain, "model", pp=1, tp=2, rdp=3) == "model_1_2.pt"
    assert layout.state_file(plain, "optimizer", pp=1, tp=2, rdp=3) == "optimizer_1_2.pt"
    assert layout.state_file(sharded, "optimizer", pp=1, tp=2, rdp=3) == "optimizer_1_2_3.pt"
    assert layout.state_file(sharded, "fp16_states", pp=0, tp=0, rdp=1) == "fp16_states_0_0_1.pt"
    assert layout.state_file(sharded, "model", pp=1, tp=2, rdp=3) == "model_1_2.pt"
    everything = Layout(1, 1, 4, sharded_data_parallel_degree=2)
    assert layout.state_file(everything, "model", pp=0, tp=0, rdp=2) == "model_0.pt"
    assert layout.state_file(everything, "optimizer", pp=0, tp=0, rdp=3) == "optimizer_1.pt"
    sliced = Layout(1, 2, 4, sharded_data_parallel_degree=2)
    assert layout.state_file(sliced, "optimizer", pp=0, tp=1, rdp=3) == "optimizer_1_1.pt"
    assert layout.state_file(sliced, "model", pp=0, tp=1, rdp=2) == "model_1.pt"
    assert layout.state_file(sliced, "model", pp=0, tp=1, rdp=3) == "model_1_1.pt"


@pytest.mark.parametrize(
    ("made", "num_files"),
    [
        (Layout(2, 1, 3), {"model": 2, "optimizer": 2}),
        (Layout(2, 1, 3, shard_optimizer_state=True), {"model": 2, "optimizer": 6}),
        (Layout(1, 2, 6, sharded_data_parallel_degree=3), {"model": 6, "optimizer": 6}),
    ],
)
def test_each_state_file_has_exactly_one_writer(made: Layout, num_files: dict[layout.StateRole, int]) -> None:
    for role, expected in num_files.items():
        written = [
            layout.state_file(made, role, pp=pp, tp=tp, rdp=rdp)
            for pp in range(made.pp)
            for tp in range(made.tp)
            for rdp in range(made.rdp)
            if layout.writes_state(made, role, rdp=rdp)
        ]
        assert len(written) == len(set(written)) == expected


def test_equal_layouts_do_not_differ_however_the_placement_is_spelled() -> None:
    assert Layout(2, 1, 2, "cluster").differences(Layout(2, 1, 2, "dpt")) == []
    # tensor degree one: where its letter stands moves no rank
    assert Layout(2, 1, 2, "DPT").differences(Layout(2, 1, 2, "TDP")) == []


def test_differences_name_saved_and_present_values() -> None:
    text = "; ".join(Layout(2, 1, 2).differences(Layout(4, 1, 1)))
    assert "pp saved 2, present 4" in text
    assert "rdp saved 2, present 1" in text
    assert Layout(2, 1, 2, "DPT").differences(Layout(2, 1, 2, "PDT")) == [
        "placement_strategy saved 'DPT', present 'PDT'"
    ]
    assert Layout(2, 1, 1).differences(Layout(2, 1, 1, shard_optimizer_state=True))
    assert Layout(2, 1, 1).differences(Layout(2, 1, 1, precision="bf16"))
