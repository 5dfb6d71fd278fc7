"""Which modules are replaced, with which arguments and weights, and how the new ones are called. Degree 1."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as smp
from shardwright.errors import UsageError
from shardwright.integrations.huggingface import families
from shardwright.tensor_parallel import registry
from shardwright.tensor_parallel.construction import construction_of
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.substitute import Report, substitute
from tp_modules import Dense, FakeLinear, Net, OtherNames

X = torch.linspace(-1, 1, 12).reshape(2, 6)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_finders", [])


def register(*hooks: Any, dist: type[nn.Module] = FakeLinear) -> None:
    smp.tp_register_with_module(Dense, dist, *hooks)


def reasons(report: Report) -> dict[str, str]:
    return {kept.name: kept.reason for kept in report.kept}


def names(report: Report) -> list[str]:
    return [found.name for found in report.replaced]


# -- which ------------------------------------------------------------------------------------------------------


def test_marked_modules_with_a_distributed_version_are_replaced_and_compute_the_same() -> None:
    net = Net()
    smp.set_tensor_parallelism(net)
    register()  # after marking, as scripts do
    before = net(X)
    root, report = substitute(net)
    assert root is net
    assert names(report) == ["layers.0", "layers.1", "head"]
    assert all(type(m) is FakeLinear for m in (*net.layers, net.head))
    assert type(net.norm) is nn.LayerNorm
    assert torch.equal(net(X), before)
    assert [found.fresh for found in report.replaced] == ["", "", ""]


def test_unmarked_modules_stay() -> None:
    register()
    net = Net()
    assert substitute(net)[1].replaced == []
    with smp.tensor_parallelism():
        net.head = Dense(6, 6)
    assert names(substitute(net)[1]) == ["head"]


def test_a_subclass_of_a_registered_class_stays() -> None:
    class Special(Dense):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, -scale)

    register()
    net = nn.Sequential(Special(6, 6))
    smp.set_tensor_parallelism(net)
    assert names(substitute(net)[1]) == []


def test_the_outermost_supported_module_is_replaced() -> None:
    class Block(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.inner = Dense(size, size)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Whole(DistributedModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.inner = FakeLinear(size, size)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    register()
    smp.tp_register_with_module(Block, Whole)
    with smp.tensor_parallelism():
        block = Block(6)
    before = block(X)
    root, report = substitute(block)
    assert type(root) is Whole
    assert names(report) == [""]
    assert torch.equal(root(X), before)


def test_decorator_registers_and_a_second_registration_counts() -> None:
    @smp.tp_register(FakeLinear)
    class Mine(Dense):
        pass

    assert Mine.__name__ == "Mine"
    with smp.tensor_parallelism():
        modules = [Mine(6, 6) for _ in range(2)]
    assert type(substitute(modules[0])[0]) is FakeLinear
    smp.tp_register_with_module(Mine, OtherNames, lambda *args, **kwargs: None)
    assert reasons(substitute(modules[1])[1]) == {"": "its init hook declined"}


def test_registration_wants_the_right_classes() -> None:
    with pytest.raises(UsageError, match=r"doesn't derive from smp\.nn\.DistributedModule"):
        smp.tp_register_with_module(Dense, nn.Linear)
    with pytest.raises(UsageError, match="not a class of modules"):
        smp.tp_register_with_module(int, FakeLinear)  # type: ignore[type-var]
    with pytest.raises(UsageError, match="the forward hook is 3"):
        register(None, 3)


def test_shared_weights_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    register()
    net = Net(tied=True)
    smp.set_tensor_parallelism(net)
    _, report = substitute(net)
    assert names(report) == ["layers.1"]
    assert reasons(report) == {
        "layers.0": "its weight 'weight' is shared with 'head'",
        "head": "its weight 'weight' is shared with 'layers.0'",
    }
    assert net.head.weight is net.layers[0].weight


def test_a_module_in_two_places_is_replaced_in_both_by_one() -> None:
    register()
    net = Net()
    net.layers[1] = net.layers[0]
    smp.set_tensor_parallelism(net)
    before = net(X)
    _, report = substitute(net)
    assert names(report) == ["layers.0", "head"]
    assert net.layers[0] is net.layers[1]
    assert torch.equal(net(X), before)


def test_explicit_disable() -> None:
    register()
    net = Net()
    smp.set_tensor_parallelism(net)
    smp.set_tensor_parallelism(net.layers, False)
    assert names(substitute(net)[1]) == ["head"]


def test_disabled_below_keeps_the_whole_and_its_other_children_go() -> None:
    register()
    smp.tp_register_with_module(Net, FakeLinear)
    net = Net()
    smp.set_tensor_parallelism(net)
    smp.set_tensor_parallelism(net.head, False)
    _, report = substitute(net)
    assert names(report) == ["layers.0", "layers.1"]
    assert reasons(report) == {"": "the script switched off 'head' inside it"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "its init hook declined"),
        (NotImplementedError("no biases here"), "its init hook says: no biases here"),
    ],
)
def test_a_hook_that_declines(answer: Any, reason: str) -> None:
    def init_hook(num_inputs: int, num_outputs: int = 4) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    register(init_hook)
    net = Net()
    smp.set_tensor_parallelism(net)
    _, report = substitute(net)
    assert report.replaced == []
    assert set(reasons(report).values()) == {reason}


def test_single_experts_stay_unless_the_script_names_them() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Dense(6, 6)
            self.experts = nn.ModuleList([Dense(6, 6), Dense(6, 6)])

    register()
    mixture = Mixture()
    smp.set_tensor_parallelism(mixture)
    _, report = substitute(mixture)
    assert names(report) == ["gate"]
    assert "go to other experts" in reasons(report)["experts"]

    named = Mixture()
    smp.set_tensor_parallelism(named.experts)
    _, report = substitute(named)
    assert names(report) == ["experts.0", "experts.1"]


def test_one_line_says_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("shardwright"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("shardwright"), "level", logging.INFO)
    register(lambda *args, **kwargs: None)
    net = Net()
    smp.set_tensor_parallelism(net)
    with caplog.at_level(logging.INFO):
        substitute(net)
    lines = [record.getMessage() for record in caplog.records]
    assert list(dict.fromkeys(lines)) == ["not distributed: layers.0, layers.1, head (Dense): its init hook declined"]


def test_unknown_constructor_arguments() -> None:
    register()
    net = Net()
    net.head = Dense.__new__(Dense)
    net.head.__setstate__(copy.deepcopy(vars(Dense(6, 6))))
    net.head.__dict__.pop("_shardwright_built", None)
    smp.set_tensor_parallelism(net)
    assert reasons(substitute(net)[1]) == {"head": "its constructor arguments are not known"}


# -- arguments and calls ----------------------------------------------------------------------------------------


def test_options_override_what_the_class_knows() -> None:
    register()
    with smp.tensor_parallelism(power=5, use_alibi=True, bias=False):
        module = Dense(6)
    root, report = substitute(module)
    assert root.power == 5
    assert root.bias is None
    assert report.replaced[0].fresh  # the bias has nowhere to go


def test_options_go_before_positional_arguments() -> None:
    def init_hook(num_inputs: int, num_outputs: int = 4, *, bias: bool = True) -> Any:
        return (num_inputs, num_outputs), {}

    register(init_hook)
    with smp.tensor_parallelism(num_outputs=8):
        module = Dense(6)
    assert substitute(module)[0].weight.shape == (8, 6)


def test_hooks_translate_arguments_calls_and_results() -> None:
    def init_hook(num_inputs: int, num_outputs: int = 4, *, bias: bool = True) -> Any:
        return (num_inputs,), {"out": num_outputs, "anything": 1}

    def forward_hook(x: Tensor, scale: float = 1.0) -> Any:
        return ((x, scale),), {}

    register(init_hook, forward_hook, lambda output: output["y"], dist=OtherNames)
    with smp.tensor_parallelism():
        module = Dense(6, num_outputs=3, bias=False)
    root, report = substitute(module)
    assert isinstance(root, OtherNames)
    assert root.options == {"anything": 1}
    assert torch.equal(root(X, scale=2.0), X @ root.kernel.t() * 2.0)
    assert "'kernel' [3, 6] differs" in report.replaced[0].fresh
    assert "forward" not in vars(root)
    twin = copy.deepcopy(root)
    assert type(twin) is type(root)
    assert torch.equal(twin(X), root(X))


def _scale_first(x: Tensor, scale: float = 1.0) -> Any:
    return (x * scale,), {}


def test_modules_with_hooks_can_be_pickled() -> None:
    register(None, _scale_first)
    with smp.tensor_parallelism():
        module = Dense(6)
    root, _ = substitute(module)
    loaded = pickle.loads(pickle.dumps(root))
    assert type(loaded) is type(root)
    assert torch.equal(loaded(X, 2.0), root(X, 2.0))


@pytest.mark.parametrize("wrong", [3, (1, 2, 3), ((1,), 2), (1, {})])
def test_hooks_must_return_pairs(wrong: Any) -> None:
    register(lambda *args, **kwargs: wrong)
    with smp.tensor_parallelism():
        module = Dense(6)
    with pytest.raises(UsageError, match="the init hook of Dense returned"):
        substitute(module)


# -- weights ----------------------------------------------------------------------------------------------------


def test_plain_values_that_the_model_around_reads_stay() -> None:
    register()
    net = Net()
    net.head.attention_type, net.head.power, net.head._private, net.head.many = "local", 3, 1, [1]
    smp.set_tensor_parallelism(net)
    substitute(net)
    assert net.head.attention_type == "local"
    assert net.head.power == 1  # its own
    assert not hasattr(net.head, "_private")
    assert not hasattr(net.head, "many")


def test_weights_flags_dtype_and_hooks_are_carried_over() -> None:
    register()
    net = Net().double()
    net.head.weight.requires_grad_(False)
    net.layers[0].requires_grad_(False)
    net.layers[1].eval()
    smp.set_tensor_parallelism(net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flags = {name: p.requires_grad for name, p in net.named_parameters()}
    calls: list[Any] = []
    handle = net.head.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    substitute(net)
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {name: p.requires_grad for name, p in net.named_parameters()} == flags
    assert not net.layers[1].training
    net(X.double())
    handle.remove()
    net(X.double())
    assert calls == [FakeLinear]


def test_parameters_on_meta_are_drawn_fresh() -> None:
    register()
    with torch.device("meta"), smp.tensor_parallelism():
        module = Dense(6)
    root, report = substitute(module)
    assert report.replaced[0].fresh == "the original's are on the meta device"
    assert root.weight.device.type == "cpu"
    assert 0 < float(root.weight.detach().std()) < 0.1


def test_blanked_out_initialisation_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.modeling_utils")
    register()
    monkeypatch.setattr(modeling.PreTrainedModel, "init_weights", lambda self: None)
    with smp.tensor_parallelism():
        blank, loaded = Dense(6), Dense(6)
    loaded._is_hf_initialized = True
    assert "switched off" in substitute(blank)[1].replaced[0].fresh
    weight = loaded.weight.detach().clone()
    root, report = substitute(loaded)
    assert report.replaced[0].fresh == ""
    assert torch.equal(root.weight, weight)


def test_records_are_dropped_by_the_wrap() -> None:
    net = Net()
    assert construction_of(net.head) is not None
    substitute(net)
    assert construction_of(net.head) is None


# -- transformers -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Path]:
    """A small GPT-2 and the folder it is saved in."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    return model.eval(), tmp_path


