"""Half precision over stages, slices and replicas: masters of one process, and overflows that all ranks skip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_ranks as ranks
import half_reference
import models
import shardwright.torch as smp
from engine_ranks import TWO_BY_TWO, TWO_REPLICAS, TWO_STAGES
from half_reference import adam, batches, chain
from harness import RankPool
from shardwright.engine.half_precision import FP16_Module

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
TWO_SLICES = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2, "log_level": "warning"}
STEPS = 4
DYNAMIC = {"init_scale": 2.0**16, "scale_window": 2}


def reference(kind: str, num_replicas: int, **options: Any) -> half_reference.HalfRun:
    def losses(step: int) -> list[Callable[..., Tensor]]:
        return [lambda forward, x=x: forward(x).square().mean() for x in batches(step, num_replicas)]

    return half_reference.train_in_half(chain(), HALF[kind], adam, losses, STEPS, **options)


def wrap(split: str) -> Any:
    """The chain over two stages, or with its second layer cut."""
    module = chain()
    if split == "tp":
        smp.set_tensor_parallelism(module.blocks[1])
    model = smp.DistributedModel(module)
    if split == "pp":
        for part in (module.blocks[2], module.head):
            smp.set_partition(part, 1)
    return model


def masters_of(optimizer: Any) -> dict[str, Tensor]:
    held = optimizer._param_index_to_param_local()
    return {name: held[i].detach().clone() for name, i in optimizer.param_name_to_index().items()}


def trained(split: str, poisoned: tuple[int, ...], options: dict[str, Any], clip: float | None) -> dict[str, Any]:
    """Train; in the steps `poisoned` world rank 0's last stage or slice alone finds inf in one gradient."""
    model = wrap(split)
    optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), **options)
    result: dict[str, Any] = {"scales": [], "norms": [], "skipped": [], "masters": [], "rank": smp.rank()}
    for step in range(STEPS):
        optimizer.zero_grad()
        ranks.train_step(model, ranks.data(step))
        parameters = dict(model.local_named_parameters())
        before = {n: p.detach().clone() for n, p in parameters.items()}
        masters = masters_of(optimizer)
        if step in poisoned and smp.mp_rank() == smp.mp_size() - 1:
            parameters["head.bias"].grad[0] = float("inf")
        if clip is not None:
            result["norms"].append(optimizer.clip_master_grads(clip))
        optimizer.step()
        after = masters_of(optimizer)
        unchanged = all(torch.equal(p, before[n]) for n, p in parameters.items())
        assert unchanged == optimizer.overflow == all(torch.equal(after[n], masters[n]) for n in after)
        assert all(torch.equal(p, after[n].to(p.dtype)) for n, p in parameters.items())
        result["scales"].append(optimizer.loss_scale)
        result["skipped"].append(optimizer.overflow)
        result["masters"].append(after)
    result["full"] = dict(model.state_dict())
    return result


