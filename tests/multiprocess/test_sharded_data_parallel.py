"""Sharded data parallelism on real processes: the numbers of one process, with a share of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
import sdp_ranks
import shardwright.torch as smp
import tp_parity
from harness import RankFailure, RankPool
from sdp_ranks import config, seeded
from sharded_models import batch, train_step, two_groups, uneven
from shardwright.errors import UsageError

HEAVY = pytest.mark.heavy


@pytest.mark.parametrize(
    ("name", "num_ranks", "degree", "microbatches"),
    [
        ("gpt2", 2, 2, 2),
        ("mlp_reuse", 4, 2, 2),
        pytest.param("gpt2", 4, 2, 1, marks=HEAVY),
        pytest.param("gpt2", 4, 4, 2, marks=HEAVY),
        pytest.param("llama", 2, 2, 1, marks=HEAVY),
        pytest.param("llama", 4, 2, 2, marks=HEAVY),
        pytest.param("t5", 2, 2, 2, marks=HEAVY),
        pytest.param("mixtral", 2, 2, 1, marks=HEAVY),
        pytest.param("resnet", 2, 2, 2, marks=HEAVY),
        pytest.param("buffered", 4, 2, 2, marks=HEAVY),
        pytest.param("root_parameters", 4, 4, 1, marks=HEAVY),
    ],
)
def test_training_equals_one_process(
    pool2: RankPool, pool4: RankPool, name: str, num_ranks: int, degree: int, microbatches: int
) -> None:
    pool = {2: pool2, 4: pool4}[num_ranks]
    runs = pool.run(sdp_ranks.train, name, config=config(degree, microbatches), timeout_s=120)
    truth = sdp_ranks.expected(name, num_ranks, microbatches)
    sdp_ranks.check(runs, truth)
    if name == "gpt2":
        unique = {n: w for n, w in truth.weights.items() if n != "lm_head.weight"}
        share = sum(w.numel() * 4 for w in unique.values()) / degree
        row = max(w[0].numel() * 4 for w in unique.values())
        for run in runs:
            assert share <= run.param_bytes <= share + row * len(unique)
            assert run.state_bytes <= 2 * (share + row * len(unique))
        whole = sum(run.state_bytes for run in runs[:degree])
        assert whole == 2 * share * degree


@pytest.mark.parametrize(
    "case",
    [
        tp_parity.Case("gpt2", rdp=2, sdp=2, prescaled=True),
        pytest.param(tp_parity.Case("gpt2", rdp=2, sdp=2, optimize="memory"), marks=HEAVY),
        pytest.param(tp_parity.Case("llama", rdp=2, sdp=2, microbatches=1), marks=HEAVY),
        pytest.param(tp_parity.Case("mlp", rdp=2, sdp=2, placement="spread"), marks=HEAVY),
    ],
    ids=lambda case: case.title,
)
def test_with_tensor_parallelism(pool4: RankPool, case: tp_parity.Case) -> None:
    ranks = pool4.run(tp_parity.train, case, config=case.config(), timeout_s=120)
    tp_parity.check(case, ranks, tp_parity.expected(case))


@pytest.mark.parametrize("kind", ["smp", "transformers", "lamb"])
@HEAVY
def test_together_with(pool2: RankPool, kind: str) -> None:
    """Recomputed blocks, by the library's marks and by the model's own; an optimizer that takes norms of parameters."""
    runs = pool2.run(sdp_ranks.train, "gpt2", kind, config=config(2, 2), timeout_s=120)
    make = sdp_ranks.lamb if kind == "lamb" else reference.adamw
    sdp_ranks.check(runs, sdp_ranks.expected("gpt2", 2, 2, make))


# ------------------------------------------------------------------ sizes that don't fill the ranks


def train_uneven(steps: int) -> dict[str, Any]:
    model = smp.DistributedModel(uneven())
    optimizer = smp.DistributedOptimizer(two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.01)))
    groups = list(optimizer.param_groups)
    before = sdp_ranks.whole_flat(model, optimizer)
    for name, parameter in model.get_module().named_parameters():
        assert parameter.ds_shape == uneven().get_parameter(name).shape
        assert parameter.ds_numel == parameter.ds_shape.numel()
        assert parameter.ds_tensor.ds_numel == len(parameter.ds_tensor) == -(-parameter.ds_numel // 4)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        train_step(model, 4 * batch(step, smp.dp_rank()))
        optimizer.step()
        norms.append(optimizer._global_grad_norm)
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert torch.distributed.get_process_group_ranks(optimizer.ds_param_shard_group) == [0, 1, 2, 3]
    return {
        "before": before,
        "after": sdp_ranks.whole_flat(model, optimizer),
        "weights": model.state_dict(),
        "norms": norms,
        "state": optimizer.state_dict(),
        "buffers": smp.sharded_data_parallel_checkpoint.get_buffer_names(model),
    }


def one_process(steps: int, max_norm: float) -> tuple[nn.Module, Any, list[float]]:
    model = uneven()
    optimizer = two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.01))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(4):
            for x in (4 * batch(step, replica)).chunk(2):
                (model(x).square().mean() / 2 / 4).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return model, optimizer, norms


def test_uneven_sizes_clipped_by_default(pool4: RankPool) -> None:
    """FF-16, the training part: 6, 5, 1 and 3 x 7 elements over four ranks; a norm above the default limit of 1."""
    settings = config(4, 2)
    del settings["sdp_gradient_clipping"]
    runs = pool4.run(train_uneven, 3, config=settings)
    model, optimizer, norms = one_process(3, 1.0)
    assert norms[0] > 1.5
    truth = {n: p.detach() for n, p in model.named_parameters()}
    for run in runs:
        assert run["norms"] == pytest.approx(norms, rel=1e-5)
        for name, weight in truth.items():
            torch.testing.assert_close(run["weights"][name], weight, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(run["before"][name], uneven().get_parameter(name).detach(), rtol=0, atol=0)
            assert torch.equal(run["after"][name], run["weights"][name])
            assert torch.equal(run["weights"][name], runs[0]["weights"][name])
        state, wanted = run["state"], optimizer.state_dict()
        assert state["state"].keys() == wanted["state"].keys()
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in wanted["param_groups"]]
        for index, values in wanted["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(state["state"][index][key], value, rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------ half precision


def train_in_half() -> dict[str, Any]:
    """Four steps, of which the second overflows on one rank."""
    model = smp.DistributedModel(uneven())
    optimizer = smp.DistributedOptimizer(
        two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.01)),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 2},
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    told = []
    for step in range(4):
        optimizer.zero_grad()
        x = batch(step, smp.dp_rank())
        if step == 1 and smp.rank() == 1 and smp.state.cfg.fp16:
            x[0, 0] = float("inf")
        loss = train_step(model, x).stack()
        optimizer.step()
        if not optimizer.overflow:
            scheduler.step()
        told.append((loss.tolist(), optimizer.overflow, optimizer.loss_scale))
    state = optimizer.state_dict()
    return {
        "told": told,
        "weights": model.state_dict(),
        "masters": state["fp32_from_fp16"],
        "state": state["state"],
        "flat": sdp_ranks.whole_flat(model, optimizer) if smp.state.cfg.sharded_data_parallel_degree > 1 else {},
        "names": optimizer._full_group_names(),
    }


@pytest.mark.parametrize("kind", ["fp16", pytest.param("bf16", marks=HEAVY)])
def test_half_precision_equals_the_unsharded(pool2: RankPool, kind: str) -> None:
    """Bit for bit: two ranks, one microbatch, so that no sum has another order. FF-12: all ranks skip alike."""
    plain = pool2.run(train_in_half, config={**config(1), kind: True})
    runs = pool2.run(train_in_half, config={**config(2), kind: True})
    assert [overflow for _, overflow, _ in plain[0]["told"]] == [False, kind == "fp16", False, False]
    for run, want in zip(runs, plain, strict=True):
        torch.testing.assert_close(run["told"], want["told"], rtol=0, atol=0, equal_nan=True)
        for name, weight in want["weights"].items():
            assert torch.equal(run["weights"][name], weight), name
        assert run["masters"].keys() == want["masters"].keys()
        flat = [run["flat"][name] for group in run["names"] for name in group]
        for index, master in want["masters"].items():
            assert torch.equal(run["masters"][index], master)
            assert torch.equal(flat[index], master)
            for key, value in want["state"].get(index, {}).items():
                assert torch.equal(run["state"][index][key], value)


# ------------------------------------------------------------------ missing gradients, accumulation, loading


class Sometimes(nn.Module):
    """One linear is never used, one at even steps, one on the first replica only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.never, self.even, self.first = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, even: bool, first: bool) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if even:
            x = x + self.even(x)
        if first:
            x = x + self.first(x)
        return x


