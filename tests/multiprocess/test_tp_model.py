"""The wrapped model with tensor parallelism: what it tells, its state in and out, clipping, checkpoints, refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import reference
import shardwright.torch as smp
import tp_parity
from harness import RankFailure, RankPool
from tp_modules import Dense, FakeLinear
from tp_parity import Case, plain_names, whole_gradients

TWO = Case("gpt2").config()
SQUARE = Case("gpt2", pp=2).config()


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@smp.step
def train_step(model: nn.Module, batch: models.Batch, factor: float) -> Tensor:
    loss = model(**batch).loss * factor
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: nn.Module, batch: models.Batch) -> Tensor:
    return model(**{**batch, "labels": None}).logits


def built(name: str = "gpt2", *, dropout: float = 0.0, seed: int = 0) -> smp.DistributedModel:
    made = models.make(name, dropout=dropout, seed=seed)
    smp.set_tensor_parallelism(made.model)
    return smp.DistributedModel(made.model)


def with_optimizer(**options: Any) -> tuple[smp.DistributedModel, Any]:
    model = built(**options)
    return model, smp.DistributedOptimizer(reference.adamw(list(model.parameters())))


def batch(step: int = 0, index: int | None = None) -> models.Batch:
    """This rank's batch; dummies where the contract has them."""
    if smp.pp_rank() > 0:
        return {"input_ids": torch.zeros(8, 0), "labels": torch.zeros(8, 0)}
    return models.MODELS["gpt2"].make_batch(10 * step + (smp.dp_rank() if index is None else index), 8)


def train(model: nn.Module, optimizer: Any, steps: range, factor: float = 1.0) -> list[Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(train_step(model, batch(step), factor).stack())
        optimizer.step()
    return losses


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def plain_state(seed: int = 0, name: str = "gpt2") -> dict[str, Tensor]:
    return models.make(name, seed=seed).model.state_dict()


# -- what it tells ----------------------------------------------------------------------------------------------


def _accessors() -> None:
    model = built()
    sliced_norms = smp.state.cfg.optimize == "memory"
    named = dict(model.get_module().named_parameters())
    query = named["transformer.seq_layers.0.attention.query.weight"]
    dense = named["transformer.seq_layers.0.attention.dense.weight"]
    norm = named["transformer.seq_layers.0.attention.pre_layernorm.weight"]
    words = named["word_embedding.weight"]
    assert query.shape == (16, 32)
    assert (smp.utils.get_distribution_axis(query), smp.utils.get_distribution_axis(dense)) == (0, 1)
    assert smp.utils.get_distribution_axis(words) is None
    asked = (query, dense, norm, words)
    assert [model.is_distributed_parameter(p) for p in asked] == [True, True, sliced_norms, False]
    assert [model.is_scaled_batch_parameter(p) for p in asked] == [True, True, True, False]
    default = dict(model.default_reducer_named_parameters())
    scaled = dict(model.scaled_batch_reducer_named_parameters())
    assert "word_embedding.weight" in default
    assert scaled["transformer.seq_layers.0.attention.query.weight"] is query
    assert default.keys() | scaled.keys() == dict(model.local_named_parameters()).keys()
    assert not default.keys() & scaled.keys()
    assert isinstance(next(model.distributed_modules()), smp.nn.DistributedTransformerLMHead)
    assert isinstance(model.get_module(), smp.nn.DistributedTransformerLMHead)
    assert isinstance(model.get_module().transformer.seq_layers, nn.Sequential)
    assert model.config is model.get_module().config
    assert len(smp.state.module_manager.translate_functions) == 1
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))
    tables = smp.state.param_index_to_name_tp_group
    assert len(tables) == 2
    assert tables[smp.tp_rank()] == {i: n for n, i in optimizer.param_name_to_index().items()}


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_accessors(pool2: RankPool, optimize: str) -> None:
    pool2.run(_accessors, config={**TWO, "optimize": optimize})


# -- weights in and out -----------------------------------------------------------------------------------------


