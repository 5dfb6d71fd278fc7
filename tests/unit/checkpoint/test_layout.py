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
    assert layout.state_file("model", pp=1, tp=2, rdp=3, shard_optimizer_state=False) == "model_1_2.pt"
    assert (
        layout.state_file("optimizer", pp=1, tp=2, rdp=3, shard_optimizer_state=False) == "optimizer_1_2.pt"
    )
    assert (
        layout.state_file("optimizer", pp=1, tp=2, rdp=3, shard_optimizer_state=True) == "optimizer_1_2_3.pt"
    )
    assert (
        layout.state_file("fp16_states", pp=0, tp=0, rdp=1, shard_optimizer_state=True)
        == "fp16_states_0_0_1.pt"
    )
    assert layout.state_file("model", pp=1, tp=2, rdp=3, shard_optimizer_state=True) == "model_1_2.pt"


def test_each_state_file_has_exactly_one_writer() -> None:
    for sharded in (False, True):
        for role in ("model", "optimizer"):
            written = [
                layout.state_file(role, pp=pp, tp=0, rdp=rdp, shard_optimizer_state=sharded)
                for pp in range(2)
                for rdp in range(3)
                if layout.writes_state(role, rdp=rdp, shard_optimizer_state=sharded)
            ]
            assert len(written) == len(set(written)) == (6 if sharded and role == "optimizer" else 2)


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