@pytest.mark.parametrize(
    ("kind", "split", "dp"),
    [
        ("fp16", "pp", 1),
        ("bf16", "pp", 1),
        ("fp16", "dp", 2),
        ("bf16", "dp", 2),
        pytest.param("fp16", "pp", 2, marks=pytest.mark.heavy),
    ],
)
def test_masters_equal_one_process(request: pytest.FixtureRequest, kind: str, split: str, dp: int) -> None:
    """Bitwise: no sum is taken in another order."""
    config = {("pp", 1): TWO_STAGES, ("pp", 2): TWO_BY_TWO, ("dp", 2): TWO_REPLICAS}[split, dp]
    pool: RankPool = request.getfixturevalue("pool4" if (split, dp) == ("pp", 2) else "pool2")
    options = {"static_loss_scale": 128.0}
    results = pool.run(trained, split, (), options, None, config={**config, kind: True})
    if dp == 1:
        truth = reference(kind, 1, scale=128.0 if kind == "fp16" else 1.0)
        for result in results:
            for step in range(STEPS):
                found = result["masters"][step]
                assert found
                assert all(torch.equal(found[n], truth.masters[step][n]) for n in found)
            assert all(torch.equal(result["full"][n], truth.weights[-1][n]) for n in truth.weights[-1])
        assert {n for r in results for n in r["masters"][0]} == set(truth.masters[0])
        return
    # Each replica rounds its own sum to half precision before they are added.
    truth = reference(kind, dp, scale=128.0 if kind == "fp16" else 1.0)
    tolerance = {"fp16": 2e-3, "bf16": 2e-2}[kind]
    for result in results:
        for name, master in result["masters"][-1].items():
            torch.testing.assert_close(master, truth.masters[-1][name], rtol=tolerance, atol=tolerance)
    same = [r["masters"][-1] for r in results if r["masters"][-1].keys() == results[0]["masters"][-1].keys()]
    assert len(same) == dp
    assert all(torch.equal(s[n], same[0][n]) for s in same for n in s)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_slices_train_like_one_process(pool2: RankPool, kind: str) -> None:
    results = pool2.run(trained, "tp", (), {"static_loss_scale": 128.0}, 1e9, config={**TWO_SLICES, kind: True})
    truth = reference(kind, 2, scale=128.0 if kind == "fp16" else 1.0, max_norm=1e9)
    tolerance = {"fp16": 4e-3, "bf16": 3e-2}[kind]
    for result in results:
        assert result["norms"] == results[0]["norms"]
        assert result["norms"] == pytest.approx(truth.norms, rel=tolerance)
        for name, weight in truth.weights[-1].items():
            torch.testing.assert_close(result["full"][name], weight, rtol=tolerance, atol=tolerance)
    whole = [r["masters"][-1]["head.weight"] for r in results]
    assert torch.equal(*whole)


@pytest.mark.parametrize("layout", ["pp", "tp", pytest.param("pp-dp", marks=pytest.mark.heavy)])
def test_overflow_on_one_rank_only(request: pytest.FixtureRequest, layout: str) -> None:
    """FF-12: all ranks skip the step, halve the scale, and go on."""
    config = {"pp": TWO_STAGES, "tp": TWO_SLICES, "pp-dp": TWO_BY_TWO}[layout]
    pool: RankPool = request.getfixturevalue("pool4" if layout == "pp-dp" else "pool2")
    options = {"static_loss_scale": None, "dynamic_loss_scale": True, "dynamic_loss_args": DYNAMIC}
    config = {**config, "fp16": True}
    if layout == "tp":  # replicas of what is whole: the flag is agreed, the gradients are not
        results = pool.run(trained, "tp", (1,), options, 1e9, config=config)
    else:
        results = pool.run(trained, "pp", (1,), options, 1e9, config=config)
    for result in results:
        # Clean, skipped, and two clean ones after the overflow let it grow again.
        assert result["scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**16]
        assert result["skipped"] == [False, True, False, False]
        assert result["norms"][1] == -1.0
        assert result["norms"] == results[0]["norms"]
    if layout == "pp":

        def poison(step: int, named: dict[str, nn.Parameter]) -> None:
            gradient = named["head.bias"].grad
            if step == 1 and gradient is not None:
                gradient[0] = float("inf")

        truth = reference("fp16", 1, scale=2.0**16, window=2, dynamic=True, poison=poison, max_norm=1e9)
        assert truth.scales == results[0]["scales"]
        for result in results:
            found = result["masters"][-1]
            assert all(torch.equal(found[n], truth.masters[-1][n]) for n in found)


def uneven() -> tuple[dict[str, Tensor], float]:
    """Replica 1 has two batches more, and overflows in one of them."""
    model = smp.DistributedModel(chain())
    optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), None, True, DYNAMIC)
    with model.join():
        for step in range(1 + 2 * smp.dp_rank()):
            optimizer.zero_grad()
            ranks.train_step(model, ranks.data(step))
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))
            optimizer.step()
    ranks.train(model, optimizer, 1, first=9)
    return masters_of(optimizer), optimizer.loss_scale