@smp.step
def step_sometimes(model: Any, x: Tensor, even: bool, first: bool) -> Tensor:
    loss = model(x, even, first).square().mean()
    model.backward(loss)
    return loss


def train_sometimes() -> dict[str, Any]:
    model = smp.DistributedModel(seeded(Sometimes))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    missing = []
    for step in range(3):
        optimizer.zero_grad()
        step_sometimes(model, batch(step, smp.dp_rank()), step % 2 == 0, smp.dp_rank() == 0)
        missing.append([n for n, p in model.local_named_parameters() if p.grad is None])
        optimizer.step()
    return {"weights": model.state_dict(), "missing": missing, "stateless": len(optimizer.state)}


def test_parameters_without_gradients(pool4: RankPool) -> None:
    """FF-15: nothing hangs, a gradient missing on a replica is zero, one missing everywhere is none."""
    runs = pool4.run(train_sometimes, config=config(2))
    model = seeded(Sometimes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for replica in range(4):
            (model(batch(step, replica), step % 2 == 0, replica == 0).square().mean() / 4).backward()
        optimizer.step()
    for run in runs:
        assert run["missing"][0] == ["never.weight", "never.bias"]
        assert run["missing"][1] == ["never.weight", "never.bias", "even.weight", "even.bias"]
        for name, weight in model.named_parameters():
            torch.testing.assert_close(run["weights"][name], weight.detach(), rtol=1e-5, atol=1e-6)


def accumulate(passes: int, zero: bool) -> dict[str, Tensor]:
    model = smp.DistributedModel(uneven(), backward_passes_per_step=passes)
    train_step(model, batch(0, smp.dp_rank()))
    train_step(model, batch(1, smp.dp_rank()))
    if not zero:  # two whole cycles more, on top
        for step in range(2, 2 + 2 * passes):
            train_step(model, batch(step, smp.dp_rank()))
    from parity import held_gradients

    return {n: g for n, g in held_gradients(model).items() if g is not None}


@pytest.mark.parametrize(("passes", "zero"), [(2, True), (2, False), (1, False)])
def test_accumulation_over_steps(pool4: RankPool, passes: int, zero: bool) -> None:
    """FF-11: several steps for one reduction, and gradients that were not cleared."""
    runs = pool4.run(accumulate, passes, zero, config=config(2, 2))
    model = uneven()
    for step in range(2 if zero else 2 + 2 * passes):
        for replica in range(4):
            for x in batch(step, replica).chunk(2):
                (model(x).square().mean() / 8).backward()
    for run in runs:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(run[name], parameter.grad, rtol=1e-5, atol=1e-6)


def resume() -> dict[str, Tensor]:
    """Two steps, everything into new wrappers, two more; and by this rank's own dicts."""
    results = {}
    for partial in (False, True):
        model = smp.DistributedModel(uneven())
        optimizer = smp.DistributedOptimizer(two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.01)))
        for step in range(2):
            optimizer.zero_grad()
            train_step(model, batch(step, smp.dp_rank()))
            optimizer.step()
        weights = model.local_state_dict() if partial else model.state_dict()
        weights = {k: v.clone() if isinstance(v, Tensor) else v for k, v in weights.items()}
        state = optimizer.local_state_dict(gather_if_shard=False) if partial else optimizer.state_dict()
        smp.shutdown()
        smp.init(config(2, 2))
        model = smp.DistributedModel(uneven(seed=3))
        optimizer = smp.DistributedOptimizer(two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.5)))
        assert model.load_state_dict(weights, same_partition_load=partial).missing_keys == []
        optimizer.load_state_dict(state)
        for step in range(2, 4):
            optimizer.zero_grad()
            train_step(model, batch(step, smp.dp_rank()))
            optimizer.step()
        results[str(partial)] = model.state_dict()
        smp.shutdown()
        smp.init(config(2, 2))
    return results


