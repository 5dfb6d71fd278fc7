"""The wrapper of the model in a world of one: chain of attributes, names, manners of nn.Module, refusals."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import models
import shardwright.torch as smp
from shardwright.errors import UsageError

pytestmark = pytest.mark.usefixtures("world_of_one")


class Net(nn.Module):
    """A layer, BatchNorm's buffers, a parameter and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.config = {"width": 3}
        self.note = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def greet(self, name: str) -> str:
        return f"hello {name}"


@smp.step
def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    model.backward(loss)
    return loss


def test_chain_of_attributes() -> None:
    net = Net()
    model = smp.DistributedModel(net)
    assert model.module is not net
    assert model.module.module is net
    assert model.get_module() is net
    for level in (model, model.module):
        assert level.layer is net.layer
        assert level.config == {"width": 3}
        assert level.greet("you") == "hello you"
        assert not hasattr(level, "no_such_name")
    assert isinstance(model, smp.model.DistributedModel)
    assert isinstance(model, nn.Module)
    assert not isinstance(model, nn.parallel.DistributedDataParallel)
    assert smp.state.model is model
    assert model.partitioned
    assert smp.get_partition(net.layer) == 0


def test_names_of_modules_have_hops_and_state_dicts_have_none() -> None:
    net = Net()
    names = list(net.state_dict())
    model = smp.DistributedModel(net)
    assert [n for n, _ in model.named_parameters()] == [f"module.module.{n}" for n, _ in net.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [f"module.module.{n}" for n, _ in net.named_buffers()]
    assert [n for n, _ in model.named_children()] == ["module"]
    assert list(model.state_dict()) == names
    assert [n for n in model.local_state_dict() if n != "_smp_is_partial"] == names
    assert model.local_state_dict()["_smp_is_partial"] is True
    assert [(n, id(p)) for n, p in model.local_named_parameters()] == [(n, id(p)) for n, p in net.named_parameters()]
    assert [n for n, _ in model.local_named_buffers()] == [n for n, _ in net.named_buffers()]
    assert [n for n, _ in model.local_named_modules()] == [n for n, _ in net.named_modules()]
    assert next(model.local_parameters()) is next(net.parameters())
    assert next(model.local_buffers()) is next(net.buffers())
    assert next(model.local_modules()) is net
    assert [n for n, _ in model.virtual_named_parameters()] == [n for n, _ in net.named_parameters()]


def test_nothing_is_tensor_parallel() -> None:
    model = smp.DistributedModel(Net())
    parameter, buffer = next(model.parameters()), next(model.buffers())
    assert list(model.distributed_modules()) == []
    assert list(model.scaled_batch_reducer_named_parameters()) == []
    assert len(list(model.default_reducer_named_parameters())) == 5
    assert not model.is_distributed_parameter(parameter)
    assert not model.is_scaled_batch_parameter(parameter)
    assert not model.is_distributed_buffer(buffer)
    assert not model.is_scaled_batch_buffer(buffer)


def test_moves_and_casts_return_the_model() -> None:
    net = Net()
    parameter = net.layer.weight
    model = smp.DistributedModel(net)
    assert model.to("cuda") is model.cuda() is model.cpu() is model.train() is model
    assert parameter.device.type == "cpu"
    assert model.eval() is model
    assert not net.norm.training
    assert model.half() is model
    assert model.layer.weight is parameter
    assert parameter.dtype is net.norm.running_mean.dtype is torch.float16
    assert next(model.local_buffers()).dtype is torch.float16
    assert model.to("cuda", torch.float64) is model
    assert parameter.dtype is torch.float64
    assert model.float() is model
    assert model.to(torch.zeros(1, dtype=torch.bfloat16)) is model
    assert parameter.dtype is torch.bfloat16
    images = nn.Conv2d(2, 2, 3)
    smp.shutdown()
    smp.init({})
    smp.DistributedModel(images).to(memory_format=torch.channels_last)
    assert images.weight.is_contiguous(memory_format=torch.channels_last)


def test_forms_of_state_dict() -> None:
    net = Net()
    model = smp.DistributedModel(net)
    plain = net.state_dict()
    full = model.state_dict(prefix="a.")
    assert list(full) == [f"a.{n}" for n in plain]
    assert full._metadata == plain._metadata
    assert not full["a.scale"].requires_grad
    assert model.state_dict(keep_vars=True)["scale"] is net.scale
    into: OrderedDict[str, Any] = OrderedDict(other=1)
    assert model.state_dict(destination=into) is into
    assert list(into) == ["other", *plain]
    assert set(model.state_dict(gather_to_rank0=True)) == set(plain)


def test_loading() -> None:
    source, net = Net(), Net()
    source.note = "loaded"
    with torch.no_grad():
        source.norm.running_mean += 3
    model = smp.DistributedModel(net)
    for content in (source.state_dict(), {**source.state_dict(), "_smp_is_partial": False}):
        with torch.no_grad():
            net.scale.zero_()
        before = dict(content)
        assert model.load_state_dict(content) == ([], [])
        assert content.keys() == before.keys()
        assert all(content[n] is before[n] for n in before)
        assert net.note == "loaded"
        assert all(
            torch.equal(v, source.state_dict()[n]) for n, v in net.state_dict().items() if isinstance(v, torch.Tensor)
        )
    partial = model.local_state_dict()
    assert model.load_state_dict(partial) == ([], [])
    assert model.load_state_dict(partial, same_partition_load=True) == ([], [])
    assert "_smp_is_partial" in partial
    short = {n: v for n, v in source.state_dict().items() if n != "scale"}
    with pytest.raises(RuntimeError, match="scale"):
        model.load_state_dict(short)
    keys = model.load_state_dict({**short, "more": torch.ones(1)}, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["scale"], ["more"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**source.state_dict(), "scale": torch.ones(4)}, strict=False)


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(UsageError, match="not int"):
        smp.DistributedModel(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="script modules"):
        smp.DistributedModel(torch.jit.script(nn.Linear(2, 2)))
    parallel = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(UsageError, match="DistributedDataParallel already"):
        smp.DistributedModel(parallel)
    with pytest.raises(ValueError, match="trace"):
        smp.DistributedModel(Net(), trace_device="cpu", trace_execution_times=True)
    model = smp.DistributedModel(Net())
    with pytest.raises(UsageError, match="is a DistributedModel already"):
        smp.DistributedModel(model)
    with pytest.raises(UsageError, match="one per process"):
        smp.DistributedModel(Net())
    smp.shutdown()
    smp.init({})
    assert smp.state.model is None
    smp.DistributedModel(Net())


def test_a_step_of_a_new_world_knows_no_old_model() -> None:
    smp.DistributedModel(Net())
    smp.shutdown()
    smp.init({"microbatches": 2})
    assert smp.state.optimizer is None

    @smp.step
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert double(torch.ones(4)).concat().tolist() == [2.0] * 4


def test_backward_averages_over_microbatches_and_refuses_to_retain() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    net(x[:2]).sum().div(2).backward()
    net(x[2:]).sum().div(2).backward()
    wanted = [p.grad for p in net.parameters()]
    net.zero_grad()
    model = smp.DistributedModel(net)
    train_step(model, x)
    assert all(torch.equal(p.grad, w) for p, w in zip(net.parameters(), wanted, strict=True))
    loss = model(x).sum()
    for option in ({"retain_graph": True}, {"create_graph": True}):
        with pytest.raises(UsageError, match="retain_graph"):
            model.backward(loss, **option)
    net.zero_grad()
    model.backward([loss], [torch.tensor(2.0)])  # outside of a step: one whole batch
    net.zero_grad()
    with pytest.raises(UsageError, match="grad_tensors"):
        model.backward(model(x))


def test_gradients_may_be_summed_over_microbatches() -> None:
    x, net = torch.randn(4, 3), nn.Linear(3, 2)
    net(x).sum().backward()
    wanted = net.weight.grad
    net.zero_grad()
    train_step(smp.DistributedModel(net, average_grads_across_microbatches=False), x)
    torch.testing.assert_close(net.weight.grad, wanted)


def test_plain_training_loop_needs_no_step() -> None:
    model = smp.DistributedModel(nn.Linear(3, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.clone()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_data_parallel_calls_need_ddp() -> None:
    model = smp.DistributedModel(Net())
    with pytest.raises(UsageError, match="ddp"):
        model.join()
    with pytest.raises(UsageError, match="ddp"):
        model.register_comm_hook(None, lambda state, bucket: None)


def test_transformers_model_saves_itself(tmp_path: Any) -> None:
    from transformers import GPT2LMHeadModel

    made = models.make("gpt2")
    model = smp.DistributedModel(made.model)
    model.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(v, loaded.state_dict()[n]) for n, v in model.state_dict().items())
