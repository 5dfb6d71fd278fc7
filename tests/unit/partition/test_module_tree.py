"""The module tree: bytes, ties, modules with several parents."""

from __future__ import annotations

import json

import torch
from partition_models import LM, Block
from torch import nn

from shardwright.partition.tree import build_tree, from_record, to_record


def test_every_module_and_every_parameter_is_there_once() -> None:
    model = LM(2, tied=True)
    tree = build_tree(model)
    assert list(tree.nodes) == [name for name, _ in model.named_modules()]
    assert [p.name for p in tree.parameters] == [name for name, _ in model.named_parameters()]
    assert sum(p.numel for p in tree.parameters) == sum(p.numel() for p in model.parameters())
    assert all(
        tree.nodes[child].parent == name for name, node in tree.nodes.items() for child in node.children
    )


def test_modules_that_share_a_parameter_are_joined() -> None:
    tree = build_tree(LM(1, tied=True))
    assert tree.ties() == (("embed", "head"),)
    assert build_tree(LM(1)).ties() == ()


def test_ties_chain_over_modules() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    model["b"].weight = model["a"].weight
    model["c"].bias = model["b"].bias
    assert build_tree(model).ties() == (("a", "b", "c"),)


def test_module_with_several_parents_is_one_node_below_its_first() -> None:
    class TwoHomes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList([Block(4)])
            self.second = nn.ModuleList([self.first[0], Block(4)])

    tree = build_tree(TwoHomes())
    assert tree.nodes["first.0"].parent == "first"
    assert tree.nodes["second"].children == ("second.1",)
    assert sum(p.numel for p in tree.parameters) == 2 * sum(p.numel() for p in Block(4).parameters())


def test_meta_models_and_mixed_dtypes_have_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    assert [p.nbytes for p in build_tree(model).parameters] == [64, 32]


def test_frozen_lookup_container_and_buffers_are_noted() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    tree = build_tree(model)
    assert not tree.parameters[0].trainable
    assert tree.nodes["0"].lookup
    assert tree.nodes[""].container
    assert tree.nodes["1"].buffer_bytes == 4 * 4 + 4 * 4 + 8


def test_a_tree_from_its_record_and_sizes() -> None:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 3),
            "blocks": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()),
            "head": nn.Linear(3, 5, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    model["blocks"][0].bias.requires_grad_(False)
    tree = build_tree(model)
    sizes = {name: (t.numel(), t.numel() * t.element_size()) for name, t in model.state_dict().items()}
    assert from_record(json.loads(json.dumps(to_record(tree))), sizes) == tree
