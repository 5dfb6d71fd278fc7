"""Half precision in a world of one: the chain of modules, casts, masters, the optimizer's members."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import half_reference
import shardwright.torch as smp
from client_optimizers import ClientOptimizer
from shardwright.engine.half_precision import FP16_Module, to_full, to_half
from shardwright.errors import UsageError

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(params=["fp16", "bf16"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    smp.init({"microbatches": 2, "log_level": "warning", request.param: True})
    yield request.param
    smp.shutdown()


@pytest.fixture
def fp16() -> Iterator[None]:
    smp.init({"microbatches": 2, "log_level": "warning", "fp16": True})
    yield
    smp.shutdown()


class Net(nn.Module):
    """A norm, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("ids", torch.tensor([0, 2049, 50000]))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def adam(named: Any) -> torch.optim.Optimizer:
    members = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in members if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in members if not n.endswith("weight")], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def masters_of(optimizer: Any) -> dict[str, Tensor]:
    index = optimizer.param_name_to_index()
    held = optimizer._param_index_to_param_local()
    return {name: held[i].detach().clone() for name, i in index.items()}


# -- the chain ----------------------------------------------------------------------------------------------


def test_chain_of_modules(kind: str) -> None:
    module = net()
    parameters = list(module.parameters())
    model = smp.DistributedModel(module)
    if kind == "fp16":
        assert isinstance(model.module.module, FP16_Module)
        assert model.module.module.module is module
    else:
        assert model.module.module is module
    assert model.get_module() is module
    assert model.module.first is module.first  # unknown attributes are passed on
    assert model.first is module.first
    assert all(p is q for p, q in zip(parameters, module.parameters(), strict=True))
    assert all(p.dtype is HALF[kind] for p in model.parameters())
    buffers = dict(module.named_buffers())
    assert buffers["norm.running_mean"].dtype is HALF[kind]
    assert buffers["norm.num_batches_tracked"].dtype is torch.int64
    assert torch.equal(buffers["ids"], torch.tensor([0, 2049, 50000]))
    assert buffers["mask"].dtype is torch.bool
    assert set(model.state_dict()) == set(module.state_dict())
    hops = "module.module." if kind == "fp16" else "module."
    assert all(n.startswith(f"module.{hops[7:]}") for n, _ in model.named_parameters())


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Box:
    value: Tensor
    name: str = "box"


class Carrier:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_casts_reach_into_containers() -> None:
    ids, mask, x = torch.tensor([50000]), torch.tensor([True]), torch.tensor([1.0, 1e-3])
    carrier = Carrier(x)
    given = {"a": [x, ids, None], "p": Pair(x.double(), "text"), "b": Box(x), "m": mask, "c": carrier, "o": OrderedDict(x=x)}
    half = to_half(given, torch.bfloat16)
    assert half["a"][0].dtype is half["p"].left.dtype is half["b"].value.dtype is half["o"]["x"].dtype is torch.bfloat16
    assert half["a"][1] is ids
    assert half["m"] is mask
    assert half["c"] is carrier
    assert isinstance(half["p"], Pair)
    assert isinstance(half["b"], Box)
    assert given["b"].value is x  # type: ignore[attr-defined]
    full = to_full(half, torch.bfloat16)
    assert torch.equal(full["a"][0], x.bfloat16().float())
    unchanged = {"a": [ids]}
    assert to_half(unchanged, torch.float16) is unchanged
    assert to_full(x.half(), torch.bfloat16).dtype is torch.float16


def test_inputs_and_outputs(kind: str) -> None:
    seen: list[torch.dtype] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, ids: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
            seen.extend([x.dtype, ids.dtype, scale.dtype])
            return {"y": x * self.weight * scale, "ids": ids, "full": x.float()}

    model = smp.DistributedModel(Spy())
    out = model(torch.ones(2, 3), torch.tensor([2**20, 1]), scale=torch.ones(()))
    assert seen == [HALF[kind], torch.int64, HALF[kind]]
    assert {n: t.dtype for n, t in out.items()} == {"y": torch.float32, "ids": torch.int64, "full": torch.float32}


# -- training ---------------------------------------------------------------------------------------------


def reference(kind: str, steps: int, **options: Any) -> half_reference.HalfRun:
    def losses(step: int) -> Any:
        return [lambda forward, x=x: forward(x).square().mean() for x in batch(step).chunk(2)]

    return half_reference.train_in_half(net(), HALF[kind], adam, losses, steps, **options)


