"""The dry run sees order, sizes and FLOPs, and leaves no trace of itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from partition_models import LM, TRANSFORMERS, Case, Hostile, ids, mixtral, resnet
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.partition.trace import is_tracing, trace


@pytest.mark.parametrize("make", [*TRANSFORMERS.values(), resnet], ids=[*TRANSFORMERS, "resnet"])
def test_fake_forward_sees_the_flops_of_a_real_one(make: Callable[[], Case]) -> None:
    model, inputs = make()
    found = trace(model, (), inputs)
    assert (found.how, found.reason) == ("fake", "")
    flops = sum(record.flops + record.trailing_flops for record in found.records.values())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    # ours also counts CPU attention and grouped products, which the counter doesn't know
    assert flops >= counter.get_total_flops() > 0
    if make is resnet:
        assert flops == counter.get_total_flops()
    assert flops < 2 * counter.get_total_flops() or make is mixtral


def test_call_order_calls_and_output_sizes() -> None:
    found = trace(LM(2), (ids(32),)).records
    order = sorted(found, key=lambda name: found[name].first_call)
    assert [name for name in order if not name.startswith("layers.") or name.count(".") == 1] == [
        "",
        "embed",
        "layers.0",
        "layers.1",
        "norm",
        "head",
    ]
    assert order.index("layers.0.mlp.2") < order.index("layers.1")
    assert found["layers.1"].output_bytes == 2 * 8 * 16 * 4
    assert found["head"].flops == 2 * 16 * 16 * 32
    assert found["layers.0.norm1"].num_calls == 1


def test_only_the_residual_stream_crosses_between_blocks_and_more_inside_them() -> None:
    found = trace(LM(2), (ids(32),)).records
    stream = 2 * 8 * 16 * 4
    assert found["layers.1"].entry_bytes == stream
    assert found["layers.1.norm2"].entry_bytes == stream
    assert found["layers.1.mlp"].entry_bytes == 2 * stream
    assert found["layers.1.mlp.2"].entry_bytes == 5 * stream


def test_code_after_a_child_counts_with_the_child() -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.act(self.first(x)) @ torch.ones(4, 4)).sum()

    found = trace(Tail(), (torch.ones(2, 4),)).records
    assert set(found) == {"", "first", "second"}  # no parameters: code of the caller
    assert found["first"].trailing_flops == 2 * 2 * 4 * 4
    assert found["second"].trailing_flops == 0
    assert found[""].flops == 0


def test_loss_is_assumed_only_if_the_model_returns_none() -> None:
    class WithLoss(LM):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).sum()

    plain, own = trace(LM(1), (ids(32),)).records, trace(WithLoss(1), (ids(32),)).records
    assert plain[""].trailing_work > 0
    assert own[""].trailing_work == 0
    assert own["head"].trailing_work > 0


def test_reused_module_counts_every_call() -> None:
    class Reuse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.lin(self.lin(x)))

    record = trace(Reuse(), (torch.ones(2, 4),)).records["lin"]
    assert record.num_calls == 3
    assert record.flops == 3 * 2 * 2 * 4 * 4


def test_borrowed_parameter_is_noticed() -> None:
    class Borrower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight.t() + self.bias

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), Borrower()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x), self.embed.weight)

    assert trace(Model(), (torch.zeros(2, 3, dtype=torch.long),)).borrowed == (("head", "embed"),)


class BranchesOnValue(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if out.sum().item() < 1e9 else -out


@pytest.mark.parametrize(("kind", "how"), [(Hostile, "fake"), (BranchesOnValue, "real")])
def test_nothing_is_left_behind(kind: type[nn.Module], how: str) -> None:
    torch.manual_seed(0)
    model = kind()
    calls: list[int] = []
    hook = model.lin.register_forward_hook(lambda *_: calls.append(1))
    model.lin.weight.grad = torch.ones(4, 4)
    x = torch.ones(4, 4)
    before = {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "ids": [id(p) for p in [*model.parameters(), *model.buffers()]],
        "vars": {name: set(vars(m)) for name, m in model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()),
    }
    found = trace(model, (x,))
    assert found.how == how
    assert (found.reason == "") == (how == "fake")
    assert not is_tracing()
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before["vars"]
    assert [id(p) for p in [*model.parameters(), *model.buffers()]] == before["ids"]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before["hooks"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before["state"][name]), name
    assert random.getstate() == before["random"][0]
    assert np.array_equal(np.random.get_state()[1], before["random"][1])
    assert torch.equal(torch.get_rng_state(), before["random"][2])
    assert model.cache is None
    assert model.history == []
    assert model.table == {"a": 1}
    assert model.box.parts == {"seen": []}
    assert torch.equal(model.total, torch.zeros(4))
    assert model.training
    assert model.lin.training
    assert model.lin.weight.requires_grad
    assert torch.equal(model.lin.weight.grad, torch.ones(4, 4))
    assert model.bn.weight.grad is None
    assert torch.equal(x, torch.ones(4, 4))
    assert not calls  # hooks of the script may record what they see: a trace runs none
    hook.remove()


def test_is_tracing_inside_and_only_there() -> None:
    seen: list[bool] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(is_tracing())
            return super().forward(x)

    model = Asks(2, 2)
    trace(model, (torch.ones(1, 2),))
    model(torch.ones(1, 2))
    assert seen == [True, False]


def test_broken_forward_falls_back_to_nothing_and_says_why() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no luck")

    model = Broken()
    found = trace(model, (torch.ones(1, 2),))
    assert found.how == "none"
    assert "no luck" in found.reason
    assert not model.lin._forward_hooks
    assert not is_tracing()


def test_switched_off_and_begun_later() -> None:
    assert trace(LM(1), (ids(32),), how="none").how == "none"
    found = trace(LM(1), (ids(32),), how="real")
    assert found.how == "real"
    assert sum(r.saved_bytes + r.trailing_saved_bytes for r in found.records.values()) > 0


def test_model_on_the_meta_device_is_traced() -> None:
    with torch.device("meta"):
        model = LM(2)
    found = trace(model, (ids(32),))
    assert found.how == "fake"
    assert found.records["head"].flops > 0
    assert all(p.device.type == "meta" for p in model.parameters())


def test_nested_inputs_of_any_kind() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, batch: dict[str, Any], *, scale: float, flag: None) -> dict[str, Tensor]:
            batch["seen"].append(1)
            return {"y": self.lin(batch["x"][0]) * scale}

    seen: list[int] = []
    inputs = {"x": (torch.ones(1, 2),), "seen": seen}
    found = trace(Nested(), (inputs,), {"scale": 2.0, "flag": None})
    assert found.how == "fake"
    assert seen == []


def test_recurrent_and_attention_modules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.rnn(x)[0])

    found = trace(Mixed(), (torch.ones(2, 3, 4),))
    assert found.how == "fake"
    assert {"rnn", "layer"} <= set(found.records)
