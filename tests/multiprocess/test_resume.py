"""Training that is saved and resumed with the real wrappers goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import copy
import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import models
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_STAGES, same
from harness import RankPool
from shardwright.checkpoint import torch_stream
from shardwright.engine.checkpointing import SavedOptimizer
from shardwright.errors import (
    CheckpointError,
    CommunicationTimeout,
    LostRankError,
    PartitionError,
    RemoteRankError,
    UsageError,
)

TWO_REPLICAS = {"microbatches": 2, "ddp": True, "log_level": "warning"}
ONE = {"microbatches": 2, "log_level": "warning"}


# -- the models --------------------------------------------------------------------------------------------


class SharedBuffers(nn.Module):
    """FF-32: buffers changed in place, assigned anew, not saved, and one constant that both stages read."""

    table: Tensor
    calls: Tensor
    unsaved: Tensor

    class Layer(nn.Module):
        """Adds the shared table; counts its calls by assigning a new buffer."""

        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("table", table)
            self.register_buffer("b", torch.zeros(()))
            self.register_buffer("count", torch.zeros(1, dtype=torch.long))
            self.register_buffer("unsaved", torch.ones(16), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.b = self.b + 1
                self.count += 1
            return torch.tanh(self.linear(x) + self.table * self.unsaved + self.b / 10)

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(16)
        self.blocks = nn.ModuleList(self.Layer(table) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Sparse(nn.Module):
    """FF-15: layers that are used never, in even steps only, and on one replica only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x) if smp.dp_rank() == 0 else x
        x = self.blocks[2](x)
        return self.head(self.blocks[3](x) if self.step % 2 == 0 else x)


@dataclass(frozen=True)
class Variant:
    """A model to train.

    build: makes it.   frozen: prefixes of names that don't train.   changes: settings.
    """

    build: Callable[[], nn.Module]
    frozen: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()


def _gpt2() -> nn.Module:
    return models.make("gpt2", dropout=0.1).model


VARIANTS = {
    "dropout": Variant(lambda: ranks.net(dropout=0.1)),
    "first stage frozen": Variant(ranks.net, frozen=("scale", "blocks.0", "blocks.1")),
    "last stage frozen": Variant(ranks.net, frozen=("blocks.2", "blocks.3", "head")),
    "sparse": Variant(Sparse),
    "buffers": Variant(SharedBuffers),
    "tied": Variant(_gpt2),
    "tied on two stages": Variant(_gpt2, changes=(("tied_weights", "replicate"),)),
    "fp16": Variant(ranks.net, changes=(("fp16", True),)),
    "tied bf16": Variant(_gpt2, changes=(("bf16", True),)),
}


# -- on the ranks ------------------------------------------------------------------------------------------


def build(name: str, seed: int = 5) -> tuple[smp.DistributedModel, Any]:
    """A wrapped model whose weights differ from replica to replica until they are made equal, and an optimizer."""
    variant = VARIANTS[name]
    torch.manual_seed(seed + smp.dp_rank())
    module = variant.build()
    for parameter_name, parameter in module.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(variant.frozen or "?"))
    model = smp.DistributedModel(module)
    if name.startswith("tied"):
        for path, stage in models.even_stages(models.block_names(module), 2).items():
            smp.set_partition(module.get_submodule(path), stage if smp.pp_size() > 1 else 0)
        if name == "tied on two stages":
            smp.set_partition(module.lm_head, 1 if smp.pp_size() > 1 else 0)
    elif smp.pp_size() > 1:
        ranks.cut(model)
    frozen_too = name != "last stage frozen"  # there the last stage's groups are empty
    optimizer = ranks.adam(model, frozen_too=frozen_too)
    return model, smp.DistributedOptimizer(optimizer, None, True, {"init_scale": 2.0**10, "scale_window": 2})


@smp.step
def text_step(model: Any, input_ids: Tensor) -> Tensor:
    loss = model(input_ids=input_ids, labels=input_ids).loss
    model.backward(loss)
    return loss