def test_replicas_that_run_out_of_batches(pool2: RankPool) -> None:
    """The masters and the scale of the one that went on longest are taken over."""
    results = pool2.run(uneven, config={**TWO_REPLICAS, "fp16": True})
    assert ranks.same(results[0], results[1])
    assert results[0][1] == 2.0**16  # grown, halved by the overflow, one clean step


class Slope(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def large_gradients(view: bool) -> Tensor:
    model = smp.DistributedModel(Slope(), gradient_as_bucket_view=view)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def body(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    body(model, torch.tensor([[40960.0, 61440.0 - 20480.0 * smp.dp_rank(), -1.0]]))
    optimizer.step()
    assert not optimizer.overflow
    return optimizer.fp32_from_fp16_groups[0][0].detach().clone()


@pytest.mark.parametrize(("view", "sharded"), [(False, False), (True, False), (False, True)])
def test_sums_over_replicas_do_not_overflow(pool2: RankPool, view: bool, sharded: bool) -> None:
    """The mean fits into float16, the sum doesn't."""
    config = {**TWO_REPLICAS, "microbatches": 1, "fp16": True, "shard_optimizer_state": sharded}
    masters = pool2.run(large_gradients, view, config=config)
    wanted = torch.tensor([-40960.0, -51200.0, 1.0])
    if sharded:
        assert torch.equal(torch.cat(masters), wanted)
    else:
        assert all(torch.equal(m, wanted) for m in masters)


FULL_SUMS = {"_fp32_grad_accumulation": True, "microbatches": 4}


def full_sums(view: bool) -> tuple[dict[str, Tensor], list[torch.dtype]]:
    """GPT-2, whose tied embedding gets gradients from glue and from several units."""
    made = models.make("gpt2")
    model = smp.DistributedModel(made.model, gradient_as_bucket_view=view)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def body(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    body(model, made.make_batch(smp.dp_rank(), 8))
    dtypes = [p.grad.dtype for p in model.local_parameters()]
    optimizer.step()
    assert all(p.dtype is torch.bfloat16 for p in model.local_parameters())
    return masters_of(optimizer), dtypes


@pytest.mark.parametrize(
    ("layout", "view"), [("pp", False), ("dp", True), pytest.param("dp", False, marks=pytest.mark.heavy)]
)
def test_gradients_add_up_in_full(pool2: RankPool, layout: str, view: bool) -> None:
    """Bit for bit what sums in fp32 give over stages; over replicas up to the order of the sum."""
    degree = {"pipeline_parallel_degree": 2} if layout == "pp" else {"ddp": True}
    results = pool2.run(full_sums, view, config={**FULL_SUMS, **degree, "bf16": True, "log_level": "warning"})
    num_replicas = 1 if layout == "pp" else 2
    masters: list[dict[str, Tensor]] = []
    for full in (True, False):
        made = models.make("gpt2")
        data = [made.make_batch(replica, 8) for replica in range(num_replicas)]
        parts = [{n: v.chunk(4)[i] for n, v in batch.items()} for batch in data for i in range(4)]

        def losses_of(step: int, made: Any = made, parts: Any = parts) -> list[Callable[..., Tensor]]:
            return [functools.partial(made.loss_of, batch=part) for part in parts]

        truth = half_reference.train_in_half(
            made.model,
            torch.bfloat16,
            lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
            losses_of,
            1,
            forward=FP16_Module(made.model, torch.bfloat16),
            full_sums=full,
        )
        masters.append(truth.masters[-1])
    assert any(not torch.equal(masters[0][n], masters[1][n]) for n in masters[0])
    for found, dtypes in results:
        assert all(d is torch.float32 for d in dtypes)
        for name, master in found.items():
            if name == "transformer.wte.weight":  # one process adds the two uses of a microbatch in bf16
                torch.testing.assert_close(master, masters[0][name], rtol=1e-2, atol=1e-4)
            elif layout == "pp":
                assert torch.equal(master, masters[0][name]), name
            else:
                torch.testing.assert_close(master, masters[0][name], rtol=1e-6, atol=1e-7)


# -- models of transformers -----------------------------------------------------------------------------------


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def trained_model(name: str, recompute: bool = False) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    made = models.make(name)
    model = smp.DistributedModel(made.model)
    if recompute:
        for block in models.block_names(made.model):
            smp.set_activation_checkpointing(made.model.get_submodule(block))
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()), static_loss_scale=128.0)

    @smp.step
    def body(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(body(model, made.make_batch(step, 8)).stack())
        optimizer.step()
    return losses, masters_of(optimizer), dict(model.state_dict())


QUICK = {("gpt2", "fp16"), ("t5", "bf16")}
ALL = [(n, k) for n in models.MODELS for k in ("fp16", "bf16")]


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.heavy) for c in ALL]
)
def test_models_over_two_stages(pool2: RankPool, name: str, kind: str) -> None:
    """Losses, masters and weights of one process, bit for bit where sums are taken in its order."""
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "log_level": "warning", kind: True}
    results = pool2.run(trained_model, name, config=config)
    made = models.make(name)
    losses: list[Tensor] = []

    def losses_of(step: int) -> list[Callable[..., Tensor]]:
        batch = made.make_batch(step, 8)
        parts = [{n: v.chunk(2)[i] for n, v in batch.items()} for i in range(2)]

        def loss_of(forward: Any, part: Any) -> Tensor:
            loss = made.loss_of(forward, part)
            losses.append(loss.detach())
            return loss

        return [functools.partial(loss_of, part=part) for part in parts]

    truth = half_reference.train_in_half(
        made.model,
        HALF[kind],
        lambda named: adamw([p for _, p in named]),
        losses_of,
        3,
        scale=128.0 if kind == "fp16" else 1.0,
        forward=FP16_Module(made.model, HALF[kind]),
    )
    exact = not models.MODELS[name].reordered
    tolerance = 0.0 if exact else {"fp16": 2e-3, "bf16": 2e-2}[kind]
    seen: set[str] = set()
    for found_losses, masters, weights in results:
        torch.testing.assert_close(torch.cat(found_losses), torch.stack(losses), rtol=tolerance, atol=tolerance)
        for name_, master in masters.items():
            torch.testing.assert_close(master, truth.masters[-1][name_], rtol=tolerance, atol=tolerance)
            assert torch.equal(weights[name_], master.to(HALF[kind]))
        seen |= set(masters)
    assert seen == set(truth.masters[-1])


