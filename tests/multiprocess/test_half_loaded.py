"""A load that ends halfway, by an interrupt or an error, leaves a model that nobody can use by mistake; a whole load heals it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine_ranks as ranks
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_REPLICAS, same
from harness import RankPool
from shardwright.engine.checkpointing import SavedOptimizer
from shardwright.errors import CheckpointError, RemoteRankError

UNUSABLE = "was overwritten in part by a load that failed"
LOADERS = {True: "load_local", False: "load_whole"}
"""What gives the optimizer its state, when the model has its weights: by kind of checkpoint (partial or full)."""


def build(seed: int = 0) -> tuple[Any, Any]:
    model = smp.DistributedModel(ranks.net(seed))
    if smp.pp_size() > 1:
        ranks.cut(model)
    return model, smp.DistributedOptimizer(ranks.adam(model))


@contextmanager
def ending_with(error: type[BaseException], partial: bool) -> Iterator[None]:
    """The load of this rank ends when the weights are new and the optimizer's state is old."""

    def end(*args: Any, **options: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedOptimizer, LOADERS[partial], end)
        yield


def both(path: str, model: Any, optimizer: Any) -> None:
    for partial in (True, False):
        smp.save_checkpoint(f"{path}/{partial}", "good", partial, model, optimizer)


# -- every way to use it --------------------------------------------------------------------------------------------


def uses(path: str, model: Any, optimizer: Any) -> list[Callable[[], object]]:
    return [
        lambda: ranks.train(model, optimizer, 1),
        lambda: ranks.evaluate(model, ranks.data(0)),
        model.state_dict,
        lambda: model.state_dict(gather_to_rank0=True),
        model.local_state_dict,
        optimizer.state_dict,
        optimizer.local_state_dict,
        lambda: smp.save_checkpoint(path, "worse", model=model, optimizer=optimizer),
        lambda: smp.save_checkpoint(path, "worse", partial=False, model=model),
        lambda: smp.save_checkpoint(path, "worse", model=model, optimizer=optimizer, blocking=False),
        lambda: smp.export_huggingface(f"{path}/exported", model),
    ]


def interrupted(path: str) -> None:
    model, optimizer = build()
    ranks.train(model, optimizer, 2)
    both(path, model, optimizer)
    expected = [x.clone() for x in ranks.train(model, optimizer, 1, 2)]
    for partial in (True, False):
        where = f"{path}/{partial}"
        with ending_with(KeyboardInterrupt, partial), pytest.raises(KeyboardInterrupt):
            smp.resume_from_checkpoint(where, partial=partial)
        for use in uses(path, model, optimizer):
            with pytest.raises(CheckpointError, match=UNUSABLE):
                use()
        smp.resume_from_checkpoint(where, partial=partial)
        assert same(ranks.train(model, optimizer, 1, 2), expected)
    assert {name.name for name in Path(path).iterdir()} == {"True", "False"}, "nothing was written of it"


@pytest.mark.parametrize("config", [TWO_REPLICAS, {**TWO_REPLICAS, "shard_optimizer_state": True}], ids=["plain", "sharded"])
def test_what_an_interrupt_leaves_is_refused_in_every_use(pool2: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    pool2.run(interrupted, str(tmp_path), config=config)


def interrupted_alone(path: str) -> str:
    model, optimizer = build()
    ranks.train(model, optimizer, 1)
    smp.save_checkpoint(path, "good", model=model, optimizer=optimizer)
    if smp.rank() == 1:
        with ending_with(KeyboardInterrupt, partial=True):
            smp.resume_from_checkpoint(path)
    with pytest.raises(RemoteRankError) as caught:
        smp.resume_from_checkpoint(path)
    with pytest.raises(CheckpointError, match=UNUSABLE):
        model.local_state_dict()
    return str(caught.value)


def test_an_interrupt_of_one_rank_reaches_the_others(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        one, other = pool.outcomes(interrupted_alone, str(tmp_path), config=TWO_REPLICAS)
    assert one.error is None, one.error
    assert "KeyboardInterrupt" in str(other.error)
    assert "rank 1" in one.value
    assert one.seconds < 60


# -- what one replica loads heals all ---------------------------------------------------------------------------------


def healed_by_one(path: str) -> None:
    """State dicts are loaded on replica 0 alone, as the contract allows."""
    model, optimizer = build()
    ranks.train(model, optimizer, 2)
    smp.save_checkpoint(path, "good", model=model, optimizer=optimizer)
    weights, state = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    expected = [x.clone() for x in ranks.train(model, optimizer, 2, 2)]
    first = smp.rdp_rank() == 0

    def fail() -> None:
        with ending_with(OSError, partial=True), pytest.raises(CheckpointError):
            smp.resume_from_checkpoint(path)

    def refused() -> None:
        """On all ranks, whichever of them have loaded something."""
        with pytest.raises(CheckpointError, match=UNUSABLE):
            ranks.train(model, optimizer, 1)

    fail()
    refused()
    if first:
        model.load_state_dict(weights)
    refused()
    if first:
        optimizer.load_state_dict(state)
        model.load_state_dict({}, strict=False)
    assert same(ranks.train(model, optimizer, 2, 2), expected)
    fail()
    if first:
        model.load_state_dict(dict(list(weights.items())[1:]), strict=False)
        optimizer.load_state_dict(state)
    refused()
    smp.resume_from_checkpoint(path)
    assert same(ranks.train(model, optimizer, 2, 2), expected)
    if first:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    smp.save_checkpoint(path, "again", model=model, optimizer=optimizer)  # of all replicas what the first has
    ranks.train(model, optimizer, 1)
    smp.resume_from_checkpoint(path, "again")
    assert same(ranks.train(model, optimizer, 2, 2), expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_state_dicts_on_the_first_replica_heal_all(pool2: RankPool, tmp_path: Path, sharded: bool) -> None:
    pool2.run(healed_by_one, str(tmp_path), config={**TWO_REPLICAS, "shard_optimizer_state": sharded})


def test_the_same_with_stages(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(healed_by_one, str(tmp_path), config=TWO_BY_TWO)


# -- what can't be loaded changes nothing -------------------------------------------------------------------------------


def chain(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def save_chain(path: str) -> None:
    model = smp.DistributedModel(chain(4, 4, 5))
    both(path, model, smp.DistributedOptimizer(one_group(model)))


def refuse_others(path: str, kind: str) -> str:
    module = {"size": chain(4, 4, 6), "name": chain(4, 4, 5, 5), "groups": chain(4, 4, 5)}[kind]
    model = smp.DistributedModel(module)
    alone = [{"params": [p]} for p in model.parameters()]
    smp.DistributedOptimizer(torch.optim.AdamW(alone) if kind == "groups" else one_group(model))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    told = []
    for partial in (True, False):
        with pytest.raises(CheckpointError) as caught:
            smp.resume_from_checkpoint(f"{path}/{partial}", partial=partial)
        told.append(caught.value.what)
        assert same(dict(model.state_dict()), before)
    return " | ".join(told)


@pytest.mark.parametrize("kind", ["size", "name", "groups"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """Also where one process holds the whole model, which torch would fill with what does fit."""
    pool2.run(save_chain, str(tmp_path), config=TWO_REPLICAS)
    words = {"size": ["saved [5, 4], present [6, 4]", "[5, 4] in the dict, [6, 4]"], "name": ["2.weight", "2.weight"]}
    for told in pool2.run(refuse_others, str(tmp_path), kind, config=TWO_REPLICAS):
        for text, word in zip(told.split(" | "), words.get(kind, ["1 parameter groups, now 4"] * 2), strict=True):
            assert word in text