def go(model: Any, optimizer: Any, first: int, steps: int) -> list[Any]:
    """Train; return losses, norms, and a random number of each generator."""
    seen: list[Any] = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        if isinstance(model.get_module(), Sparse):
            model.get_module().step = step
        if hasattr(model, "transformer"):
            ids = models.causal_batch(10 * step + smp.dp_rank(), 8)["input_ids"]
            seen.append(text_step(model, ids).stack())
        else:
            seen.append(ranks.train_step(model, ranks.data(step)).stack())
        if smp.state.cfg.fp16 and step == 1 and smp.pp_rank() == 1:  # FF-28: an overflow before the save
            next(model.local_parameters()).grad.fill_(float("inf"))
        seen.append(smp.clip_grad_norm(0.5))
        optimizer.step()
        seen.append(optimizer.loss_scale if smp.state.cfg.fp16 else None)
        seen += [random.random(), np.random.rand(), torch.rand(1)]
    return seen


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that training has made on this rank."""
    return {
        "parameters": dict(model.local_named_parameters()),
        "buffers": {n: b for n, b in model.local_named_buffers() if "unsaved" not in n},
        "optimizer": optimizer.local_state_dict(),
        "full": dict(model.state_dict()),
        "full optimizer": optimizer.state_dict(),
    }


def detached(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "parameters": {n: p.detach() for n, p in content["parameters"].items()}}


HALF = {"fp16", "tied bf16"}


def straight(name: str, path: str, partial: bool = True) -> tuple[list[Any], dict[str, Any]]:
    """Two steps, a save, two more steps."""
    random.seed(smp.rank())
    np.random.seed(smp.rank())
    model, optimizer = build(name)
    start = {n: p.detach().clone() for n, p in model.get_module().named_parameters() if not p.requires_grad}
    go(model, optimizer, 0, 2)
    content = {"step": 2, "numbers": np.arange(3), "nested": [{"a": (1, None)}], "tensor": torch.ones(2)}
    smp.save_checkpoint(path, "two", partial, model, optimizer, user_content=content)
    seen = go(model, optimizer, 2, 2)
    held = dict(model.local_named_parameters())
    assert all(same(held[n].detach(), v) for n, v in start.items() if n in held and smp.dp_rank() == 0)
    return seen, detached(everything(model, optimizer))


def resumed(name: str, path: str, partial: bool = True) -> tuple[list[Any], dict[str, Any]]:
    """Resume, and the same two steps."""
    random.seed(77)
    model, optimizer = build(name, seed=99)
    if name == "dropout" and smp.pp_size() > 1:  # the saved partition counts
        ranks.cut(model, 1)
    seen: list[Any] = []
    model.register_post_partition_hook(lambda m, o: seen.append(len(o.state)))
    content = smp.resume_from_checkpoint(path, partial=partial)
    assert content["step"] == 2
    assert content["nested"] == [{"a": (1, None)}]
    assert same(content["tensor"], torch.ones(2))
    assert (content["numbers"] == np.arange(3)).all()
    if partial and smp.pp_size() > 1:
        with pytest.raises(PartitionError, match="comes from a checkpoint"):
            smp.set_partition(next(model.get_module().children()), 0)
    results = go(model, optimizer, 2, 2)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if name == "dropout" and smp.pp_size() > 1:
        assert smp.get_partition(model.get_module().blocks[1]) == 0
    if smp.pp_size() > 1:  # hooks come after the loads
        assert seen[0] > 0 or not trained
    return results, detached(everything(model, optimizer))


def check(one: tuple[list[Any], dict[str, Any]], other: tuple[list[Any], dict[str, Any]]) -> None:
    """Two ways to train came to the same, bit for bit."""
    assert same(one[0], other[0])
    for what in one[1]:
        assert same(one[1][what], other[1][what]), what


LAYOUTS = {"pp2": ("pool2", TWO_STAGES), "pp2-dp2": ("pool4", TWO_BY_TWO)}


QUICK = {"dropout", "sparse", "buffers", "tied on two stages", "fp16"}
"""Variants that `make test` also trains with replicas."""

CASES = [
    pytest.param(
        layout,
        name,
        marks=pytest.mark.heavy if layout == "pp2-dp2" and name not in QUICK else (),
        id=f"{layout}-{name}",
    )
    for layout in LAYOUTS
    for name in VARIANTS
]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_training_goes_on(request: pytest.FixtureRequest, tmp_path: Path, layout: str, name: str) -> None:
    """FF-15, FF-27, FF-28, FF-29 and FF-32 at the same layout."""
    pool_name, config = LAYOUTS[layout]
    pool: RankPool = request.getfixturevalue(pool_name)
    config = {**config, **dict(VARIANTS[name].changes)}
    whole = pool.run(straight, name, str(tmp_path), config=config)
    again = pool.run(resumed, name, str(tmp_path), config=config)
    for one, other in zip(whole, again, strict=True):
        check(one, other)
    files = {n for n in os.listdir(tmp_path / "two_partial") if n.startswith(("model", "optimizer"))}
    assert files == {"model_0_0.pt", "model_1_0.pt", "optimizer_0_0.pt", "optimizer_1_0.pt"}
    for stage in (0, 1):
        place = tmp_path / "two_partial" / f"fp16_states_{stage}_0.pt"
        assert place.exists() == (name in HALF)
        if name in HALF:  # FF-29: fp32 on disk, in a file that torch.load reads
            masters = torch.load(place, weights_only=True)
            assert all(v["fp32_from_fp16"].dtype is torch.float32 for v in masters["state"].values())
            assert len(masters["state"]) == len(masters["param_names"])
            assert masters["loss_scaler"]["cur_scale"] == (2.0**9 if name == "fp16" else 1.0)
    saved = [torch.load(tmp_path / "two_partial" / f"model_{stage}_0.pt", weights_only=True) for stage in (0, 1)]
    names = VARIANTS[name].build().state_dict().keys()
    assert (saved[0].keys() | saved[1].keys()) - {"_smp_is_partial"} == names
    assert saved[0].keys() & saved[1].keys() == {"_smp_is_partial"}


def test_buffers_of_full_checkpoints(pool4: RankPool, tmp_path: Path) -> None:
    """FF-32: every persistent buffer is in the file, the others are not; replicas go on with the same values."""
    whole = pool4.run(straight, "buffers", str(tmp_path), False, config=TWO_BY_TWO)
    names = SharedBuffers().state_dict().keys()
    saved = torch.load(tmp_path / "two", weights_only=True)
    assert saved.keys() == names
    assert not any("unsaved" in name for name in names)
    assert [int(saved[f"blocks.{i}.count"]) for i in range(4)] == [4] * 4  # two steps of two microbatches
    again = pool4.run(resumed, "buffers", str(tmp_path), False, config=TWO_BY_TWO)
    for one, other in zip(whole, again, strict=True):
        check(one, other)


def shared_buffers(seed: int = 0) -> SharedBuffers:
    """Weights and buffers of these random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SharedBuffers()


