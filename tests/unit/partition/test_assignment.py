"""The assignment keeps the contract's rules for any tree, and makes good pipelines of the usual ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_models import LM, TRANSFORMERS, Case, ResNet, gpt2, ids, lm, resnet
from torch import Tensor, nn

from shardwright.errors import PartitionError
from shardwright.partition.assign import assign, stage_shares
from shardwright.partition.cost import price
from shardwright.partition.descend import descend
from shardwright.partition.linear import SLACK, cut
from shardwright.partition.outline import outline
from shardwright.partition.records import ModuleRecord, Trace
from shardwright.partition.trace import trace
from shardwright.partition.tree import ModuleNode, ModuleTree, ParameterInfo, build_tree
from shardwright.pipeline.schedule import chain
from shardwright.pipeline.timetable import make_timetable


def traced(case: Case) -> ModuleTree:
    model, inputs = case
    return build_tree(model).with_trace(trace(model, (), inputs))


def on_stage(stage_of: dict[str, int], prefix: str) -> set[int]:
    return {stage for name, stage in stage_of.items() if name == prefix or name.startswith(f"{prefix}.")}


@st.composite
def trees(draw: st.DrawFn) -> ModuleTree:
    """Any module tree: any shape, parameters anywhere, ties, modules that never run, traced or not."""
    count = draw(st.integers(1, 24))
    parents = [draw(st.integers(0, index - 1)) for index in range(1, count)]
    names = [""]
    children: dict[str, list[str]] = {"": []}
    for index, parent in enumerate(parents, start=1):
        name = f"{names[parent]}.{index}".lstrip(".")
        names.append(name)
        children[name] = []
        children[names[parent]].append(name)
    ordered: list[str] = []
    stack = [""]
    while stack:
        ordered.append(stack.pop())
        stack += reversed(children[ordered[-1]])
    holders = [
        tuple(sorted(draw(st.sets(st.sampled_from(ordered), min_size=1, max_size=2)), key=ordered.index))
        for _ in range(draw(st.integers(0, 16)))
    ]
    parameters = tuple(
        ParameterInfo(f"p{i}", size, 4 * size, draw(st.booleans()), held)
        for i, held in enumerate(holders)
        for size in [draw(st.integers(0, 1000))]
    )
    nodes = {
        name: ModuleNode(
            name=name,
            kind="Any",
            parent=name.rpartition(".")[0] if name else None,
            children=tuple(children[name]),
            parameters=tuple(i for i, held in enumerate(holders) if name in held),
            buffer_bytes=draw(st.integers(0, 100)),
            container=draw(st.booleans()),
            lookup=False,
            indivisible=bool(name) and draw(st.integers(0, 5)) == 0,
        )
        for name in ordered
    }
    tree = ModuleTree(nodes, parameters)
    if not draw(st.booleans()):
        return tree
    ran = [name for name in tree.bearing() | {""} if not name or draw(st.booleans())]
    order = draw(st.permutations(sorted(ran)))
    records = {
        name: ModuleRecord(
            first_call=0 if not name else 1 + order.index(name),
            num_calls=1,
            work=draw(st.integers(0, 1000)),
            trailing_work=draw(st.integers(0, 100)),
            saved_bytes=draw(st.integers(0, 1000)),
            entry_bytes=draw(st.integers(0, 10)),
        )
        for name in ran
    }
    return tree.with_trace(Trace("fake", records))


def ancestors(tree: ModuleTree, name: str) -> list[str]:
    """All modules above one, without the root."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


