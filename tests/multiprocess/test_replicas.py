"""Data-parallel replicas of the wrapped model: reduction options, accumulation, buffers, uneven loads and inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import models
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_REPLICAS, same
from harness import RankFailure, RankPool
from shardwright.data_parallel import sync
from shardwright.data_parallel.join import UnevenInputsError
from shardwright.errors import UsageError


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> tuple[RankPool, dict[str, Any]]:
    """A pool of ranks and the settings for it."""
    name, config = request.param
    return request.getfixturevalue(name), config


both_layouts = pytest.mark.parametrize(
    "layout", [("pool2", TWO_REPLICAS), ("pool4", TWO_BY_TWO)], indirect=True, ids=["dp2", "pp2-dp2"]
)


def wrap(module: nn.Module | None = None, **options: Any) -> smp.DistributedModel:
    """The test model with blocks 2 and 3 on stage 1, if there is one."""
    model = smp.DistributedModel(ranks.net() if module is None else module, **options)
    if smp.pp_size() > 1:
        ranks.cut(model)
    return model


def gradients(model: smp.DistributedModel) -> dict[str, Tensor | None]:
    """This rank's gradients by name, copied."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.local_named_parameters()}


def equal_on_replicas(model: smp.DistributedModel) -> None:
    """Parameters, gradients and buffers are the same on all replicas, bit for bit."""
    sync.check_equal(model.local_named_parameters(), "dp")
    mine = {n: g for n, g in gradients(model).items() if g is not None}
    sync.check_equal(mine.items(), "dp", what="gradient")


# -- options of the reduction -----------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlapping_allreduce": False},
    {"bucket_cap_mb": 0.001},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "overlapping_allreduce": False, "find_unused_parameters": True},
]