def buffers_from_the_start(path: str) -> Any:
    """Three steps, then both kinds of checkpoints. Returns: the constant as this rank's two
    blocks have it at the start; the whole state at the end."""
    model = smp.DistributedModel(shared_buffers(smp.dp_rank()))  # replicas begin with other values
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    ranks.evaluate(model.eval(), ranks.data(0))
    model.train()
    own = list(model.get_module().blocks)[2 * smp.pp_rank() :][:2]
    constants = [block.table.clone() for block in own]
    ranks.train(model, optimizer, 3)
    for partial in (True, False):
        smp.save_checkpoint(path, "three", partial, model, optimizer)
    return constants, dict(model.state_dict())


def buffers_resumed(path: str, partial: bool) -> Any:
    model = smp.DistributedModel(SharedBuffers())
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    smp.resume_from_checkpoint(path, "three", partial=partial)
    ranks.evaluate(model.eval(), ranks.data(0))
    buffers = {n: b.clone() for n, b in model.local_named_buffers() if not n.endswith("unsaved")}
    model.train()
    return buffers, ranks.train(model, optimizer, 1, 3), dict(model.state_dict())


def test_buffers_of_replicas_and_stages_as_one_process_has_them(pool4: RankPool, tmp_path: Path) -> None:
    """FF-32 as it is written: 2 stages and 2 replicas, three steps, both kinds of checkpoints."""
    truth = shared_buffers()
    table = truth.blocks[0].table.clone()
    optimizer = ranks.adam(truth)
    for step in range(3):
        ranks.reference_step(truth, optimizer, step, (0, 1))
    wanted = copy.deepcopy(truth.state_dict())
    ranks.reference_step(truth, optimizer, 3, (0, 1))
    results = pool4.run(buffers_from_the_start, str(tmp_path), config=TWO_BY_TWO)
    for constants, whole in results:
        assert [torch.equal(value, table) for value in constants] == [True, True], "replica 0's, on both stages"
        check_buffers(whole, wanted)
    saved = [torch.load(tmp_path / "three_partial" / f"model_{stage}_0.pt", weights_only=True) for stage in (0, 1)]
    check_buffers({**saved[0], **saved[1]}, wanted)
    check_buffers(torch.load(tmp_path / "three", weights_only=True), wanted)
    for partial in (True, False):
        for buffers, _, whole in pool4.run(buffers_resumed, str(tmp_path), partial, config=TWO_BY_TWO):
            assert all(torch.equal(value, wanted[name]) for name, value in buffers.items())
            check_buffers(whole, truth.state_dict())