@given(trees(), st.integers(1, 6), st.floats(0, 1), st.booleans())
def test_rules_hold_for_any_tree(tree: ModuleTree, pp: int, weight: float, join: bool) -> None:
    stage_of = assign(tree, pp, weight, join_ties=join)
    assert stage_of == assign(tree, pp, weight, join_ties=join)
    assert list(stage_of) == list(tree.nodes)
    assert set(stage_of.values()) <= set(range(pp))
    assert stage_of[""] == 0
    if join:
        for group in tree.ties():
            assert len({stage_of[name] for name in group}) == 1
    for name, node in tree.nodes.items():
        if any(tree.nodes[above].indivisible for above in ancestors(tree, name)):
            assert stage_of[name] == stage_of[node.parent or ""]
    bearing = tree.bearing()
    for name, node in tree.nodes.items():
        if name and name not in bearing:
            assert stage_of[name] == stage_of[node.parent or ""]
    used = set(stage_of.values())
    assert used == set(range(len(used)))
    holders = outline(tree, price(tree, weight), join_ties=join).holders
    assert len({stage_of[name] for name in holders}) >= min(pp, len(holders))


@given(trees(), st.floats(0, 1), st.integers(1, 4), st.booleans())
def test_costs_of_all_modules_add_up_to_one(
    tree: ModuleTree, weight: float, in_flight: int, copies: bool
) -> None:
    total = sum(price(tree, weight, in_flight=in_flight, count_copies=copies).own.values())
    allowed = [0.0, weight, 1 - weight, 1.0]  # a part that is zero everywhere counts for nothing
    assert any(total == pytest.approx(value) for value in allowed)


@given(trees(), st.integers(1, 6))
def test_handing_down_never_gives_more_than_there_is(tree: ModuleTree, pp: int) -> None:
    out = outline(tree, price(tree, 0.5), join_ties=True)
    stage_of = descend(out, pp)
    assert stage_of[""] == 0
    assert set(stage_of) == set(out.order)
    for name in out.order:
        assert all(stage_of[child] >= stage_of[name] for child in out.children[name])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_cut_has_the_least_bottleneck(costs: list[int], segments: int) -> None:
    starts = cut([float(cost) for cost in costs], [0.0] * len(costs), segments)
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert len(starts) == min(segments, len(costs))

    def worst(places: list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in zip(places, [*places[1:], len(costs)], strict=True))

    best = min(worst([0, *p]) for p in itertools.combinations(range(1, len(costs)), len(starts) - 1))
    assert worst(starts) <= best * (1 + SLACK) + 1e-9


def test_cut_avoids_dear_places_unless_they_pay() -> None:
    costs = [1.0] * 6
    assert cut(costs, [0, 0, 0, 0, 0, 0], 2) == [0, 3]
    assert cut(costs, [0, 0, 0, 2, 0, 0], 2) in ([0, 2], [0, 4])
    assert cut(costs, [0, 0, 0, 0.1, 0, 0], 2) == [0, 3]


def test_cut_by_shares() -> None:
    assert cut([1.0] * 12, [0.0] * 12, 3) == [0, 4, 8]
    assert cut([1.0] * 12, [0.0] * 12, 3, shares=[1.5, 1.0, 0.5]) == [0, 6, 10]


@pytest.mark.parametrize(("num_stages", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 64)])
def test_shares_make_a_step_shorter_than_equal_stages_do(num_stages: int, microbatches: int) -> None:
    shares = stage_shares(num_stages, microbatches)
    assert sum(shares) == pytest.approx(num_stages)

    def makespan(costs: list[float]) -> float:
        program = chain(costs, [2 * cost for cost in costs])
        return make_timetable("interleaved", program, microbatches, num_stages + 2, num_stages).makespan

    assert makespan(shares) < makespan([1.0] * num_stages) * (0.98 if num_stages < 8 else 1.03)


def test_one_microbatch_is_no_pipeline() -> None:
    assert stage_shares(3, 1) == [1.0, 1.0, 1.0]