def four_steps() -> dict[str, Tensor]:
    model = smp.DistributedModel(uneven())
    optimizer = smp.DistributedOptimizer(two_groups(model, lambda p: torch.optim.AdamW(p, lr=0.01)))
    for step in range(4):
        optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


# ------------------------------------------------------------------ uses of the model


def plain_loop() -> dict[str, Any]:
    """Without steps: forward, backward, evaluation, and a forward whose result is thrown away."""
    model = smp.DistributedModel(seeded(lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    names = [n for n, _ in model.named_parameters()]
    outputs = []
    for step in range(3):
        model(batch(9, 0))
        with torch.no_grad():
            outputs.append(model.eval()(batch(8, 0)))
        assert [n for n, _ in model.named_parameters()] == names
        assert all(hasattr(p, "ds_tensor") for p in model.parameters())
        model.train()
        optimizer.zero_grad()
        model(batch(step, smp.dp_rank())).square().mean().backward()
        optimizer.step()
    return {"outputs": outputs, "weights": model.state_dict()}


def test_a_plain_training_loop(pool4: RankPool) -> None:
    runs = pool4.run(plain_loop, config=config(2))
    model = seeded(lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with torch.no_grad():
            wanted = model(batch(8, 0))
        for run in runs:
            torch.testing.assert_close(run["outputs"][step], wanted, rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
        for replica in range(4):
            (model(batch(step, replica)).square().mean() / 4).backward()
        optimizer.step()


def use_elsewhere(register: bool) -> dict[str, Tensor]:
    plain = seeded(sdp_ranks.UsedElsewhere)
    if register:
        smp.register_parameter(plain, plain.blocks[0].weight)  # type: ignore[union-attr, index]
    model = smp.DistributedModel(plain)
    train_step(model, batch(0, smp.dp_rank())[:, :6])
    from parity import held_gradients

    return {n: g for n, g in held_gradients(model).items() if g is not None}


def test_a_parameter_that_another_module_uses(pool2: RankPool) -> None:
    runs = pool2.run(use_elsewhere, True, config=config(2))
    model = seeded(sdp_ranks.UsedElsewhere)
    for replica in range(2):
        (model(batch(0, replica)[:, :6]).square().mean() / 2).backward()
    for run in runs:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(run[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_parameter_used_elsewhere_without_saying_so(pool2: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool2.run(use_elsewhere, False, config=config(2))
    for text in caught.value.tracebacks.values():
        assert "call smp.register_parameter(module that uses it, parameter) before smp.DistributedModel" in text


class Failing(nn.Module):
    """Raises when told to, between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.fail:
                raise ValueError("told to")
        return x


def fail_and_go_on() -> dict[str, Tensor]:
    """A step that raises on all ranks leaves nothing behind; parameters are frozen and unfrozen between steps."""
    model = smp.DistributedModel(seeded(Failing))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = model.get_module()
    for step in range(4):
        plain.fail = True
        with pytest.raises(ValueError, match="told to"):
            train_step(model, batch(step, smp.dp_rank()))
        plain.fail = False
        for parameter in plain.blocks[1].parameters():
            parameter.requires_grad_(step != 1)
        optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


def test_after_an_error_and_with_frozen_blocks(pool2: RankPool) -> None:
    runs = pool2.run(fail_and_go_on, config=config(2, 2))
    model = seeded(Failing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for parameter in model.blocks[1].parameters():  # type: ignore[union-attr, index]
            parameter.requires_grad_(step != 1)
        for replica in range(2):
            for x in batch(step, replica).chunk(2):
                (model(x).square().mean() / 4).backward()
        optimizer.step()
    for run in runs:
        for name, weight in model.named_parameters():
            torch.testing.assert_close(run[name], weight.detach(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ refusals


def refused() -> list[str]:
    model = smp.DistributedModel(uneven())
    parameters = list(model.parameters())
    attempts = [
        lambda: smp.DistributedOptimizer(torch.optim.LBFGS(parameters)),
        lambda: smp.DistributedOptimizer(torch.optim.SGD(uneven().parameters(), lr=1.0)),
        lambda: model.join(),
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        lambda: model.half(),
        lambda: model.cpu(),
        lambda: smp.register_parameter(model, parameters[0]),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        found.append(str(caught.value))
    assert model.float() is model
    assert model.to("cpu") is model
    return found


def test_what_is_refused(pool2: RankPool) -> None:
    for told in pool2.run(refused, config=config(2)):
        expected = [
            "LBFGS can't have its state sharded",
            "parameters that the wrapped model doesn't have",
            "join() with 'sharded_data_parallel_degree' above 1",
            "register_comm_hook() with 'sharded_data_parallel_degree' above 1",
            "dtype of a model can't change",
            "model.cpu() can't gather",
            "came after the model was sharded",
        ]
        for message, start in zip(told, expected, strict=True):
            assert start in message


def load_on_one() -> None:
    model = smp.DistributedModel(uneven())
    if smp.rank() == 0:
        model.load_state_dict(uneven(seed=1).state_dict())
    train_step(model, batch(0, smp.dp_rank()))


def test_loading_on_one_rank_only_is_refused_on_all(pool2: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool2.run(load_on_one, config=config(2))
    for text in caught.value.tracebacks.values():
        assert "a state dict was loaded into the model on some data-parallel ranks only" in text


class Branch(nn.Module):
    """Every rank calls another one of two equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[smp.rank()](x)  # type: ignore[no-any-return]


def branch() -> None:
    train_step(smp.DistributedModel(seeded(Branch)), batch(0, 0))


def test_ranks_that_call_different_blocks_are_told(pool2: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool2.run(branch, config=config(2), timeout_s=40)
    for text in caught.value.tracebacks.values():
        assert "ranks of a shard group have called different blocks" in text


def test_resumed_training_equals_the_uninterrupted(pool4: RankPool) -> None:
    whole = pool4.run(four_steps, config=config(2, 2))[0]
    for run in pool4.run(resume, config=config(2, 2)):
        for resumed in run.values():
            for name, weight in whole.items():
                assert torch.equal(resumed[name], weight), name


def delayed() -> dict[str, Tensor]:
    torch.manual_seed(5)
    with smp.delay_param_initialization():
        plain = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))
    assert all(p.is_meta for p in plain.parameters())
    model = smp.DistributedModel(plain)
    train_step(model, batch(0, smp.dp_rank()))
    return model.state_dict()  # type: ignore[no-any-return]


def test_delayed_initialisation_gives_the_same_values(pool2: RankPool) -> None:
    """Parameters get their values and are sharded unit by unit."""
    unsharded = pool2.run(delayed, config=config(1))
    for run in pool2.run(delayed, config=config(2)):
        assert run.keys() == unsharded[0].keys()
        assert all(torch.equal(run[name], value) for name, value in unsharded[0].items())