@pytest.mark.parametrize("clip", [False, True])
def test_masters_equal_one_process(kind: str, clip: bool) -> None:
    scale = 64.0 if kind == "fp16" else 1.0
    truth = reference(kind, 4, scale=scale, max_norm=0.05 if clip else None)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), static_loss_scale=64.0)
    assert optimizer.loss_scale == scale
    for step in range(4):
        optimizer.zero_grad()
        loss = train_step(model, batch(step)).reduce_mean()
        assert loss.dtype is torch.float32
        if clip:
            norm = optimizer.clip_master_grads(0.05)
            assert norm == pytest.approx(truth.norms[step], rel=1e-6)
            assert norm > 0.05
        optimizer.step()
        assert optimizer.overflow is False
        found = masters_of(optimizer)
        for name, parameter in model.get_module().named_parameters():
            if clip:
                torch.testing.assert_close(found[name], truth.masters[step][name], rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(found[name], truth.masters[step][name])
            assert torch.equal(parameter, found[name].to(HALF[kind]))


def test_bf16_neither_scales_nor_skips() -> None:
    smp.init({"bf16": True, "log_level": "warning"})
    try:
        model = smp.DistributedModel(net())
        optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), None, True, {"init_scale": 8.0})
        assert optimizer.loss_scale == optimizer.loss_scaler.cur_scale == 1.0
        assert optimizer.dynamic_loss_scale is False
        train_step(model, batch(0))
        model.get_module().first.weight.grad[0, 0] = float("inf")
        optimizer.step()
        assert optimizer.overflow is False
    finally:
        smp.shutdown()


@pytest.mark.usefixtures("fp16")
def test_overflow_skips_and_the_scale_follows() -> None:
    def poison(step: int, named: dict[str, nn.Parameter]) -> None:
        if step in (1, 2, 5):
            gradient = named["last.bias"].grad
            assert gradient is not None
            gradient[1] = float("nan" if step == 2 else "inf")

    options = {"scale": 2.0**10, "window": 2, "dynamic": True}
    truth = reference("fp16", 7, poison=poison, max_norm=1e9, **options)
    assert truth.skipped == [False, True, True, False, False, True, False]
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(
        adam(model.named_parameters()),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 2, "min_scale": 1, "delayed_shift": 1},
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 1.0)
    for step in range(7):
        optimizer.zero_grad()
        train_step(model, batch(step))
        poison(step, dict(model.get_module().named_parameters()))
        before = masters_of(optimizer)
        norm = optimizer.clip_master_grads(1e9)
        assert norm == pytest.approx(truth.norms[step], rel=1e-6)
        optimizer.step()
        assert optimizer.overflow is truth.skipped[step]
        if not optimizer.overflow:
            scheduler.step()
        assert optimizer.loss_scale == truth.scales[step]
        after = masters_of(optimizer)
        assert all(torch.equal(after[n], truth.masters[step][n]) for n in after)
        assert optimizer.overflow is all(torch.equal(after[n], before[n]) for n in after)
        weights = dict(model.get_module().named_parameters())
        assert all(torch.equal(weights[n], truth.weights[step][n]) for n in weights)


@pytest.mark.usefixtures("fp16")
def test_the_optimizer_s_members() -> None:
    model = smp.DistributedModel(net())
    given = adam(model.named_parameters())
    groups = list(given.param_groups)
    optimizer = smp.DistributedOptimizer(given, static_loss_scale=4.0)
    assert optimizer is given
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    assert optimizer.optimizer is not optimizer
    assert optimizer.optimizer.state is optimizer.state
    for one, two, three in zip(groups, optimizer.param_groups, optimizer.optimizer.param_groups, strict=True):
        assert one is two is three
    assert not hasattr(optimizer, "train")
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    assert all(p.dtype is torch.float32 for p in parameters)
    assert [p for g in optimizer.fp32_from_fp16_groups for p in g] == parameters
    halves = [p for g in optimizer.fp16_groups for p in g]
    assert {id(p) for p in halves} == {id(p) for p in model.parameters()}
    assert optimizer.fp32_from_fp32_groups == [[], []]
    assert optimizer.master_params_created
    assert optimizer.fp32_from_fp16_paramid_groups[0][0] == id(parameters[0])
    assert optimizer.fp32paramid_from_fp16paramid[id(halves[0])] == id(parameters[0])
    assert optimizer.master_is_distributed[id(parameters[0])] is False
    assert optimizer.master_distribution_axis[id(parameters[0])] is None
    assert optimizer._param_id_to_index()[id(parameters[1])] == 1
    optimizer.loss_scale = 16.0
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scaler.cur_scale == 16.0
    assert torch.equal(optimizer.scale_loss(torch.ones((), dtype=torch.float16)), torch.tensor(16.0))