def train_with(options: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    model = wrap(**options)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        ranks.train_step(model, ranks.data(step))
        equal_on_replicas(model)
        found.append(gradients(model))
        optimizer.step()
    return dict(model.state_dict()), found


@both_layouts
def test_options_of_the_reduction_change_nothing(layout: tuple[RankPool, dict[str, Any]]) -> None:
    pool, config = layout
    results = [pool.run(train_with, options, config=config) for options in OPTIONS]
    assert all(same(result, results[0]) for result in results)
    truth, _ = ranks.reference(3, 2)
    for name, value in truth.named_parameters():
        torch.testing.assert_close(results[0][0][0][name], value.detach(), rtol=1e-5, atol=1e-6)


# -- accumulation -----------------------------------------------------------------------------------------


def accumulate(passes: int, average: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Gradients after each of two calls with batches of different sizes, and those of one process."""
    model = wrap(ranks.net(), backward_passes_per_step=passes, average_grads_across_microbatches=average)
    twin = ranks.net()
    found, wanted = [], []
    for call, size in enumerate((8, 12)):
        ranks.train_step(model, ranks.data(call, size=size))
        found.append(gradients(model))
        divisor = smp.dp_size() * (2 if average else 1)
        ranks.add_gradients(twin, call, range(smp.dp_size()), divisor, size)
        mine = {n for n, _ in model.local_named_parameters()}
        wanted.append({n: p.grad.clone() for n, p in twin.named_parameters() if n in mine})
    equal_on_replicas(model)
    for _ in range(3):  # each pair of calls reduces
        ranks.train_step(model, ranks.data())
    return found, wanted


@both_layouts
@pytest.mark.parametrize(("passes", "average"), [(1, True), (2, True), (2, False)])
def test_accumulating_over_calls(layout: tuple[RankPool, dict[str, Any]], passes: int, average: bool) -> None:
    """FF-11: gradients of several calls add up; nothing is divided twice or cleared."""
    pool, config = layout
    results = pool.run(accumulate, passes, average, config=config)
    for found, wanted in results:
        assert found[1].keys() == wanted[1].keys()
        for name in found[1]:
            torch.testing.assert_close(found[1][name], wanted[1][name], rtol=1e-5, atol=1e-7)
        reduced_early = all(torch.allclose(found[0][n], wanted[0][n], rtol=1e-5, atol=1e-7) for n in found[0])
        assert reduced_early == (passes == 1)


def accumulate_alone() -> None:
    """The same over stages without replicas, with sequences of different length."""
    made = models.make("gpt2_untied")
    model, twin = smp.DistributedModel(made.model), models.make("gpt2_untied").model

    @smp.step
    def step(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    for call, length in enumerate((16, 12)):
        batch = {n: v[:, :length] for n, v in made.make_batch(call, 8).items()}
        step(model, batch)
        for index in range(4):
            (made.loss_of(twin, {n: v.chunk(4)[index] for n, v in batch.items()}) / 4).backward()
    wanted = dict(twin.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter.grad, wanted[name].grad), name


def test_accumulating_over_stages(pool2: RankPool) -> None:
    """FF-11 at pp 2 with 4 microbatches."""
    pool2.run(accumulate_alone, config={"pipeline_parallel_degree": 2, "microbatches": 4})


# -- without steps ----------------------------------------------------------------------------------------


def plain_loop(own_backward: bool) -> dict[str, Any]:
    """A loop that knows nothing of steps; one rank looks at the model alone in between."""
    model = wrap(backward_passes_per_step=2).eval()
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    for step in range(2):
        optimizer.zero_grad()
        for x in ranks.data(step).chunk(2):
            loss = ranks.loss_of(model, x) / 2
            model.backward(loss) if own_backward else loss.backward()
        equal_on_replicas(model)
        optimizer.step()
        if smp.rank() == 0:
            with torch.no_grad():
                model(ranks.data())
    return dict(model.state_dict())


@pytest.mark.parametrize("own_backward", [False, True])
def test_a_plain_training_loop_reduces_gradients(pool2: RankPool, own_backward: bool) -> None:
    truth = ranks.net().eval()
    optimizer = ranks.adam(truth)
    for step in range(2):
        ranks.reference_step(truth, optimizer, step, (0, 1))
    for weights in pool2.run(plain_loop, own_backward, config=TWO_REPLICAS):
        for name, value in truth.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


# -- communication hook -----------------------------------------------------------------------------------


def with_comm_hook(after_partitioning: bool) -> None:
    """A hook that adds gradients of replicas: microbatches are then summed, replicas too."""
    model = wrap()
    buckets: list[int] = []

    def add(state: str, bucket: Any) -> Any:
        assert state == "my state"
        buckets.append(bucket.index())
        total = sum(smp.allgather(bucket.buffer(), smp.DP_GROUP))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(total)
        return future

    if after_partitioning:
        with torch.no_grad():
            ranks.evaluate(model, ranks.data())
    model.register_comm_hook("my state", add)
    with pytest.raises(UsageError, match="registered already"):
        model.register_comm_hook("my state", add)
    ranks.train_step(model.eval(), ranks.data())
    twin = ranks.net().eval()
    with torch.no_grad():
        for name, buffer in twin.named_buffers():
            if after_partitioning and name in dict(model.local_named_buffers()):
                buffer.copy_(dict(model.local_named_buffers())[name])
    assert buckets
    if not after_partitioning:
        for replica in range(2):
            for x in ranks.data(0, replica).chunk(2):
                ranks.loss_of(twin, x).backward()
        wanted = dict(twin.named_parameters())
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-5, atol=1e-7)
    equal_on_replicas(model)


def comm_hook_without_overlap() -> None:
    with pytest.raises(UsageError, match="overlapping_allreduce=True"):
        wrap(overlapping_allreduce=False).register_comm_hook(None, lambda state, bucket: None)


@both_layouts
def test_communication_hook(layout: tuple[RankPool, dict[str, Any]]) -> None:
    pool, config = layout
    for after_partitioning in (False, True):
        pool.run(with_comm_hook, after_partitioning, config=config)
    pool.run(comm_hook_without_overlap, config=config)


def comm_hook_of_torch() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = wrap(average_grads_across_microbatches=False)
    model.register_comm_hook(smp.get_dp_process_group(), default_hooks.allreduce_hook)
    ranks.train_step(model, ranks.data())
    equal_on_replicas(model)


def test_hooks_of_torch_work(pool2: RankPool) -> None:
    pool2.run(comm_hook_of_torch, config=TWO_REPLICAS)


def averaged_on_request() -> tuple[dict[str, Any], dict[str, Any]]:
    model = wrap()
    ranks.train_step(model, ranks.data())
    before = gradients(model)
    smp.hvd_average_grads()
    return before, gradients(model)


def test_averaging_on_request(pool2: RankPool) -> None:
    config = {"horovod": True, "microbatches": 2, "log_level": "error"}
    (one, mean), (other, same_mean) = pool2.run(averaged_on_request, config=config)
    assert same(mean, same_mean)
    for name, gradient in mean.items():
        torch.testing.assert_close(gradient, (one[name] + other[name]) / 2)
        assert not torch.equal(one[name], other[name])


# -- buffers and loads ------------------------------------------------------------------------------------


def buffers_of_replicas(broadcast: bool) -> list[Any]:
    """Replicas start with different buffers and weights; return what they have after start and two steps."""
    module = ranks.net(seed=smp.dp_rank())
    with torch.no_grad():
        for block in module.blocks:
            block.size += 1 + smp.dp_rank()
    model = wrap(module, broadcast_buffers=broadcast)
    if smp.pp_size() > 1:
        seen: list[Any] = []
        model.register_post_partition_hook(lambda m, o: seen.append(_copy(m)))
        ranks.train_step(model, ranks.data())
    else:
        seen = [_copy(model)]
        ranks.train_step(model, ranks.data())
    after_one = _copy(model)
    ranks.train_step(model, ranks.data(1))
    with torch.no_grad():
        ranks.evaluate(model, ranks.data(2))
    return [smp.dp_rank(), seen[0], after_one, _copy(model)]


def _copy(model: smp.DistributedModel) -> dict[str, Tensor]:
    named = [*model.local_named_buffers(), *model.local_named_parameters()]
    return {n: t.detach().clone() for n, t in named}


@both_layouts
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_of_replicas(layout: tuple[RankPool, dict[str, Any]], broadcast: bool) -> None:
    """FF-32: start values are those of replica 0; its buffers count in each step, if asked for."""
    pool, config = layout
    results = pool.run(buffers_of_replicas, broadcast, config=config)
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        assert (one[0], other[0]) == (0, 1)
        assert same(one[1], other[1])
        sizes = [n for n in one[1] if n.endswith("size")]
        assert not any(torch.equal(one[2][n], other[2][n]) for n in sizes)  # each saw its own data
        for name in sizes:
            if broadcast:  # both went on from replica 0's
                assert not torch.equal(other[3][name], other[2][name])
        assert all(one[3][n] == other[3][n] == 6 for n in one[3] if n.endswith("calls"))
    if broadcast:
        _check_second_step(results, half)


def _check_second_step(results: list[Any], half: int) -> None:
    """Replica 1's second step started from replica 0's running estimates."""
    for one, other in zip(results[:half], results[half:], strict=True):
        if "blocks.0.size" in one[1]:
            block = ranks.net().blocks[0]
            with torch.no_grad():
                block.linear.weight.copy_(one[1]["blocks.0.linear.weight"])
                block.linear.bias.copy_(one[1]["blocks.0.linear.bias"])
                block.size.copy_(one[2]["blocks.0.size"])
                for step in (1, 2):
                    for x in ranks.data(step, replica=1).chunk(2):
                        block(x)
            assert torch.equal(block.size, other[3]["blocks.0.size"])


def load_on_one_replica(when: str) -> tuple[Any, Any]:
    """Only the first replica loads; all go on from what it loaded."""
    source, source_optimizer = ranks.reference(1, seed=3)
    model = wrap()
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    if when == "after":
        ranks.train(model, optimizer, 1)
    if smp.rdp_rank() == 0:
        model.load_state_dict(source.state_dict())
        optimizer.load_state_dict(source_optimizer.state_dict())
    ranks.train(model, optimizer, 2)
    equal_on_replicas(model)
    states = smp.allgather(optimizer.local_state_dict(), smp.DP_GROUP)
    assert same(states[0]["state"], states[1]["state"])
    return dict(model.state_dict()), optimizer.state_dict()["state"]


@both_layouts
@pytest.mark.parametrize("when", ["before", "after"])
def test_only_one_replica_loads(layout: tuple[RankPool, dict[str, Any]], when: str) -> None:
    pool, config = layout
    results = pool.run(load_on_one_replica, when, config=config)
    weights, state = results[0]
    truth, optimizer = ranks.reference(1, seed=3)
    for step in range(2):
        ranks.reference_step(truth, optimizer, step, (0, 1))
    for name, value in truth.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)
    for index, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(state[index]["exp_avg"], values["exp_avg"], rtol=1e-4, atol=1e-6)
        assert state[index]["step"] == 3


def state_dict_on_one_replica() -> list[Any]:
    model = wrap()
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    ranks.train(model, optimizer, 1)
    found: list[Any] = []
    if smp.dp_rank() == 0:
        found = [dict(model.state_dict()), optimizer.state_dict(), dict(model.state_dict(gather_to_rank0=True))]
    smp.barrier()
    return found


def test_state_dicts_on_the_first_replica_only(pool4: RankPool) -> None:
    results = pool4.run(state_dict_on_one_replica, config=TWO_BY_TWO)
    filled = [r for r in results if r]
    assert len(filled) == 2
    assert same(filled[0][:2], filled[1][:2])
    assert same(filled[0][2], filled[0][0])
    assert filled[1][2] == {}


# -- uneven inputs ----------------------------------------------------------------------------------------


def uneven(options: dict[str, Any]) -> tuple[Any, Any, list[int]]:
    """Replica 0 has two batches, replica 1 has four; the model may not be partitioned yet."""
    model = wrap().eval()
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    calls = []
    with model.join(**options):
        for step in range(2 + 2 * smp.dp_rank()):
            optimizer.zero_grad()
            ranks.train_step(model, ranks.data(step))
            optimizer.step()
            calls.append(step)
            with torch.no_grad():  # looking at the model needs no company
                ranks.evaluate(model, ranks.data(step))
    ranks.train(model, optimizer, 1, first=9)  # training goes on together
    equal_on_replicas(model)
    weights = {n: p for n, p in model.state_dict().items() if not n.endswith("size")}
    return weights, optimizer.state_dict()["state"], calls


@both_layouts
def test_uneven_inputs(layout: tuple[RankPool, dict[str, Any]]) -> None:
    pool, config = layout
    results = pool.run(uneven, {}, config=config)
    assert all(same(r[:2], results[0][:2]) for r in results)
    assert sorted(len(r[2]) for r in results) == [2] * (len(results) // 2) + [4] * (len(results) // 2)
    truth = ranks.net().eval()
    optimizer = ranks.adam(truth)
    for step in (0, 1, 2, 3, 9):
        ranks.reference_step(truth, optimizer, step, (0, 1) if step in (0, 1, 9) else (1,), divisor=2)
    for name, value in truth.named_parameters():
        torch.testing.assert_close(results[0][0][name], value.detach(), rtol=1e-5, atol=1e-6)


def uneven_ends() -> None:
    with pytest.raises(UnevenInputsError, match="no more batches"):
        uneven({"throw_on_early_termination": True})


@both_layouts
def test_uneven_inputs_may_end_training(layout: tuple[RankPool, dict[str, Any]]) -> None:
    pool, config = layout
    pool.run(uneven_ends, config=config)


# -- parameters without gradients -------------------------------------------------------------------------


class Sparse(nn.Module):
    """Parts that are used always, never, in even steps only, and on one replica only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.even = nn.Linear(16, 16)
        self.first = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.always(x)
        if step % 2 == 0:
            x = self.even(x)
        if smp.dp_rank() == 0:
            x = self.first(x)
        return self.head(x)


def sparse_gradients() -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Sparse()
    model = smp.DistributedModel(module)
    if smp.pp_size() > 1:
        for part in (module.even, module.first, module.head):
            smp.set_partition(part, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def step(model: Any, x: Tensor, number: int) -> Tensor:
        loss = model(x, number).square().mean()
        model.backward(loss)
        return loss

    names = []
    for number in range(3):
        optimizer.zero_grad()
        step(model, ranks.data(number), number)
        equal_on_replicas(model)
        names.append({n.partition(".")[0] for n, g in gradients(model).items() if g is not None})
        optimizer.step()
        sync.check_equal(model.local_named_parameters(), "dp")
    clipped = float(smp.clip_grad_norm(1.0))
    return names, (optimizer.state_dict()["state"], clipped)


@both_layouts
def test_parameters_without_gradients(layout: tuple[RankPool, dict[str, Any]]) -> None:
    """FF-15: no hang, equal replicas; missing on one replica counts as zero, missing everywhere stays None."""
    pool, config = layout
    results = pool.run(sparse_gradients, config=config)
    seen = [set().union(*(r[0][step] for r in results)) for step in range(3)]
    assert seen == [
        {"always", "even", "first", "head"},
        {"always", "first", "head"},
        {"always", "even", "first", "head"},
    ]
    for _, (state, clipped) in results:
        assert 2 not in state  # never.weight: no state is made up
        assert state[4]["step"] == 2  # even.weight
        assert clipped == results[0][1][1]


def nothing_at_all() -> None:
    """Replica 1 has no batch, and the model is not partitioned yet."""
    model = wrap()
    with model.join():
        for step in range(1 - smp.dp_rank()):
            ranks.train_step(model, ranks.data(step))


def test_a_replica_without_any_batch_cannot_join_the_first_step(pool4: RankPool) -> None:
    with pytest.raises(RankFailure, match="a replica that has no batch at all before the model is partitioned"):
        pool4.run(nothing_at_all, config=TWO_BY_TWO)
