"""Sharded optimizer state where training is out of the ordinary: frozen, unused, repeated and late parameters,
accumulated gradients, loops without steps, optimizers of one's own, and what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import shardwright.torch as smp
from client_optimizers import ClientOptimizer
from engine_ranks import TWO_BY_TWO, same
from harness import RankPool
from sharded_models import DDP, OPTIMIZERS, SHARDED, SMALL_BUCKETS, batch, train_step, two_groups, uneven
from shardwright.data_parallel import sync
from shardwright.errors import UsageError


def weights_of(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.local_named_parameters()}


def both(pool: RankPool, function: Any, *args: Any, base: dict[str, Any] = DDP) -> list[Any]:
    """Run without and with sharding; everything must be equal bit for bit. Returns the latter's results."""
    plain = pool.run(function, *args, config=base, timeout_s=120)
    sharded = pool.run(function, *args, config={**base, "shard_optimizer_state": True}, timeout_s=120)
    for one, other in zip(plain, sharded, strict=True):
        assert same(one, other)
    return sharded


# -- parameters without gradients ----------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """FF-15: layers used never, in even steps only, and on one replica only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.never, self.even, self.first = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.step % 2 == 0:
            x = x + self.even(x)
        return x + self.first(x) if smp.dp_rank() == 0 else x