def test_cut_of_many_items_is_thinned_out_but_good() -> None:
    costs = [float(1 + index % 7) for index in range(5000)]
    starts = cut(costs, [0.0] * 5000, 8)
    sums = [sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], 5000], strict=True)]
    assert max(sums) < 1.01 * sum(costs) / 8
    heavy = [1e-9] * 4999 + [1.0]
    assert len(cut(heavy, [0.0] * 5000, 300)) == 300


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("make", [*TRANSFORMERS.values(), resnet], ids=[*TRANSFORMERS, "resnet"])
@pytest.mark.parametrize("weight", [0.2, 0.8])
def test_transformers_models_make_pipelines(make: Callable[[], Case], pp: int, weight: float) -> None:
    tree = traced(make())
    stage_of = assign(tree, pp, weight, in_flight=pp)
    own = price(tree, weight, in_flight=pp).own
    stages = [sum(own[name] for name in stage_of if stage_of[name] == stage) for stage in range(pp)]
    assert min(stages) > 0.05
    assert max(stages) < 1.5 / pp
    tied = {name for group in tree.ties() for name in group[1:]}
    records = tree.trace.records
    holders = [
        name for name, node in tree.nodes.items() if node.parameters and name in records and name not in tied
    ]
    visits = [stage_of[name] for name in sorted(holders, key=lambda name: records[name].first_call)]
    order = [stage for stage, _ in itertools.groupby(visits)]
    assert order == sorted(order), "a microbatch goes through the stages once, in order"
    covered = [index for stage in range(pp) for index in _parameters_on(tree, stage_of, stage)]
    assert sorted(covered) == list(range(len(tree.parameters)))


def _parameters_on(tree: ModuleTree, stage_of: dict[str, int], stage: int) -> set[int]:
    return {
        index for name, node in tree.nodes.items() if stage_of[name] == stage for index in node.parameters
    }


def test_even_blocks_are_cut_between_blocks() -> None:
    stage_of = assign(traced(gpt2(n_layer=8)), 2, 0.8)
    for block in range(8):
        assert len(on_stage(stage_of, f"transformer.h.{block}")) == 1


def test_tied_head_counts_on_the_stage_of_its_embedding() -> None:
    tied = assign(traced(lm(8, vocab=512, tied=True)), 2, 0.2)
    assert tied["head"] == tied["embed"] == 0
    untied = assign(traced(lm(8, vocab=512)), 2, 0.2)
    assert untied["head"] == 1
    count = [sum(stage_of[f"layers.{i}"] == 0 for i in range(8)) for stage_of in (tied, untied)]
    assert count[0] < 4 < count[1]


def test_ties_may_be_cut_if_copies_are_kept() -> None:
    stage_of = assign(traced(lm(8, vocab=512, tied=True)), 2, 0.2, join_ties=False)
    assert (stage_of["embed"], stage_of["head"]) == (0, 1)


def test_costly_head_moves_the_cut_and_a_block_is_torn_only_if_that_pays() -> None:
    """The shape of the benchmark: 8 blocks, and a head with loss that costs about 1.35 of them."""
    tree = traced((LM(8, width=128, vocab=2048), {"tokens": ids(2048).repeat(4, 4)}))
    own = price(tree, 0.0).own

    def cost(prefix: str) -> float:
        return sum(value for name, value in own.items() if name == prefix or name.startswith(f"{prefix}."))

    assert 1.2 < cost("head") / cost("layers.3") < 2.0
    stage_of = assign(tree, 2, 0.0)
    first = sum(value for name, value in own.items() if stage_of[name] == 0)
    assert max(first, 1 - first) < 0.54