def _state(train_first: bool) -> None:
    model, optimizer = with_optimizer()
    own = model.get_module().state_dict().keys()
    before = model.state_dict()
    assert same(plain_names(before), plain_state())
    if train_first:
        train(model, optimizer, range(1))
    # plain weights, as transformers saves them
    other = plain_state(seed=5)
    kept = {name: tensor.clone() for name, tensor in other.items()}
    assert model.load_state_dict(other) == torch.nn.modules.module._IncompatibleKeys([], [])
    assert same(other, kept)
    assert same(plain_names(model.state_dict()), other)
    # the library's own names, with and without the mark
    for mark in ({}, {"_smp_is_partial": False}):
        model.load_state_dict({**before, **mark})
        assert same(model.state_dict(), before)
    only = model.state_dict(gather_to_rank0=True)
    assert (set(only) == set(own)) if smp.rank() == 0 else only == {}
    with pytest.raises(RuntimeError, match="missing keys"):
        model.load_state_dict({**dict(list(before.items())[1:]), "_smp_is_partial": False})
    broken = {**before, "word_embedding.weight": torch.zeros(100, 32)}
    if not model.partitioned or smp.pp_rank() == 0:
        with pytest.raises(RuntimeError, match=r"size mismatch for word_embedding.weight: \[100, 32\]"):
            model.load_state_dict(broken, strict=False)
    train(model, optimizer, range(1))


def _partial_keeps_values() -> None:
    model, optimizer = with_optimizer()
    train(model, optimizer, range(1))
    before = model.state_dict()
    partial = {n: v.clone() if isinstance(v, Tensor) else v for n, v in model.local_state_dict().items()}
    for direct in (False, True):
        model.load_state_dict(plain_state(seed=5))
        assert not same(model.state_dict(), before)
        model.load_state_dict(partial, same_partition_load=direct)
        assert same(model.state_dict(), before)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_state_travels_both_ways(pool2: RankPool, optimize: str) -> None:
    pool2.run(_state, True, config={**TWO, "optimize": optimize})


@pytest.mark.parametrize("train_first", [False, True])
def test_state_travels_both_ways_with_stages(pool4: RankPool, train_first: bool) -> None:
    pool4.run(_state, train_first, config=SQUARE)


@pytest.mark.parametrize("layout", ["two", "square"])
def test_partial_state_comes_back(layout: str, request: pytest.FixtureRequest) -> None:
    pool, config = ("pool2", {**TWO, "optimize": "memory"}) if layout == "two" else ("pool4", SQUARE)
    request.getfixturevalue(pool).run(_partial_keeps_values, config=config)


def _replicas_take_over() -> bool:
    """State is loaded with rdp_rank 0 only, as scripts do."""
    model, optimizer = with_optimizer()
    train(model, optimizer, range(1))
    if smp.rdp_rank() == 0:
        model.load_state_dict(plain_state(seed=5))
    evaluated = train_step(model, batch(1, index=0), 0.0)
    del evaluated
    return same(plain_names(model.state_dict()), plain_state(seed=5))


def test_replicas_take_over_loaded_weights(pool4: RankPool) -> None:
    assert all(pool4.run(_replicas_take_over, config=Case("gpt2", rdp=2).config()))


def _unequal_ranks() -> dict[str, Tensor]:
    """Scripts seed each rank by itself: rank 0's model counts."""
    return plain_names(built(seed=smp.rank()).state_dict())


def test_ranks_with_different_weights_take_those_of_rank_zero(pool4: RankPool) -> None:
    for config in (Case("gpt2", rdp=2).config(), Case("gpt2", tp=4).config()):
        assert all(same(found, plain_state()) for found in pool4.run(_unequal_ranks, config=config))


def _fresh() -> dict[str, Tensor]:
    torch.manual_seed(3 + smp.rank())
    with torch.device("meta"), smp.tensor_parallelism():
        model = models.MODELS["gpt2"].build(0.0)
    return smp.DistributedModel(model).state_dict()


def test_fresh_weights_do_not_depend_on_the_degree(pool2: RankPool, pool4: RankPool) -> None:
    one = pool2.run(_fresh, config={**TWO, "tensor_parallel_degree": 1})[0]
    for found in [*pool2.run(_fresh, config=TWO), *pool4.run(_fresh, config=Case("gpt2", tp=4).config())]:
        assert same(found, one)


def _save_folder(name: str, blocks: bool, folder: str) -> None:
    case = Case(name, blocks=blocks)
    made = tp_parity.build(case)
    model = smp.DistributedModel(made.model)
    if smp.pp_size() > 1:
        train_step(model, batch(), 0.0)
    model.save_pretrained(folder)


