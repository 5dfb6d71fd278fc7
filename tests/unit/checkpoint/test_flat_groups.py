"""What is put beside the user's content for helpers of scripts, and taken away again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from shardwright.checkpoint.flat_groups import FlatGroups, FlatParameter, users_own

GROUPS = FlatGroups(
    degree=2,
    shard=0,
    groups=[[FlatParameter("a", (3, 2), True, False)], [FlatParameter("b", (5,), True, False)]],
    buffer_names=["mask"],
    exchange=lambda: None,
    parts=list,
)
SHAPES = [OrderedDict(a=torch.Size([3, 2])), OrderedDict(b=torch.Size([5]))]


@pytest.mark.parametrize("content", [{}, {"step": 3}, OrderedDict(step=3), None, [1, 2], "text"])
def test_helpers_find_their_keys_and_the_user_gets_what_was_saved(content: Any) -> None:
    before = repr(content)
    written = GROUPS.user_content(content)
    assert written["param_shapes"] == SHAPES
    assert written["buffer_names"] == ["mask"]
    assert repr(content) == before
    assert users_own(written) == content
    assert type(users_own(written)) is type(content)


def test_what_a_script_puts_there_itself_stays() -> None:
    own = {"param_shapes": "mine", "buffer_names": ["others"], "step": 3}
    assert GROUPS.user_content(own) is own
    written = GROUPS.user_content({"buffer_names": ["others"]})
    assert written["buffer_names"] == ["others"]
    assert written["param_shapes"] == SHAPES
    assert users_own(written) == {"buffer_names": ["others"]}