def test_recomputed_blocks_change_nothing(pool2: RankPool) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "log_level": "warning", "bf16": True}
    plain = pool2.run(trained_model, "gpt2", config=config)
    again = pool2.run(trained_model, "gpt2", True, config=config)
    assert ranks.same(plain, again)


def tied_copies() -> tuple[list[Tensor], dict[str, Tensor]]:
    made = models.make("gpt2")
    model = smp.DistributedModel(made.model)
    for name, stage in models.even_stages(models.block_names(made.model), 2).items():
        smp.set_partition(made.model.get_submodule(name), stage)
    smp.set_partition(made.model.lm_head, 1)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()), None, True, DYNAMIC)

    @smp.step
    def body(model: Any, batch: Any) -> Tensor:
        loss = made.loss_of(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(body(model, made.make_batch(step, 8)).stack())
        if step == 1 and smp.pp_rank() == 0:
            made.model.transformer.wte.weight.grad[0, 0] = float("inf")
        optimizer.step()
        assert optimizer.overflow == (step == 1)
        copies = smp.allgather(made.model.lm_head.weight.detach(), smp.PP_GROUP)
        assert torch.equal(*copies)
    return losses, masters_of(optimizer)


def test_copies_of_tied_weights(pool2: RankPool) -> None:
    """FF-07 in half precision: the owner alone has a master; copies get its rounding."""
    config = {**TWO_STAGES, "tied_weights": "replicate", "fp16": True}
    (losses, first), (_, second) = pool2.run(tied_copies, config=config)
    assert "transformer.wte.weight" in first
    assert not any(name in second for name in ("transformer.wte.weight", "lm_head.weight"))
    assert float(losses[1].mean()) != float(losses[0].mean())
    whole = {name for name, _ in models.make("gpt2").model.named_parameters()}
    assert first.keys() | second.keys() == whole


def frozen(stage: int) -> list[float]:
    model = wrap("pp")
    module = model.get_module()
    parts = [module.blocks[0], module.blocks[1]] if stage == 0 else [module.blocks[2], module.head]
    for part in parts:
        part.requires_grad_(False)
    optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), None, True, DYNAMIC)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        ranks.train_step(model, ranks.data(step))
        norms.append(optimizer.clip_master_grads(0.01))
        optimizer.step()
    state = optimizer.state_dict()
    assert len(state["fp32_from_fp16"]) == 4
    optimizer.load_state_dict(state)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, start[name].half()) == (smp.pp_rank() == stage)
    return norms


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_trains_nothing(pool2: RankPool, stage: int) -> None:
    """FF-14 in half precision."""
    one, two = pool2.run(frozen, stage, config={**TWO_STAGES, "fp16": True})
    assert one == two
    assert all(norm > 0.01 for norm in one)