@pytest.mark.parametrize("blank", [False, True])
def test_from_pretrained_inside_model_creation_keeps_its_weights(
    tiny: tuple[Any, Path], blank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, folder = tiny
    monkeypatch.setattr(registry, "_finders", [families.find])
    cls = type(original)
    if blank:
        monkeypatch.setattr(modeling_utils().PreTrainedModel, "init_weights", lambda self: None)
    with smp.model_creation(tensor_parallelism=True):
        model = cls.from_pretrained(folder)
    root, report = substitute(model.eval())
    assert [found.name for found in report.replaced] == [""]
    assert report.replaced[0].fresh == ""
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        found = root(input_ids=tokens)
        wanted = original(input_ids=tokens)
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    assert root.config.n_embd == 32


def test_from_config_with_initialisation_switched_off_is_drawn_fresh(
    tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = tiny
    monkeypatch.setattr(registry, "_finders", [families.find])
    monkeypatch.setattr(modeling_utils().PreTrainedModel, "init_weights", lambda self: None)
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
        model = type(original)(original.config)
    root, report = substitute(model)
    assert "switched off" in report.replaced[0].fresh
    assert {p.dtype for p in root.parameters()} == {torch.float64}


def test_embeddings_resized_after_marking(tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny
    monkeypatch.setattr(registry, "_finders", [families.find])
    smp.set_tensor_parallelism(model)
    model.resize_token_embeddings(110)
    tokens = torch.tensor([[3, 105, 7]])
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
    wrapper = nn.Sequential(model)  # a script's own fp16 module, for example
    _, report = substitute(wrapper)
    assert [found.name for found in report.replaced] == ["0"]
    with torch.no_grad():
        torch.testing.assert_close(wrapper[0](input_ids=tokens).logits, wanted, rtol=1e-5, atol=1e-5)
    assert wrapper[0].word_embedding.weight.shape == (110, 32)


def modeling_utils() -> Any:
    return pytest.importorskip("transformers.modeling_utils")