@pytest.mark.parametrize(("name", "blocks"), [("gpt2", False), ("gpt2", True), ("gpt2_untied", False)])
@pytest.mark.parametrize("layout", ["two", "square"])
def test_saved_folders_load_in_plain_transformers(
    name: str, blocks: bool, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from transformers import GPT2LMHeadModel

    pool, config = ("pool2", {**TWO, "optimize": "memory"}) if layout == "two" else ("pool4", SQUARE)
    request.getfixturevalue(pool).run(_save_folder, name, blocks, str(tmp_path), config=config)
    loaded, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert same(loaded.state_dict(), plain_state(name=name))
    tied = loaded.lm_head.weight is loaded.transformer.wte.weight
    assert tied is (name == "gpt2")


# -- FF-18: fused projections -----------------------------------------------------------------------------------


def _fused(name: str, folder: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    made = models.make(name)
    smp.set_tensor_parallelism(made.model)
    model = smp.DistributedModel(made.model.eval())
    data = models.MODELS["gpt2"].make_batch(3, 4)
    first = evaluate(model, data).concat()
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))
    model.train()
    for step in range(3):
        optimizer.zero_grad()
        train_step(model, models.MODELS["gpt2"].make_batch(step, 8), 1.0)
        optimizer.step()
    model.eval()
    smp.save_checkpoint(folder, "three", partial=False, model=model, optimizer=optimizer)
    return plain_names(model.state_dict()), first, evaluate(model, data).concat()


def _resumed_alone(name: str, folder: str, marked: bool) -> Tensor:
    """Logits of one process that loads the full checkpoint, with the same modules marked or none."""
    smp.init({"microbatches": 2, "log_level": "warning"})
    try:
        made = models.make(name, seed=1)
        smp.set_tensor_parallelism(made.model, marked)
        model = smp.DistributedModel(made.model.eval())
        smp.resume_from_checkpoint(folder, partial=False)
        return evaluate(model, models.MODELS["gpt2"].make_batch(3, 4)).concat()  # type: ignore[no-any-return]
    finally:
        smp.shutdown()


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 2), ("llama", 2), ("llama", 4)])
def test_fused_projections_at_other_degrees(name: str, tp: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """FF-18: heads, keys and gates stand where the plain model has them, in state dicts and in full checkpoints."""
    pool: RankPool = request.getfixturevalue(f"pool{tp}")
    config = Case(name, tp=tp, prescaled=True).config()
    state, first, last = pool.run(_fused, name, str(tmp_path), config=config)[0]
    model = models.make(name).model.eval()
    data = {**models.MODELS["gpt2"].make_batch(3, 4), "labels": None}
    with torch.no_grad():
        torch.testing.assert_close(first, model(**data).logits, rtol=1e-5, atol=1e-5)
        model.load_state_dict(state, strict=True)
        torch.testing.assert_close(last, model(**data).logits, rtol=1e-5, atol=1e-5)
    assert same(torch.load(tmp_path / "three"), state)
    for marked in (True, False):
        torch.testing.assert_close(last, _resumed_alone(name, str(tmp_path), marked), rtol=1e-5, atol=1e-5)


# -- FF-10: clipping --------------------------------------------------------------------------------------------


def _clip(order: float) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = with_optimizer()
    train_step(model, batch(0, index=0), 30.0)
    norm = float(smp.clip_grad_norm(1.0, order))
    gradients = plain_names(whole_gradients(model))
    optimizer.step()
    return norm, gradients, plain_names(model.state_dict())


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize(("pp", "optimize"), [(1, "memory"), (2, "speed")])
def test_clipping_counts_every_parameter_once(
    order: float, pp: int, optimize: str, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{2 * pp}")
    config = Case("gpt2", pp=pp, optimize=optimize, prescaled=True).config()
    found = pool.run(_clip, order, config=config)
    model, make_batch, _ = models.make("gpt2")
    (model(**make_batch(0, 8)).loss * 30.0).backward()
    optimizer = reference.adamw(list(model.parameters()))
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, order))
    optimizer.step()
    assert wanted > 10 or order != 2.0
    after = model.state_dict()
    for norm, gradients, weights in found:
        assert norm == found[0][0]
        assert norm == pytest.approx(wanted, rel=1e-5)
        for name, parameter in reference.named_parameters(model).items():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-4, atol=1e-7)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, after[name], rtol=1e-4, atol=1e-6)


# -- FF-07: one embedding on two stages -------------------------------------------------------------------------