@pytest.mark.usefixtures("fp16")
def test_gradients_are_cleared_everywhere() -> None:
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), static_loss_scale=8.0)
    for options, left in (({}, None), ({"set_to_none": False}, 0.0), ({"set_grads_to_None": True}, None)):
        train_step(model, batch(0))
        optimizer.update_master_grads()
        weight = model.get_module().first.weight
        master = next(m for m in optimizer.fp32_from_fp16_groups[0] if m.shape == weight.shape)
        assert torch.equal(master.grad, weight.grad.float() / 8)
        optimizer.zero_grad(**options)
        for gradient in (master.grad, weight.grad):
            assert gradient is None if left is None else bool((gradient == 0).all())


@pytest.mark.usefixtures("fp16")
def test_gradients_are_taken_once() -> None:
    """An evaluation between clipping and the update doesn't undo the clipping; another backward is taken in."""

    @smp.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=8.0)
    train_step(model, batch(0))
    norm = optimizer.clip_master_grads(1e-3)
    assert norm > 1e-2
    before = masters_of(optimizer)
    with torch.no_grad():
        evaluate(model, batch(1))
    optimizer.step()
    after = masters_of(optimizer)
    moved = torch.stack([(after[n] - before[n]).norm() for n in after]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)
    for times in (1, 2):
        train_step(model, batch(0))
        if times == 1:
            optimizer.zero_grad()
            train_step(model, batch(0))
        optimizer.update_master_grads()
        total = torch.stack([m.grad.norm() for m in optimizer.fp32_from_fp16_groups[0] if m.grad is not None]).norm()
        assert float(total) == pytest.approx(times * norm, rel=1e-2)


