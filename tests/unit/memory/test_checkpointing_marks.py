"""What marks for activation checkpointing mean, given the stages of modules."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwright.errors import UsageError
from shardwright.memory.checkpointing_marks import carry_mark, mark_of, set_mark, targets, without_wrappers
from shardwright.partition import manual


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "seq": nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(5)]),
            "list": nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.Sequential(nn.ReLU())]),
        }
    )


STAGES = {"seq.0": 0, "seq.1": 0, "seq.2": 1, "seq.3": 1, "seq.4": 1, "list": 1}


def meaning(marked: nn.Module, stages: dict[str, int] = STAGES) -> tuple[list[Any], list[Any]]:
    names = [name for name, _ in marked.named_modules()]

    def stages_of(name: str) -> set[int]:
        below = [n for n in names if n == name or n.startswith(f"{name}." if name else "")]
        return {next(stage for start, stage in stages.items() if n == start or n.startswith(f"{start}.")) for n in below
                if any(n == start or n.startswith(f"{start}.") for start in stages)}  # fmt: skip

    found, straddling = targets(marked, stages_of)
    return [(t.name, *t.keys) for t in found], [(s.name, s.stages) for s in straddling]


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        ("each", [("seq.0",), ("seq.1",), ("seq.2",), ("seq.3",), ("seq.4",)]),
        ("contiguous", [("seq", "0", "1"), ("seq", "2", "3", "4")]),
        ("group_3", [("seq", "0", "1"), ("seq", "2", "3", "4")]),
        ("group_2", [("seq", "0", "1"), ("seq", "2", "3"), ("seq", "4")]),
        ("group_1", [("seq", str(n)) for n in range(5)]),
        ("group_10", [("seq", "0", "1"), ("seq", "2", "3", "4")]),
    ],
)
def test_strategies_never_cross_stages(strategy: str, groups: list[Any]) -> None:
    made = model()
    set_mark(made["seq"], strategy=strategy)
    assert meaning(made) == (groups, [])


def test_layer_on_two_stages_breaks_the_group() -> None:
    made = model()
    set_mark(made["seq"], strategy="contiguous")
    stages = {**STAGES, "seq.1.0": 1}
    assert meaning(made, {"seq.1.0": 1, **stages}) == ([("seq", "0"), ("seq", "2", "3", "4")], [("seq.1", (0, 1))])


def test_lists_stand_for_their_layers() -> None:
    made = model()
    set_mark(made["list"])
    assert meaning(made) == ([("list.0",), ("list.1.0",), ("list.2",)], [])


def test_outermost_mark_counts() -> None:
    made = model()
    set_mark(made["seq"][0])
    set_mark(made["seq"][0][0])
    assert meaning(made)[0] == [("seq.0.0",), ("seq.0.1",)]  # a marked Sequential is its layers
    set_mark(made["seq"], strategy="group_2")
    assert meaning(made)[0] == [("seq", "0", "1"), ("seq", "2", "3"), ("seq", "4")]


def test_marks_inside_a_module_on_two_stages_count() -> None:
    outer = nn.Bilinear(2, 2, 2)
    outer.seq = model()["seq"]
    set_mark(outer)
    set_mark(outer.seq[3][0])
    root = nn.ModuleDict({"outer": outer})
    stages = {f"outer.{name}": stage for name, stage in STAGES.items()}
    assert meaning(root, stages) == ([("outer.seq.3.0",)], [("outer", (0, 1))])


def test_refusals() -> None:
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not function"):
        set_mark(lambda x: x)  # type: ignore[arg-type]
    for strategy in ("group_0", "group_", "group_2x", "all", 3):
        with pytest.raises(UsageError, match="'each', 'contiguous' or 'group_N'"):
            set_mark(nn.Sequential(), strategy=strategy)  # type: ignore[arg-type]
    for options in ({"strategy": "contiguous"}, {"pack_args_as_tuple": True}):
        with pytest.raises(UsageError, match=r"for nn\.Sequential, and this is a Linear"):
            set_mark(nn.Linear(2, 2), **options)

    class Own(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return x

    set_mark(Own())
    with pytest.raises(UsageError, match="Own has a forward of its own"):
        set_mark(Own(), strategy="group_2")


def test_marks_go_over_to_successors() -> None:
    old, new = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    set_mark(old, preserve_rng_state=False, strategy="contiguous")
    assert carry_mark(old, new) == []
    mark = mark_of(new)
    assert mark is not None
    assert (mark.preserve_rng_state, mark.strategy) == (False, "each")
    parent = nn.ModuleList([old])
    assert carry_mark(parent, nn.Linear(2, 2)) == ["0"]


def test_wrappers_of_torch_become_marks() -> None:
    """FF-33: their prefix is in no name; what was asked of a wrapper holds for the module in it."""
    plain = model()
    names, weights = list(plain.state_dict()), list(plain.parameters())
    seq = plain.get_submodule("seq")
    manual.set_partition(seq.get_submodule("1"), 0)
    for name in ("1", "3"):
        seq._modules[name] = checkpoint_wrapper(seq.get_submodule(name), preserve_rng_state=name == "1")
    manual.set_partition(seq.get_submodule("1"), 1)
    plain._modules["list"] = checkpoint_wrapper(plain.get_submodule("list"))
    made = without_wrappers(checkpoint_wrapper(plain))
    assert made is plain
    assert list(made.state_dict()) == names == [name for name, _ in made.named_parameters()]
    assert all(one is other for one, other in zip(made.parameters(), weights, strict=True))
    marked = {name: mark.preserve_rng_state for name, m in made.named_modules() if (mark := mark_of(m)) is not None}
    assert marked == {"": True, "seq.1": True, "seq.3": False, "list": True}
    assert manual.assigned_stage(made.get_submodule("seq.1")) == 1