def test_memory_and_time_pull_apart() -> None:
    class Lopsided(nn.Module):
        """First a wide lookup (memory), then convolutions (time)."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20000, 16)
            self.convs = nn.Sequential(*[nn.Conv1d(16, 16, 3, padding=1) for _ in range(8)])

        def forward(self, tokens: Tensor) -> Tensor:
            return self.convs(self.table(tokens).transpose(1, 2))

    tree = traced((Lopsided(), {"tokens": torch.zeros(8, 512, dtype=torch.long)}))
    by_memory, by_time = assign(tree, 2, 1.0), assign(tree, 2, 0.0)
    assert sum(by_memory[f"convs.{i}"] == 0 for i in range(8)) < sum(
        by_time[f"convs.{i}"] == 0 for i in range(8)
    )


@pytest.mark.parametrize(("layers", "pp"), [(7, 3), (5, 4), (2, 4)])
def test_ff06_layers_that_do_not_divide(layers: int, pp: int) -> None:
    model, inputs = lm(layers)
    tree = traced((model, inputs))
    stage_of = assign(tree, pp, 0.8)
    assert set(stage_of.values()) == set(range(pp))
    covered = [index for stage in range(pp) for index in _parameters_on(tree, stage_of, stage)]
    assert sorted(covered) == list(range(len(tree.parameters)))
    assert sum(tree.parameters[i].numel for i in covered) == sum(p.numel() for p in model.parameters())


def test_fewer_modules_than_stages_leaves_the_last_empty() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    stage_of = assign(traced((model, {"input": torch.ones(1, 4)})), 4, 0.5)
    assert stage_of == {"": 0, "0": 0, "1": 0, "2": 1}
    assert set(assign(build_tree(nn.Linear(2, 2)), 4, 0.5).values()) == {0}
    assert set(assign(build_tree(nn.ReLU()), 4, 0.5).values()) == {0}


def test_ff09_block_used_at_two_depths_has_one_home() -> None:
    class Reuse(LM):
        def __init__(self) -> None:
            super().__init__(6)
            self.layers[5] = self.layers[2]

    tree = traced((Reuse(), {"tokens": ids(32)}))
    assert "layers.5" not in tree.nodes
    stage_of = assign(tree, 2, 0.8)
    assert len(on_stage(stage_of, "layers.2")) == 1


def test_module_that_borrows_a_parameter_goes_with_its_holder() -> None:
    class Head(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return x @ weight.t() + self.bias

    class Borrower(LM):
        def __init__(self) -> None:
            super().__init__(4)
            self.head = Head(16, 32)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x), self.embed.weight)

    stage_of = assign(traced((Borrower(), {"tokens": ids(32)})), 2, 0.2)
    assert stage_of["head"] == stage_of["embed"]
    assert set(stage_of.values()) == {0, 1}


def test_bigger_activations_early_do_not_cross() -> None:
    stage_of = assign(traced((ResNet(num_blocks=6), {"x": torch.zeros(2, 3, 16, 16)})), 2, 0.2)
    assert all(len(on_stage(stage_of, f"blocks.{i}")) == 1 for i in range(6))
    assert stage_of["pool"] == stage_of[""]  # no parameters: follows its parent


def test_untraced_model_is_cut_by_parameters_in_module_order() -> None:
    model = LM(8)
    stage_of = assign(build_tree(model), 2, 0.8)
    first = [stage_of[f"layers.{i}"] for i in range(8)]
    assert first == sorted(first)
    assert 2 <= first.index(1) <= 6


@pytest.mark.parametrize("traced_too", [False, True])
def test_ten_thousand_modules_are_assigned_at_once(traced_too: bool) -> None:
    model = nn.Sequential(*[nn.Sequential(*[nn.LayerNorm(2) for _ in range(9)]) for _ in range(1000)])
    tree = build_tree(model)
    assert len(tree.nodes) == 10_001
    if traced_too:
        tree = tree.with_trace(
            Trace("fake", {n: ModuleRecord(i, 1, work=1.0, entry_bytes=1) for i, n in enumerate(tree.nodes)})
        )
    begin = time.process_time()
    stage_of = assign(tree, 16, 0.8)
    assert time.process_time() - begin < 20  # well under a second
    assert set(stage_of.values()) == set(range(16))
    flat = build_tree(
        nn.Sequential(*[nn.ReLU() for _ in range(5000)], *[nn.LayerNorm(2) for _ in range(4999)])
    )
    begin = time.process_time()
    assign(flat, 8, 0.8)
    assert time.process_time() - begin < 20  # well under a second


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(PartitionError, match="num_stages is 0"):
        assign(build_tree(nn.ReLU()), 0, 0.5)
    with pytest.raises(PartitionError, match=r"memory_weight is 1\.5"):
        assign(build_tree(nn.ReLU()), 2, 1.5)