@pytest.mark.usefixtures("fp16")
def test_every_way_to_backward() -> None:
    """optimizer.backward in a step and outside, and by hand with scale_loss."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.named_parameters()), static_loss_scale=32.0)

    @smp.step
    def body(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.backward(loss)
        return loss

    found = []
    for way in ("model", "step", "outside", "by hand"):
        optimizer.zero_grad()
        if way == "model":
            train_step(model, batch(0))
        elif way == "step":
            body(model, batch(0))
        else:
            loss = torch.stack([model(x).square().mean() for x in batch(0).chunk(2)]).mean()
            optimizer.backward(loss) if way == "outside" else optimizer.scale_loss(loss).backward()
        optimizer.update_master_grads()
        found.append([m.grad.clone() for g in optimizer.fp32_from_fp16_groups for m in g if m.grad is not None])
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


@pytest.mark.usefixtures("fp16")
def test_schedulers_on_either_object() -> None:
    model = smp.DistributedModel(net())
    given = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.LambdaLR(given, lambda epoch: 1.0 if epoch == 0 else 0.5)
    optimizer = smp.DistributedOptimizer(given)
    outer = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inner = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    weight = model.get_module().first.weight.clone()
    train_step(model, batch(0))
    optimizer.step()
    assert not torch.equal(weight, model.get_module().first.weight)
    early.step()
    outer.step()
    inner.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.usefixtures("fp16")
def test_frozen_and_full_precision_parameters() -> None:
    module = net()
    module.first.weight.requires_grad_(False)
    model = smp.DistributedModel(module)
    module.last.float()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    assert len(optimizer.param_groups[0]["params"]) == 6
    assert [p.shape for p in optimizer.fp32_from_fp32_groups[0]] == [module.last.weight.shape, module.last.bias.shape]
    assert module.first.weight in set(optimizer.param_groups[0]["params"])
    optimizer.add_param_group({"params": []})
    before = module.first.weight.clone()

    def run() -> None:
        module.first.bias.grad = torch.ones(7, dtype=torch.float16)
        module.last.bias.grad = torch.ones(3)
        module.first.weight.grad = torch.ones(7, 5).half() if module.first.weight.requires_grad else None
        optimizer.step()

    run()
    assert torch.equal(module.first.weight, before)
    module.first.weight.requires_grad_(True)  # unfrozen: it gets a master now
    run()
    assert not torch.equal(module.first.weight, before)
    assert all(p.dtype is torch.float32 for p in optimizer.param_groups[0]["params"])
    assert set(optimizer.param_name_to_index()) == {n for n, _ in module.named_parameters()}


@pytest.mark.usefixtures("fp16")
def test_what_is_refused() -> None:
    model = smp.DistributedModel(net())
    with pytest.raises(UsageError, match="ClientOptimizer is no torch optimizer"):
        smp.DistributedOptimizer(ClientOptimizer(adam(model.named_parameters())))
    with pytest.raises(UsageError, match="LBFGS"):
        smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="'window'"):
        smp.DistributedOptimizer(adam(model.named_parameters()), dynamic_loss_scale=True, window=3)
    smp.DistributedOptimizer(adam(model.named_parameters()))
    with pytest.raises(UsageError, match="second optimizer"):
        smp.DistributedOptimizer(adam(model.named_parameters()))


# -- state ------------------------------------------------------------------------------------------------


def start(scale: float = 2.0**8) -> tuple[Any, Any]:
    model = smp.DistributedModel(net())
    arguments = {"init_scale": scale, "scale_window": 2}
    return model, smp.DistributedOptimizer(
        adam(model.named_parameters()), dynamic_loss_scale=True, dynamic_loss_args=arguments
    )


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        train_step(model, batch(step))
        optimizer.step()


@pytest.mark.parametrize("form", ["local", "full"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_state_goes_on_bitwise(kind: str, form: str, first: str) -> None:
    """FF-28, FF-29: masters, moments and the scale, in whichever order they are loaded."""
    model, optimizer = start()
    steps(model, optimizer, range(3))
    saved = optimizer.local_state_dict() if form == "local" else optimizer.state_dict()
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    assert set(saved) >= {"state", "param_groups", "fp32_from_fp16", "loss_scaler", "dynamic_loss_scale", "overflow"}
    assert ("_smp_is_partial" in saved) == (form == "local")
    assert all(m.dtype is torch.float32 for m in saved["fp32_from_fp16"].values())
    assert "fp32_from_fp16" not in saved["state"][0]
    saved = {key: (value if key != "fp32_from_fp16" else {i: m.clone() for i, m in value.items()}) for key, value in saved.items()}
    saved["state"] = {i: {k: v.clone() for k, v in values.items()} for i, values in saved["state"].items()}
    steps(model, optimizer, range(3, 6))
    wanted, scale = masters_of(optimizer), optimizer.loss_scale
    smp.shutdown()
    smp.init({"microbatches": 2, "log_level": "warning", kind: True})
    model, optimizer = start(scale=4.0)
    loads = [lambda: model.load_state_dict(weights), lambda: optimizer.load_state_dict(saved)]
    for load in loads if first == "model" else reversed(loads):
        load()
    assert optimizer.optimizer.state is optimizer.state
    assert optimizer.optimizer.param_groups is optimizer.param_groups
    assert all(torch.equal(m.to(HALF[kind]), weights[n]) for n, m in masters_of(optimizer).items())
    steps(model, optimizer, range(3, 6))
    assert optimizer.loss_scale == scale
    found = masters_of(optimizer)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.usefixtures("fp16")
def test_masters_follow_loaded_weights() -> None:
    model, optimizer = start()
    steps(model, optimizer, range(2))
    model.load_state_dict({n: torch.zeros_like(v) for n, v in model.state_dict().items()})
    assert all(bool((m == 0).all()) for m in masters_of(optimizer).values())
    with torch.no_grad():
        model.get_module().first.weight.fill_(3.0)
    optimizer.reload_model_params()
    assert bool((masters_of(optimizer)["first.weight"] == 3).all())
    plain = optimizer.orig_state_dict()
    assert set(plain) == {"state", "param_groups"}
    optimizer.load_state_dict(plain)  # without masters: they stay
    assert bool((masters_of(optimizer)["first.weight"] == 3).all())


@pytest.mark.parametrize("cls", [smp.optimizers.FusedLamb, smp.optimizers.FusedNovoGrad, torch.optim.Adagrad, torch.optim.SGD])
def test_other_optimizers(kind: str, cls: Any) -> None:
    """Those with norms, with state from the start, and without state."""

    def losses(step: int) -> Any:
        return [lambda forward, x=x: forward(x).square().mean() for x in batch(step).chunk(2)]

    truth = half_reference.train_in_half(
        net(), HALF[kind], lambda named: cls([p for _, p in named], lr=0.1), losses, 3
    )
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(cls(model.parameters(), lr=0.1))
    steps(model, optimizer, range(3))
    found = masters_of(optimizer)
    assert all(torch.equal(found[n], truth.masters[-1][n]) for n in found)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert {id(p) for p in optimizer.state} <= {id(p) for g in optimizer.param_groups for p in g["params"]}