def check_buffers(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The names of one process's state dict, its buffers bit for bit, its weights nearly."""
    assert found.keys() - {"_smp_is_partial"} == wanted.keys()
    for name, value in wanted.items():
        if name.endswith(("table", "count", ".b")):
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_full_checkpoints_go_on_with_their_random_state(pool2: RankPool, tmp_path: Path) -> None:
    """Dropout, and a partition that the model would not get by itself; and the rules of partial checkpoints for the rest."""
    path = str(tmp_path)
    whole = pool2.run(straight, "dropout", path, False, config=TWO_STAGES)
    again = pool2.run(resumed, "dropout", path, False, config=TWO_STAGES)
    for one, other in zip(whole, again, strict=True):
        check(one, other)
    first, second = pool2.run(drawn_after_resume, path, config=TWO_STAGES)
    assert first != second
    assert pool2.run(drawn_after_resume, path, config=TWO_REPLICAS) == [first, first]  # a new replica is like the only one
    (tmp_path / "rng_two").write_bytes(b"damaged")
    assert all(pool2.run(untouched_streams, path, config=TWO_STAGES))


def drawn_after_resume(path: str, **options: Any) -> list[float]:
    """What each generator gives then."""
    build("dropout")
    smp.resume_from_checkpoint(path, partial=False, **options)
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def untouched_streams(path: str) -> bool:
    """Does a resume with a damaged random state fail, and, if it isn't strict, leave the streams as they are?"""
    build("dropout")
    with pytest.raises(CheckpointError, match="is damaged"):
        smp.resume_from_checkpoint(path, partial=False)
    random.seed(3)
    expected = random.Random(3).random()
    smp.resume_from_checkpoint(path, partial=False, strict=False)
    return random.random() == expected


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if not v.changes])
def test_training_goes_on_in_a_world_of_one(tmp_path: Path, name: str) -> None:
    with world(ONE):
        whole = straight(name, str(tmp_path))
    with world(ONE):
        check(whole, resumed(name, str(tmp_path)))


@pytest.mark.parametrize("partial", [True, False])
def test_without_an_optimizer_the_model_alone_is_loaded(tmp_path: Path, partial: bool) -> None:
    with world(ONE):
        model, optimizer = build("dropout")
        go(model, optimizer, 0, 2)
        smp.save_checkpoint(tmp_path, "two", partial, model, optimizer)
        weights = copy.deepcopy(dict(model.state_dict()))
    with world(ONE):
        model = smp.DistributedModel(VARIANTS["dropout"].build())
        assert smp.resume_from_checkpoint(tmp_path, partial=partial) == {}
        assert same(dict(model.state_dict()), weights)


def test_a_full_checkpoint_without_optimizer_state_says_so(tmp_path: Path) -> None:
    """FF-17: never weights without the optimizer in silence."""
    told: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("shardwright")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    with world(ONE):
        model, optimizer = build("dropout")
        smp.save_checkpoint(tmp_path, "bare", False, model)
        logger.addHandler(handler)
        try:
            smp.resume_from_checkpoint(tmp_path, "bare", partial=False, load_optimizer=False)
            assert told == []
            smp.resume_from_checkpoint(tmp_path, "bare", partial=False)
        finally:
            logger.removeHandler(handler)
    assert told == ["full checkpoint 'bare' has no optimizer state: the optimizer begins anew"]


@contextmanager
def world(config: dict[str, Any]) -> Iterator[None]:
    smp.init(config)
    try:
        yield
    finally:
        smp.shutdown()


