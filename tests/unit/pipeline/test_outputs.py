"""StepOutput and the collection of per-microbatch results."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardwright.errors import ShapeError, UsageError
from shardwright.pipeline.outputs import StepOutput, collect_outputs

Pair = namedtuple("Pair", "loss count")


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_step_output_reductions() -> None:
    out = StepOutput([torch.tensor(1.0), torch.tensor(4.0)])
    assert out.reduce_mean().item() == 2.5
    assert out.reduce_sum().item() == 5.0
    assert out.concat().tolist() == [1.0, 4.0]
    assert out.stack().tolist() == [1.0, 4.0]
    out = StepOutput([torch.ones(2, 3), torch.zeros(2, 3)])
    assert out.concat().shape == (4, 3)
    assert out.stack().shape == (2, 2, 3)
    assert out.reduce_mean().tolist() == torch.full((2, 3), 0.5).tolist()


def test_integers_and_booleans_have_a_mean() -> None:
    assert StepOutput([torch.tensor(1), torch.tensor(2)]).reduce_mean().item() == 1.5
    assert StepOutput([torch.tensor(True), torch.tensor(False)]).reduce_mean().item() == 0.5
    assert StepOutput([torch.tensor(1), torch.tensor(2)]).reduce_sum().item() == 3


def test_step_output_is_neither_iterable_nor_indexable() -> None:
    out = StepOutput([t(1)])
    with pytest.raises(TypeError):
        iter(out)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        out[0]  # type: ignore[index]


def test_detach_gives_a_new_object() -> None:
    x = t(1, 2).requires_grad_()
    out = StepOutput([x * 2])
    assert out.outputs[0].requires_grad
    assert not out.detach().outputs[0].requires_grad
    assert out.detach().concat().cpu().tolist() == [2.0, 4.0]


def test_uneven_weights_make_the_mean_that_of_all_samples() -> None:
    x = torch.arange(7.0)
    parts = [x[:3], x[3:5], x[5:]]
    out = collect_outputs([p.mean() for p in parts], weights=[3, 2, 2])
    torch.testing.assert_close(out.reduce_mean(), x.mean())
    torch.testing.assert_close(out.detach().reduce_mean(), x.mean())


def test_different_shapes_explain_themselves() -> None:
    out = StepOutput([torch.ones(2), torch.ones(1)])
    assert out.concat().shape == (3,)
    with pytest.raises(ShapeError, match=r"different shapes: \[\[2\], \[1\]\]"):
        out.reduce_mean()
    assert repr(out) == "StepOutput(2 microbatches of torch.float32: [2], [1])"


def test_tensors_become_step_outputs_and_the_rest_lists() -> None:
    assert isinstance(collect_outputs([t(1), t(2)]), StepOutput)
    assert collect_outputs([1.5, 2.5]) == [1.5, 2.5]
    assert collect_outputs([None, None]) == [None, None]
    loss, correct = collect_outputs([(0.5, 3), (0.25, 4)])
    assert (loss, correct) == ([0.5, 0.25], [3, 4])


def test_nesting_and_classes_are_kept() -> None:
    results = [
        {
            "a": [t(i), (t(i), "x")],
            "p": Pair(t(i), i),
            "o": OrderedDict(k=t(i)),
            "n": None,
            "size": torch.Size([i]),
        }
        for i in range(2)
    ]
    out = collect_outputs(results)
    assert out["a"][0].concat().tolist() == [0, 1]
    assert isinstance(out["a"][1], tuple)
    assert out["a"][1][1] == ["x", "x"]
    assert isinstance(out["p"], Pair)
    assert out["p"].count == [0, 1]
    assert type(out["o"]) is OrderedDict
    assert out["o"]["k"].concat().tolist() == [0, 1]
    assert out["n"] == [None, None]
    assert out["size"] == [torch.Size([0]), torch.Size([1])]


def test_list_of_objects_becomes_list_of_lists() -> None:
    class Boxes:
        pass

    results = [[Boxes(), Boxes()], [Boxes(), Boxes()]]
    out = collect_outputs(results)
    assert out == [[results[0][0], results[1][0]], [results[0][1], results[1][1]]]


def test_detach_outputs() -> None:
    x = t(1).requires_grad_()
    assert not collect_outputs([{"a": x * 2}])["a"].outputs[0].requires_grad
    assert collect_outputs([{"a": x * 2}], detach_outputs=False)["a"].outputs[0].requires_grad
    mixed = collect_outputs([x * 2, None])
    assert isinstance(mixed, list)
    assert not mixed[0].requires_grad


@dataclass(frozen=True)
class Result:
    loss: Any
    extra: Any = None

    def __post_init__(self) -> None:
        assert not isinstance(self.loss, StepOutput), "the constructor must not run on outputs"


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


@dataclass
class Statistics:
    hits: int


def test_dataclasses_with_tensors_keep_their_class() -> None:
    out = collect_outputs([Result(t(1)), Result(t(2))])
    assert type(out) is Result
    assert out.loss.concat().tolist() == [1, 2]
    assert out.extra == [None, None]
    assert collect_outputs([Slotted(t(1)), Slotted(t(3))]).x.reduce_sum().tolist() == [4]


def test_dataclasses_without_tensors_are_ordinary_objects() -> None:
    assert collect_outputs([Statistics(1), Statistics(2)]) == [Statistics(1), Statistics(2)]


def test_model_output_round_trip() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    results = [outputs.CausalLMOutput(loss=torch.tensor(float(i)), logits=torch.ones(2, 3)) for i in range(2)]
    out = collect_outputs(results)
    assert isinstance(out, outputs.CausalLMOutput)
    assert isinstance(out, dict)
    assert list(out.keys()) == ["loss", "logits"]
    assert out["loss"].reduce_mean().item() == 0.5
    assert out.loss is out["loss"]
    assert out.logits.concat().shape == (4, 3)
    assert out.hidden_states is None
    assert {k: v.detach().concat().shape for k, v in out.items()} == {"loss": (2,), "logits": (4, 3)}
    assert len(out.to_tuple()) == 2
    only = collect_outputs([outputs.BaseModelOutput(last_hidden_state=torch.ones(1))])
    assert list(only) == ["last_hidden_state"]
    hidden = collect_outputs(
        [outputs.BaseModelOutput(torch.ones(1), hidden_states=(torch.ones(2), torch.ones(3)))]
    )
    assert isinstance(hidden.hidden_states, tuple)
    assert hidden.hidden_states[1].concat().shape == (3,)


def test_torch_return_types() -> None:
    values = [torch.rand(3, 4).max(dim=1) for _ in range(2)]
    out = collect_outputs(values)
    assert out.values.concat().shape == (6,)


@pytest.mark.parametrize(
    ("first", "other"),
    [({"a": 1}, {"b": 1}), ([1], [1, 2]), ((1,), [1]), ({"a": t(1)}, None)],
)
def test_differing_structures_are_refused_by_place(first: Any, other: Any) -> None:
    with pytest.raises(
        UsageError, match=r"different structure at \['r'\]: microbatch 0 gave .* microbatch 1 gave"
    ):
        collect_outputs([{"r": first}, {"r": other}])