def sometimes(path: str) -> Any:
    torch.manual_seed(0)
    model = smp.DistributedModel(Sometimes(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            model.get_module().step = step
            optimizer.zero_grad()
            losses.append(train_step(model, batch(step, smp.dp_rank())).stack())
            optimizer.step()
            sync.check_equal(list(model.local_named_parameters()), "dp")

    train(0, 3)
    smp.save_checkpoint(path, "three", model=model, optimizer=optimizer)
    train(3, 5)
    straight = [losses[3:], weights_of(model)]
    smp.resume_from_checkpoint(path)
    del losses[3:]
    train(3, 5)
    assert same([losses[3:], weights_of(model)], straight)
    state = optimizer.state_dict()
    return losses, weights_of(model), state


def test_parameters_that_get_no_gradient(pool2: RankPool, tmp_path: Path) -> None:
    """FF-15: replicas stay equal, no state is made up, one replica's gradient counts half."""
    for _, _, state in both(pool2, sometimes, str(tmp_path / "a")):
        names = [n for n, _ in Sometimes().named_parameters()]
        assert [names[i] for i in state["state"]] == [n for n in names if "never" not in n]
        steps = {names[i]: int(values["step"]) for i, values in state["state"].items()}
        assert steps["even.weight"] == 3
        assert steps["first.bias"] == steps["blocks.0.weight"] == 5


def frozen_stage(stage: int, path: str) -> Any:
    module = ranks.net()
    ranks.cut(module)
    for number, block in enumerate(module.blocks):
        block.requires_grad_((number < 2) != (stage == 0))
    module.head.requires_grad_(stage == 0)
    module.scale.requires_grad_(stage != 0)
    model = smp.DistributedModel(module, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    norms = []

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            ranks.train_step(model, ranks.data(step))
            norms.append(float(smp.clip_grad_norm(1e-3)))
            optimizer.step()

    train(0, 3)
    smp.save_checkpoint(path, "three", model=model, optimizer=optimizer)
    train(3, 5)
    after = weights_of(model)
    smp.resume_from_checkpoint(path)
    train(3, 5)
    assert norms[3:5] == norms[5:]
    assert same(after, weights_of(model))
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, before[name]) is (not parameter.requires_grad), name
    assert smp.allgather(norms, smp.WORLD) == [norms] * smp.size()
    return norms


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_with_nothing_to_train(pool4: RankPool, tmp_path: Path, stage: int) -> None:
    """FF-14, FF-10: clipping, saving and resuming where a stage of two replicas is frozen."""
    plain = pool4.run(frozen_stage, stage, str(tmp_path / "a"), config=TWO_BY_TWO)
    sharded = pool4.run(
        frozen_stage, stage, str(tmp_path / "b"), config={**TWO_BY_TWO, "shard_optimizer_state": True}
    )
    for one, other in zip(plain, sharded, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def thawed() -> Any:
    """Parameters that begin to be trained later, in the groups from the start or added."""
    module = uneven()
    module.linear.requires_grad_(False)
    model = smp.DistributedModel(module, bucket_cap_mb=SMALL_BUCKETS)
    named = dict(module.named_parameters())
    added = {"last.weight", "five"}
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW([p for n, p in named.items() if n not in added], lr=0.01)
    )
    for step in range(6):
        if step == 2:
            module.linear.requires_grad_(True)
            module.frozen.requires_grad_(True)
        if step == 4:
            optimizer.add_param_group({"params": [named[n] for n in sorted(added)], "lr": 0.1})
            module.six.requires_grad_(False)
            with pytest.raises(ValueError, match="in more than one parameter group"):
                optimizer.add_param_group({"params": [named["one"]]})
            assert len(optimizer.param_groups) == 2
        model.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
    return weights_of(model), optimizer.state_dict()


def test_parameters_that_come_later(pool2: RankPool) -> None:
    both(pool2, thawed)


# -- the same parameter twice ----------------------------------------------------------------------------------------


def listed_twice(twice: bool) -> Any:
    module = uneven()
    module.other = module.linear  # a tie
    model = smp.DistributedModel(module, bucket_cap_mb=SMALL_BUCKETS)
    parameters = list(module.parameters())
    if twice:
        parameters += [module.other.weight, module.six]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(parameters, lr=0.01))
    for step in range(3):
        optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
    held = sum(v.numel() for s in optimizer.state.values() for v in s.values())
    with pytest.raises(ValueError, match="more than one parameter group"):
        torch.optim.AdamW([{"params": [module.six]}, {"params": [module.six, module.five]}])
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    inner.param_groups.append({**inner.param_groups[0], "params": [module.six]})
    with pytest.raises(ValueError, match="'six' is in more than one parameter group"):
        smp.DistributedOptimizer(ClientOptimizer(inner))
    return weights_of(model), held


def test_a_parameter_that_is_listed_twice(pool2: RankPool) -> None:
    """FF-08: one state and one update; in two groups it is refused on every rank."""
    assert same(
        pool2.run(listed_twice, True, config=SHARDED), pool2.run(listed_twice, False, config=SHARDED)
    )


# -- other loops ---------------------------------------------------------------------------------------------------------


def other_loops(kind: str) -> Any:
    options = {"passes": {"backward_passes_per_step": 2}, "eager": {"overlapping_allreduce": False}}.get(kind, {})
    if kind == "views":
        options = {"gradient_as_bucket_view": True}
    model = smp.DistributedModel(uneven(), bucket_cap_mb=SMALL_BUCKETS, **options)
    inner = two_groups(model, OPTIMIZERS["adamw"])
    optimizer = smp.DistributedOptimizer(ClientOptimizer(inner) if kind == "client" else inner)
    if kind == "evaluation first":
        with torch.no_grad():
            evaluate(model, batch(0, 0))
    for step in range(4):
        if kind == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif kind == "model":
            model.zero_grad()
        elif kind != "passes" or step % 2 == 0:
            optimizer.zero_grad()
        x = batch(step, smp.dp_rank())
        if kind == "no steps":
            model(x).square().mean().backward()
        elif kind == "uneven use" and step == 2:
            train_twice(model, x)
        else:
            train_step(model, x)
        if kind != "passes" or step % 2:
            optimizer.step()
    return weights_of(model), {} if kind == "client" else optimizer.state_dict()


@smp.step
def evaluate(model: Any, x: Tensor) -> Tensor:
    return model(x)


@smp.step
def train_twice(model: Any, x: Tensor) -> Tensor:
    """More gradients for each parameter than in the steps before: buckets are reduced a second time."""
    for _ in range(2):
        model.backward(model(x).square().mean())
    return x


KINDS = ["passes", "eager", "views", "zeros", "model", "no steps", "client", "evaluation first"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_training_loops(pool2: RankPool, kind: str) -> None:
    both(pool2, other_loops, kind)


def test_late_gradients(pool2: RankPool) -> None:
    """They are reduced apart and added, which may round otherwise."""
    plain = pool2.run(other_loops, "uneven use", config=DDP)
    for one, other in zip(plain, pool2.run(other_loops, "uneven use", config=SHARDED), strict=True):
        for name, value in one[0].items():
            torch.testing.assert_close(other[0][name], value, rtol=1e-5, atol=1e-7)


def accumulated() -> Any:
    """FF-11: two steps without clearing in between are the sum of two means."""
    model = smp.DistributedModel(uneven(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        if step % 2 == 0:
            optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        if step % 2:
            optimizer.step()
    return weights_of(model)


def test_gradients_of_two_steps_add_up(pool2: RankPool) -> None:
    plain = pool2.run(accumulated, config=DDP)
    for one, other in zip(plain, pool2.run(accumulated, config=SHARDED), strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-7)


# -- norms of whole parameters ---------------------------------------------------------------------------------------------


def by_norms(name: str) -> Any:
    model = smp.DistributedModel(uneven(), bucket_cap_mb=SMALL_BUCKETS)
    cls = {"lamb": smp.optimizers.FusedLAMB, "novograd": smp.optimizers.FusedNovoGrad}[name]
    optimizer = smp.DistributedOptimizer(cls(model.parameters(), lr=0.01))
    for step in range(4):
        optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
    return weights_of(model), optimizer.state_dict()["state"]


@pytest.mark.parametrize("name", ["lamb", "novograd"])
@pytest.mark.parametrize("dp", [2, 4])
def test_optimizers_that_need_norms(request: pytest.FixtureRequest, dp: int, name: str) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{dp}")
    plain, sharded = pool.run(by_norms, name, config=DDP), pool.run(by_norms, name, config=SHARDED)
    for one, other in zip(plain, sharded, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


# -- clipping, memory, refusals ----------------------------------------------------------------------------------------------


def clipped(norm_type: float) -> Any:
    model = smp.DistributedModel(uneven(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = 300 * model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, batch(0, smp.dp_rank()))
    norm = float(smp.clip_grad_norm(1.0, norm_type))
    again = optimizer.clip_master_grads(2.0, norm_type)
    optimizer.step()
    return norm, again, weights_of(model)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_equals_one_process(pool2: RankPool, norm_type: float) -> None:
    """FF-10 with sharded state."""
    truth = uneven()
    for replica in range(2):
        for x in batch(0, replica).chunk(2):
            (300 * truth(x).square().mean() / 4).backward()
    norm = float(nn.utils.clip_grad_norm_(truth.parameters(), 1.0, norm_type))
    assert norm > 10
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    for found, again, weights in pool2.run(clipped, norm_type, config=SHARDED):
        assert found == pytest.approx(norm, rel=1e-5)
        assert again == pytest.approx(1.0, rel=1e-5)
        for name, value in truth.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


def clipped_by_torch() -> tuple[list[str], list[str]]:
    """What is said when a script looks at its parameters, and when it clips by torch."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright.engine.clipping_watch").addHandler(handler)
    model = smp.DistributedModel(uneven(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        sum(p.numel() for p in model.parameters())
        smp.clip_grad_norm(1.0)
        before = list(said)
        for _ in range(2):
            nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
        optimizer.step()
        if step == 0:
            untold = before
    return untold, said


@pytest.mark.parametrize(
    ("config", "expected"),
    [(SHARDED, "clips nothing"), ({"pipeline_parallel_degree": 2}, "what one rank holds"), (DDP, None)],
    ids=["sharded", "stages", "replicas"],
)
def test_torchs_clipping_is_told_what_it_misses(pool2: RankPool, config: dict[str, Any], expected: str | None) -> None:
    (untold, said), other = pool2.run(clipped_by_torch, config={**config, "log_level": "warning"})
    assert untold == []
    assert other == ([], [])
    assert len(said) == (expected is not None)
    assert all(expected is not None and expected in line and "smp.clip_grad_norm(max_norm)" in line for line in said)


def held_buffers() -> tuple[int, int, int]:
    """Elements of the buffers that gradients are packed into, of gradients after the step, and of all gradients."""
    from shardwright.data_parallel.sharded_reducer import ShardedBucket

    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(20, 20) for _ in range(12))), bucket_cap_mb=450 * 4 / 2**20)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    buffers: dict[int, int] = {}
    original = ShardedBucket._buffer

    def buffer(self: ShardedBucket) -> Tensor:
        found = original(self)
        buffers[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes() // 4
        return found

    for step in range(3):
        if step == 2:  # overlapping from the second step on
            ShardedBucket._buffer = buffer  # type: ignore[method-assign]
        model.zero_grad()
        train_step(model, torch.rand(4, 20))
    ShardedBucket._buffer = original  # type: ignore[method-assign]
    pieces = [p.grad for _, p in model.virtual_named_parameters()]
    assert all(p.grad is None for p in model.parameters())
    return sum(buffers.values()), sum(g.numel() for g in pieces if g is not None), sum(p.numel() for p in model.parameters())


def test_no_rank_holds_a_full_gradient(pool2: RankPool) -> None:
    for most, after, total in pool2.run(held_buffers, config=SHARDED):
        assert 0 < most <= 450 < total
        assert total / 2 - 12 <= after <= total / 2 + 12


def refusals() -> None:
    model = smp.DistributedModel(uneven(), bucket_cap_mb=SMALL_BUCKETS)
    parameters = list(model.parameters())
    for cls in ("LBFGS", "Adafactor", "Muon", "SparseAdam"):
        if not hasattr(torch.optim, cls):
            continue
        chosen = [p for p in parameters if p.dim() == 2]
        with pytest.raises(UsageError, match=f"{cls} can't have its state sharded: it"):
            smp.DistributedOptimizer(getattr(torch.optim, cls)(chosen))
    with pytest.raises(UsageError, match=r"join\(\) with 'shard_optimizer_state'"):
        model.join()
    with pytest.raises(UsageError, match=r"register_comm_hook\(\) with 'shard_optimizer_state'"):
        model.register_comm_hook(None, lambda state, bucket: None)

    class Own(torch.optim.SGD):
        pass

    optimizer = smp.DistributedOptimizer(Own(parameters, lr=0.1))
    train_step(model, batch(0, 0))
    optimizer.step()
    model.half()
    model.float()
    with pytest.raises(UsageError, match="was moved, cast or given other data after the first step"):
        train_step(model, batch(1, 0))


def shared_memory() -> None:
    module = uneven()
    module.five.data = module.six.data[1:]
    model = smp.DistributedModel(module)
    with pytest.raises(UsageError, match=r"'six' and 'five' are different objects with the same memory"):
        train_step(model, batch(0, 0))


def test_what_is_refused(pool2: RankPool) -> None:
    pool2.run(refusals, config=SHARDED)
    pool2.run(shared_memory, config=SHARDED)


def alone() -> bool:
    """One replica has nobody to share with: everything stays as it is."""
    model = smp.DistributedModel(ranks.net())
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    ranks.train(model, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.local_parameters()}
    return optimizer.redefined_params


def test_stages_without_replicas(pool2: RankPool) -> None:
    config = {**ranks.TWO_STAGES, "shard_optimizer_state": True}
    assert pool2.run(alone, config=config) == [False, False]


def published(path: str) -> None:
    """The model as others get it, while its parameters are views of flat buffers."""
    import models

    made = models.make("gpt2")
    model = smp.DistributedModel(made.model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    step(model, made.make_batch(smp.dp_rank(), 8))
    optimizer.step()
    model.save_pretrained(path)
    if smp.rank() == 0:
        again = type(made.model).from_pretrained(path)
        assert same(dict(again.state_dict()), dict(model.state_dict()))
    twin = copy.deepcopy(model.get_module())
    assert same(dict(twin.state_dict()), dict(model.state_dict()))


@pytest.mark.heavy
def test_a_trained_model_is_saved_for_transformers(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(published, str(tmp_path), config={**SHARDED, "microbatches": 1}, timeout_s=180)