def _tied() -> tuple[list[Tensor], int, int]:
    model = built()
    root = model.get_module()
    for name, stage in models.even_stages(models.block_names(root), 2).items():
        smp.set_partition(root.get_submodule(name), stage)
    smp.set_partition(root.lm_head, 1)
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))
    seen = []
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        held = [p.detach().clone() for p in model.local_parameters() if p.shape == (models.VOCABULARY, 32)]
        seen += held
    states = [p for p in optimizer.state if p.shape == (models.VOCABULARY, 32)]
    return seen, len(states), smp.pp_rank()


def test_tied_embedding_on_first_and_last_stage(pool4: RankPool) -> None:
    case = Case("gpt2", pp=2, partition="manual", tied="replicate")
    found = pool4.run(_tied, config=case.config())
    copies = [seen for seen, _, _ in found]
    assert all(len(seen) == 5 for seen in copies)
    for step in zip(*copies, strict=True):
        assert all(torch.equal(step[0], other) for other in step)
    assert [states for _, states, stage in found if stage == 0] == [1, 1]
    assert [states for _, states, stage in found if stage == 1] == [0, 0]
    truth = tp_parity._expected("gpt2", 2, 2).weights["lm_head.weight"]
    # after three of the five steps the weights are those of one process
    torch.testing.assert_close(copies[0][2], truth, rtol=1e-4, atol=1e-6)


# -- checkpoints ------------------------------------------------------------------------------------------------


def _uninterrupted(steps: int) -> list[Tensor]:
    torch.manual_seed(11 + smp.rank())
    return train(*with_optimizer(dropout=0.1), range(steps))


def _save_at_two(folder: str, partial: bool = True) -> list[Tensor]:
    torch.manual_seed(11 + smp.rank())
    model, optimizer = with_optimizer(dropout=0.1)
    losses = train(model, optimizer, range(2))
    smp.save_checkpoint(folder, tag="two", partial=partial, model=model, optimizer=optimizer)
    return losses


def _go_on(folder: str, partial: bool = True) -> list[Tensor]:
    torch.manual_seed(99)
    model, optimizer = with_optimizer(dropout=0.1, seed=7)
    smp.resume_from_checkpoint(folder, partial=partial)
    return train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("layout", ["two", "square"])
def test_resuming_goes_on_bit_for_bit(layout: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """FF-27: each rank gets its own streams back, those of distributed modules too."""
    pool_name, config = ("pool2", {**TWO, "optimize": "memory"}) if layout == "two" else ("pool4", SQUARE)
    pool: RankPool = request.getfixturevalue(pool_name)
    whole = pool.run(_uninterrupted, 4, config=config)
    first = pool.run(_save_at_two, str(tmp_path), config=config)
    rest = pool.run(_go_on, str(tmp_path), config=config)
    for a, b, c in zip(whole, first, rest, strict=True):
        assert torch.equal(torch.stack(a), torch.stack(b + c))
    pool.run(_save_at_two, str(tmp_path), False, config=config)
    again = pool.run(_go_on, str(tmp_path), False, config=config)
    assert all(torch.equal(torch.stack(b), torch.stack(c)) for b, c in zip(rest, again, strict=True)), "full, too"
    files = {path.name for path in (tmp_path / "two_partial").iterdir()}
    assert {"model_0_0.pt", "model_0_1.pt", "optimizer_0_0.pt", "optimizer_0_1.pt"} <= files


def _optimizer_state() -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    model, optimizer = with_optimizer()
    train(model, optimizer, range(2))
    content = optimizer.state_dict()
    weights = model.state_dict()
    straight = train(model, optimizer, range(2, 4))
    smp.shutdown()
    return content, straight, [weights]  # type: ignore[list-item]


def _load_optimizer(content: dict[str, Any], weights: dict[str, Tensor]) -> list[Tensor]:
    model, optimizer = with_optimizer(seed=4)
    model.load_state_dict(weights)
    optimizer.load_state_dict(content)
    return train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("layout", ["two", "square"])
def test_whole_optimizer_state(layout: str, request: pytest.FixtureRequest) -> None:
    pool_name, config = ("pool2", TWO) if layout == "two" else ("pool4", {**SQUARE, "optimize": "memory"})
    pool: RankPool = request.getfixturevalue(pool_name)
    found = pool.run(_optimizer_state, config=config)
    content, straight, (weights,) = found[0]
    names = list(weights)
    shapes = [tuple(t.shape) for n, t in weights.items() if n != "lm_head.weight"]
    assert [tuple(state["exp_avg"].shape) for state in content["state"].values()] == shapes, names
    resumed = pool.run(_load_optimizer, content, weights, config=config)
    assert torch.equal(torch.stack(resumed[0]), torch.stack(straight))


# -- FF-24 a, FF-25: who calls ----------------------------------------------------------------------------------


def _alone(call: str, folder: str) -> None:
    model, optimizer = with_optimizer()
    train(model, optimizer, range(1))
    if smp.rank() == 0:
        if call == "save":
            smp.save_checkpoint(folder, tag="a", model=model, optimizer=optimizer)
        else:
            (model if call == "model" else optimizer).state_dict()
    else:
        smp.barrier()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("save", "save_checkpoint (every rank of the world must call it)"),
        ("model", "model.state_dict() (every rank of an MP_GROUP"),
        ("optimizer", "optimizer.state_dict() (every rank of an MP_GROUP"),
    ],
)
@pytest.mark.heavy
def test_collective_call_of_one_rank_ends_with_its_name(call: str, text: str, tmp_path: Path) -> None:
    """FF-24."""
    started = time.monotonic()
    with RankPool(4) as pool, pytest.raises(RankFailure) as failure:
        pool.run(_alone, call, str(tmp_path), config={**SQUARE, "timeout_s": 6}, timeout_s=90)
    assert text in failure.value.tracebacks[0]
    assert time.monotonic() - started < 80