def test_training_goes_on_in_new_processes(pool2: RankPool, tmp_path: Path) -> None:
    whole = pool2.run(straight, "dropout", str(tmp_path), config=TWO_STAGES)
    with RankPool(2) as fresh:
        again = fresh.run(resumed, "dropout", str(tmp_path), config=TWO_STAGES)
    for one, other in zip(whole, again, strict=True):
        check(one, other)


# -- which checkpoint, and what is refused -------------------------------------------------------------------


def saves(path: str) -> None:
    """Four saves of which two are kept; then a step more, and back to the newest and to an older one."""
    model, optimizer = build("dropout")
    with pytest.raises(UsageError, match="before the model is partitioned"):
        smp.save_checkpoint(path, "early", model=model, optimizer=optimizer)
    weights = {}
    for step in range(4):
        go(model, optimizer, step, 1)
        smp.save_checkpoint(path, step, model=model, optimizer=optimizer, num_kept_partial_checkpoints=2)
        weights[step] = {n: p.detach().clone() for n, p in model.local_named_parameters()}
    assert (Path(path) / "newest").read_text() == "3_partial"
    assert sorted(n for n in os.listdir(path) if n.endswith("_partial")) == ["2_partial", "3_partial"]
    go(model, optimizer, 4, 1)
    for tag, step in ((None, 3), ("2", 2), ("2_partial", 2)):  # already partitioned: loaded at once
        assert smp.resume_from_checkpoint(path, tag) == {}
        assert same({n: p.detach() for n, p in model.local_named_parameters()}, weights[step])
    with pytest.raises(UsageError, match="got a model of type Net"):
        smp.save_checkpoint(path, "plain", model=model.get_module())
    with pytest.raises(UsageError, match="got an optimizer of type"):
        smp.save_checkpoint(path, "plain", optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


def test_newest_and_kept_checkpoints(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(saves, str(tmp_path), config=TWO_STAGES)


def refused(path: str, empty: str) -> None:
    """FF-02: what isn't there, or comes too early, is an error on every rank; then it goes well."""
    with pytest.raises(UsageError, match="before the model is wrapped"):
        smp.resume_from_checkpoint(path)
    model, optimizer = build("dropout")
    for where, options, words in (
        (path, {"tag": "three"}, "no partial checkpoint 'three_partial'"),
        (path, {"tag": "two", "partial": False}, "no full checkpoint 'two'"),
        (empty, {}, "no partial checkpoint"),
        (empty + "/nowhere", {}, "no partial checkpoint"),
    ):
        with pytest.raises(FileNotFoundError, match=words) as caught:
            smp.resume_from_checkpoint(where, **options)
        assert where in str(caught.value)
    smp.resume_from_checkpoint(path, "two", load_optimizer=False)
    seen: list[int] = []
    model.register_post_partition_hook(lambda m, o: seen.append(len(o.state)))
    go(model, optimizer, 2, 1)
    assert seen == [0]


def test_checkpoints_that_are_not_there(pool2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pool2.run(straight, "dropout", str(tmp_path), config=TWO_STAGES)
    pool2.run(refused, str(tmp_path), str(tmp_path / "empty"), config=TWO_STAGES)


def other_model(path: str) -> None:
    torch.manual_seed(0)
    module = SharedBuffers()
    model = smp.DistributedModel(module)
    ranks.cut(model)
    smp.DistributedOptimizer(ranks.adam(model))
    with pytest.raises(CheckpointError, match="doesn't fit the model") as caught:
        smp.resume_from_checkpoint(path)
    assert "only in the checkpoint" in str(caught.value)
    assert "only in the model" in str(caught.value)  # both kinds are among the few that are shown


def test_checkpoint_of_another_model(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(straight, "dropout", str(tmp_path), config=TWO_STAGES)
    pool2.run(other_model, str(tmp_path), config=TWO_STAGES)


def resume_damaged(path: str) -> None:
    """What a load has overwritten in part is of no use until a whole checkpoint is loaded."""
    model, optimizer = build("dropout")
    go(model, optimizer, 0, 2)
    smp.save_checkpoint(path, "good", model=model, optimizer=optimizer)
    smp.save_checkpoint(f"{path}/full", "good", partial=False, model=model, optimizer=optimizer)
    expected = copy.deepcopy((go(model, optimizer, 2, 2), detached(everything(model, optimizer))))  # what is live is overwritten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_stream, "_MIN_BLOCK_BYTES", 256)  # so that the damage isn't in a block that is read on opening
        smp.save_checkpoint(path, "bad", model=model, optimizer=optimizer)
    if smp.rank() == 0:
        file = Path(path, "bad_partial", "optimizer_0_0.pt")
        file.write_bytes(file.read_bytes().replace(*(v.numpy().tobytes() for v in flipped(optimizer))))
    smp.save_checkpoint(f"{path}/bare", "bare", optimizer=optimizer)
    smp.barrier()
    unusable = "the state of the model and optimizer was overwritten in part"
    for partial in (True, False):  # not strict, all is checked first; then the disk fails
        with failing_disk(partial), pytest.raises(CheckpointError, match="Input/output error"):
            smp.resume_from_checkpoint(path if partial else f"{path}/full", "good", partial=partial, strict=False)
        with pytest.raises(CheckpointError, match=unusable):
            go(model, optimizer, 4, 1)
        smp.resume_from_checkpoint(path, "good")
    with pytest.raises(CheckpointError, match=r"'bad_partial' is damaged: optimizer_0_0\.pt"):
        smp.resume_from_checkpoint(path, "bad")
    for use in (model.state_dict, model.local_state_dict, optimizer.state_dict, optimizer.local_state_dict):
        with pytest.raises(CheckpointError, match=unusable):
            use()
    model.load_state_dict({}, strict=False)
    with pytest.raises(CheckpointError, match=unusable):
        go(model, optimizer, 4, 1)
    with pytest.raises(CheckpointError, match=unusable), torch.no_grad():
        model(ranks.data(4))
    with pytest.raises(CheckpointError, match=unusable):
        smp.save_checkpoint(path, "worse", model=model, optimizer=optimizer)
    smp.resume_from_checkpoint(f"{path}/bare", "bare", strict=False)  # the weights stay as they are
    with pytest.raises(CheckpointError, match="the state of the model was overwritten in part"):
        go(model, optimizer, 4, 1)
    smp.resume_from_checkpoint(path)  # "bad" is the newest one, and skipped
    check((go(model, optimizer, 2, 2), detached(everything(model, optimizer))), expected)


@contextmanager
def failing_disk(partial: bool) -> Iterator[None]:
    """On rank 1 the last that is read of a checkpoint can't be."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        if smp.rank() == 1:
            patch.setattr(SavedOptimizer, "load_local" if partial else "load_whole", fail)
        yield


def flipped(optimizer: Any) -> tuple[Tensor, Tensor]:
    """A moment, and the same with another last value."""
    moment = next(values["exp_avg"] for values in optimizer.local_state_dict()["state"].values())
    other = moment.clone()
    other.view(-1)[-1] += 1
    return moment, other


def test_half_of_a_damaged_checkpoint_is_never_trained_on(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(resume_damaged, str(tmp_path), config=ranks.TWO_REPLICAS)


def call_alone(call: str, path: str) -> tuple[str, float]:
    """FF-24: rank 0 makes a collective call, the others go to a barrier; what each is told, and when."""
    model, optimizer = build("dropout")
    go(model, optimizer, 0, 1)
    started = time.monotonic()
    calls = {
        "save_checkpoint": lambda: smp.save_checkpoint(path, "alone", model=model, optimizer=optimizer),
        "model.state_dict()": model.state_dict,
        "optimizer.state_dict()": optimizer.state_dict,
    }
    with pytest.raises((CommunicationTimeout, RemoteRankError, LostRankError)) as caught:
        (calls[call] if smp.rank() == 0 else smp.barrier)()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    "call",
    ["save_checkpoint", "model.state_dict()", pytest.param("optimizer.state_dict()", marks=pytest.mark.heavy)],
)
def test_one_rank_alone_is_told(pool2: RankPool, tmp_path: Path, call: str) -> None:
    results = pool2.run(call_alone, call, str(tmp_path), config={**TWO_STAGES, "timeout_s": 5})
    assert all(seconds < 15 for _, seconds in results)
    assert f"{call} (every rank of " in results[0][0]
    assert "must call it" in results[0][0]