# -- what crosses a stage boundary ------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50001, 8)

    def forward(self, ids: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embedding(ids)
        positions = torch.arange(ids.shape[1], dtype=torch.float32) * 4097.0 + 0.5
        return hidden, ids, ids % 2 == 0, positions, count


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, hidden: Tensor, ids: Tensor, mask: Tensor, positions: Tensor, count: Tensor) -> dict[str, Any]:
        seen = {"hidden": hidden.dtype, "ids": ids.dtype, "mask": mask.dtype, "positions": positions.dtype}
        grad = [hidden.requires_grad, ids.requires_grad, positions.requires_grad]
        out = self.head(hidden * mask.unsqueeze(-1))
        kept = {"ids": ids.clone(), "mask": mask.clone(), "positions": positions.clone(), "count": count.clone()}
        return {"out": out, "seen": seen, "count_dtype": count.dtype, "grad": grad, **kept}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = First()
        self.second = Second()

    def forward(self, ids: Tensor, count: Tensor) -> dict[str, Any]:
        return self.second(*self.first(ids, count))


def mixed_dtypes() -> list[dict[str, Any]]:
    model = smp.DistributedModel(Mixed())
    smp.set_partition(model.get_module().second, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step(non_split_inputs=["count"])
    def body(model: Any, ids: Tensor, count: Tensor) -> Any:
        found = model(ids, count)
        model.backward(found["out"].square().mean())
        return dict(found)

    ids = torch.tensor([[50000, 49999, 2049], [1, 257, 32769]])
    found = body(model, ids, torch.tensor(70001))
    optimizer.step()
    at = {n: v.outputs if hasattr(v, "outputs") else v for n, v in found.items()}
    at["grad"] = list(zip(*at["grad"], strict=True))
    return [{n: v if n == "seen" else v[i] for n, v in at.items()} for i in range(2)]


@pytest.mark.parametrize("kind", ["fp16", "bf16", None])
def test_dtypes_over_a_stage_boundary(pool2: RankPool, kind: str | None) -> None:
    """FF-05: what isn't half precision keeps dtype and value."""
    config = {**TWO_STAGES, **({kind: True} if kind else {})}
    half = HALF[kind] if kind else torch.float32
    rows = [[50000, 49999, 2049], [1, 257, 32769]]
    for result in pool2.run(mixed_dtypes, config=config):
        for index, found in enumerate(result):
            ids = torch.tensor([rows[index]])
            assert torch.equal(found["ids"], ids)
            assert found["ids"].dtype is torch.int64
            assert torch.equal(found["mask"], ids % 2 == 0)
            assert torch.equal(found["positions"], torch.arange(3, dtype=torch.float32) * 4097.0 + 0.5)
            assert found["positions"].dtype is torch.float32
            assert found["count"] == 70001
            assert found["out"].dtype is torch.float32
            seen = {"hidden": half, "ids": torch.int64, "mask": torch.bool, "positions": torch.float32}
            assert {n: v[index] for n, v in found["seen"].items()} == seen
            assert found["count_dtype"] is torch.int64
            assert found["grad"] == (True, False, False)