def _guarded(guard: str) -> tuple[tuple[int, int, int], list[tuple[str, tuple[int, ...], Any]]]:
    """Local state of the ranks that the guard lets through."""
    model, optimizer = with_optimizer()
    train(model, optimizer, range(1))
    found = []
    if getattr(smp, guard)() == 0:
        table = {row.name: row for row in _rows(model)}
        for name, tensor in model.local_state_dict().items():
            if isinstance(tensor, Tensor):
                found.append((name, table[name].offset, tensor.clone()))
    smp.barrier()
    return (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()), found


def _rows(model: smp.DistributedModel) -> list[Any]:
    from shardwright.engine.checkpointing import SavedModel

    return list(SavedModel(model).tensor_table())


@pytest.mark.parametrize("placement", ["cluster", "spread"])
@pytest.mark.parametrize(
    ("layout", "guard"),
    [
        ((2, 2, 1), "rdp_rank"),
        ((2, 1, 2), "rdp_rank"),
        ((2, 1, 2), "dp_rank"),  # without tensor parallelism this guard is as good
        pytest.param((2, 2, 2), "rdp_rank", marks=pytest.mark.heavy),
    ],
)
def test_the_guard_lets_every_part_through_once(
    layout: tuple[int, int, int], guard: str, placement: str, request: pytest.FixtureRequest
) -> None:
    """FF-25: local state under `if rdp_rank() == 0`."""
    pp, tp, rdp = layout
    case = Case("gpt2", pp=pp, tp=tp, rdp=rdp, placement=placement)
    pool: RankPool = request.getfixturevalue(f"pool{case.num_ranks}")
    found = pool.run(_guarded, guard, config=case.config())
    writers = [place for place, parts in found if parts]
    assert sorted(writers) == [(p, t, 0) for p in range(pp) for t in range(tp)]
    # slices join to whole tensors of the plain model's sizes
    elements: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    counted: dict[str, int] = {}
    for _, parts in found:
        for name, offset, tensor in parts:
            if name == "lm_head.weight":
                continue  # the word embedding again
            if (name, offset) not in elements.setdefault(name, set()):
                elements[name].add((name, offset))
                counted[name] = counted.get(name, 0) + tensor.numel()
    plain = models.make("gpt2").model
    assert sum(counted.values()) == sum(p.numel() for p in plain.parameters())


def _dp_guard() -> None:
    model, optimizer = with_optimizer()
    train(model, optimizer, range(1))
    if smp.dp_rank() == 0:
        model.state_dict()
    smp.barrier()


@pytest.mark.heavy
def test_the_dp_guard_ends_with_a_clear_error() -> None:
    """FF-25: with tensor parallelism dp_rank 0 is not a whole MP_GROUP."""
    with RankPool(4) as pool, pytest.raises(RankFailure) as failure:
        pool.run(_dp_guard, config={**SQUARE, "timeout_s": 6}, timeout_s=90)
    assert "model.state_dict() (every rank of an MP_GROUP" in str(failure.value)


# -- refusals ---------------------------------------------------------------------------------------------------


def _indivisible() -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=101, n_positions=16, n_embd=33, n_layer=4, n_head=3)
    with smp.tensor_parallelism():
        model = GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match="can be split over tensor_parallel_degree 2") as refused:
        smp.DistributedModel(model)
    return str(refused.value)


def test_a_degree_that_cuts_nothing_is_refused_at_the_wrap(pool2: RankPool) -> None:
    """FF-01 b."""
    for text in pool2.run(_indivisible, config=TWO):
        assert "'num_attention_heads' is 3" in text
        assert "(2)" in text


def _disagree() -> str:
    from shardwright.errors import UsageError

    model = models.make("gpt2").model
    if smp.tp_rank() == 0:
        smp.set_tensor_parallelism(model.transformer)
    with pytest.raises(UsageError, match="tp ranks hold different models, or marked other modules") as refused:
        smp.DistributedModel(model)
    return str(refused.value)


def test_ranks_that_marked_other_modules_are_told(pool2: RankPool) -> None:
    for text in pool2.run(_disagree, config=TWO):
        assert "tp rank 0: transformer True GPT2Model, tp rank 1: transformer False GPT2Model" in text


def _some_cannot() -> tuple[list[str], list[int]]:
    smp.tp_register_with_module(Dense, FakeLinear)
    model = nn.Sequential(Dense(4, 6), Dense(6, 5), Dense(5, 4))
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model)
    return [type(m).__name__ for m in model], [p.shape[0] for p in wrapped.parameters()]


def test_modules_that_cannot_be_cut_stay_beside_those_that_can(pool2: RankPool) -> None:
    for kinds, sizes in pool2.run(_some_cannot, config=TWO):
        assert kinds == ["FakeLinear", "Dense", "FakeLinear"]
        assert sizes == [3, 3, 5, 5, 2, 2]


def _no_hook_no_cpu() -> None:
    from shardwright.errors import UsageError

    model = built()
    with pytest.raises(UsageError, match="register_comm_hook"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UsageError, match="can't gather a model whose modules are cut"):
        model.cpu()


def test_what_tensor_parallelism_excludes(pool2: RankPool) -> None:
    pool2.run(_no_hook_no_cpu, config=TWO)


# -- other ways to train ----------------------------------------------------------------------------------------


class Direct(nn.Module):
    """A script's own model that uses `smp.nn` by itself, beside plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.VOCABULARY, 32)
        sizes = {"num_layers": 2, "num_attention_heads": 4, "attention_head_size": 8, "hidden_size": 32}
        no_dropout = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        self.transformer = smp.nn.DistributedTransformer(
            **sizes, **no_dropout, intermediate_size=64, causal_mask_size=16, pre_layernorm=True, post_layernorm=False
        )
        self.norm = smp.nn.FusedLayerNorm(32)
        self.head = smp.nn.DistributedLinear(32, models.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.transformer((self.words(ids), None))
        return self.head(self.norm(hidden))


def _direct(in_steps: bool) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(5)
    model = smp.DistributedModel(Direct())
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())

    @smp.step
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        ids = batch(number)["input_ids"]
        optimizer.zero_grad()
        if in_steps:
            losses.append(step(model, ids).reduce_mean())
        else:
            losses.append(loss_of(model, ids))
            losses[-1].backward()
        gradients = whole_gradients(model)
        optimizer.step()
    return [loss.detach() for loss in losses], gradients, model.state_dict()


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_modules_of_smp_nn_in_a_script_s_own_model(pool2: RankPool, optimize: str) -> None:
    """Two tp ranks with a batch each compute what two replicas do; with steps and in a plain loop."""
    config = {**TWO, "optimize": optimize, "microbatches": 1}
    wanted = pool2.run(_direct, True, config={**config, "tensor_parallel_degree": 1})
    for in_steps in (True, False):
        found = pool2.run(_direct, in_steps, config=config)
        for (losses, gradients, weights), (losses1, gradients1, weights1) in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.stack(losses), torch.stack(losses1), rtol=1e-5, atol=0)
            for name, gradient in gradients1.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
            for name, weight in weights1.items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)


def _built_too_early() -> str:
    smp.shutdown()
    early = smp.nn.DistributedLinear(4, 4)
    smp.init(TWO)
    from shardwright.errors import UsageError

    with pytest.raises(UsageError, match=r"was built before smp\.init") as refused:
        smp.DistributedModel(early)
    return str(refused.value)


def test_modules_built_before_init_are_refused() -> None:
    with RankPool(2) as pool:
        for text in pool.run(_built_too_early, config=TWO):
            assert "'weight' is cut for 1 tp ranks, but tensor_parallel_degree is 2" in text
