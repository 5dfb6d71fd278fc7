"""Splitting of step arguments: every row of the contract's table, and the errors."""

from __future__ import annotations

import argparse
import inspect
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ShapeError, UsageError
from shardwright.pipeline import microbatch as mb

Pair = namedtuple("Pair", "left right")


def step(model: Any, batch: Any = None, *rest: Any, flag: Any = False, **extra: Any) -> None: ...


SIGNATURE = inspect.signature(step)


def split(
    *args: Any, n: int = 2, keep: Any = None, axes: Any = None, uneven: bool = False, **kwargs: Any
) -> list:
    return mb.split_arguments(SIGNATURE, args, kwargs, n, keep, axes, uneven)


def second(value: Any, n: int = 2, **options: Any) -> list[Any]:
    """The values that argument 'batch' has in the microbatches."""
    return [m.args[1] for m in split("model", value, n=n, **options)]


def rows(n: int, width: int = 3) -> torch.Tensor:
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width)


def test_tensor_is_narrowed_without_copy() -> None:
    x = rows(6)
    parts = second(x, n=3)
    assert [p.tolist() for p in parts] == [c.tolist() for c in x.chunk(3)]
    assert all(p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)


def test_one_microbatch_passes_the_very_tensor() -> None:
    x = rows(5)
    assert second(x, n=1)[0] is x


def test_slices_allow_writing_in_place() -> None:
    part = second(rows(4).requires_grad_())[0]
    h = part * 1
    h *= 2
    h.sum().backward()


def test_zero_dim_tensor_passes_unchanged() -> None:
    scale = torch.tensor(3.0)
    assert all(v is scale for v in second(scale))


def test_positional_keyword_and_extra_arguments() -> None:
    x = rows(4)
    parts = split("model", x, x + 1, n=2, flag=x + 2, more=x + 3)
    for i, m in enumerate(parts):
        want = slice(2 * i, 2 * i + 2)
        assert m.args[0] == "model"
        assert torch.equal(m.args[1], x[want])
        assert torch.equal(m.args[2], x[want] + 1)
        assert torch.equal(m.kwargs["flag"], x[want] + 2)
        assert torch.equal(m.kwargs["more"], x[want] + 3)
        assert m.num_samples == 2


def test_defaults_are_left_to_the_function() -> None:
    (m,) = split("model", n=1)
    assert m.args == ("model",)
    assert m.kwargs == {}
    assert m.num_samples is None


def test_axis_per_argument_also_negative() -> None:
    x = rows(3, 4)
    assert [p.shape for p in second(x, axes={"batch": 1})] == [(3, 2)] * 2
    assert [p.shape for p in second(x, axes={"batch": -1})] == [(3, 2)] * 2
    parts = split("m", rows(2), n=2, axes={"more": 1}, more=[x])
    assert parts[0].kwargs["more"][0].shape == (3, 2)


def test_non_split_inputs_by_position_keyword_and_extra_name() -> None:
    x = rows(5)
    for m in split(x, rows(4), keep=["model", "flag", "more"], flag=x, more=x):
        assert m.args[0] is x
        assert m.kwargs["flag"] is x
        assert m.kwargs["more"] is x
    assert all(m.kwargs["a"] is x for m in split("m", keep=["extra"], a=x))


def test_containers_keep_class_and_nesting() -> None:
    x = rows(4)
    value = {
        "l": [x, (x,)],
        "n": Pair(x, None),
        "o": OrderedDict(b=x, a=1),
        "s": {x},
        "none": None,
        "text": "abc",
    }
    for i, part in enumerate(second(value)):
        want = x[2 * i : 2 * i + 2]
        assert torch.equal(part["l"][0], want)
        assert isinstance(part["l"][1], tuple)
        assert torch.equal(part["l"][1][0], want)
        assert isinstance(part["n"], Pair)
        assert part["n"].right is None
        assert type(part["o"]) is OrderedDict
        assert list(part["o"]) == ["b", "a"]
        assert torch.equal(next(iter(part["s"])), want)
        assert part["none"] is None
        assert part["text"] == "abc"


class TaggedDict(dict):
    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag


class TaggedList(list):
    pass


def test_subclasses_of_containers_are_rebuilt_without_their_constructor() -> None:
    tagged = TaggedDict("train")
    tagged["x"] = rows(4)
    listed = TaggedList([rows(4)])
    listed.note = 7  # type: ignore[attr-defined]
    factory: Any = defaultdict(list, x=rows(4))
    a, b, c = second([tagged, listed, factory])[1]
    assert (type(a), a.tag, a["x"].shape) == (TaggedDict, "train", (2, 3))
    assert (type(b), b.note, b[0].shape) == (TaggedList, 7, (2, 3))
    assert c.default_factory is list
    assert c["x"].shape == (2, 3)
    assert tagged["x"].shape == (4, 3)


def test_other_mappings_are_treated_like_dicts() -> None:
    part = second(UserDict(x=rows(4), y="k"))[1]
    assert type(part) is UserDict
    assert part["x"].shape == (2, 3)


def test_batch_encoding_and_model_output() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    encoding = transformers.BatchEncoding({"input_ids": rows(4)})
    part = second(encoding)[1]
    assert type(part) is transformers.BatchEncoding
    assert torch.equal(part["input_ids"], rows(4)[2:])
    output = CausalLMOutput(logits=rows(4))
    part = second(output)[0]
    assert type(part) is CausalLMOutput
    assert torch.equal(part.logits, rows(4)[:2])
    assert torch.equal(part["logits"], rows(4)[:2])
    assert part.loss is None


def test_a_list_is_not_cut_along_its_length() -> None:
    targets = [object(), object(), object()]
    assert all(part is targets for part in second(targets))


class Boxes:
    def __init__(self, boxes: list[int]) -> None:
        self.boxes = boxes

    def smp_slice(self, num: int, i: int, dim: int) -> list[int]:
        assert dim == 0
        return self.boxes[i * len(self.boxes) // num : (i + 1) * len(self.boxes) // num]


class SlicedList(list):
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> str:
        return f"{mb}/{num_mb}@{axis}"


def test_smp_slice_wins_and_may_return_another_type() -> None:
    assert second(Boxes([1, 2, 3, 4])) == [[1, 2], [3, 4]]
    assert second([Boxes([1, 2])]) == [[[1]], [[2]]]
    assert second(SlicedList([rows(3)]), axes={"batch": 1}) == ["0/2@1", "1/2@1"]
    assert second(Boxes([5]), n=1) == [[5]]
    assert all(v is Boxes for v in second(Boxes))


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Linear(2, 2),
        argparse.Namespace(x=rows(3)),
        torch.device("cpu"),
        3,
        2.5,
        "s",
        None,
        torch.Size([3]),
    ],
)
def test_everything_else_passes_unchanged(value: Any) -> None:
    assert all(v is value for v in second(value, n=4))


def test_uneven_batch_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"'batch\['ids'\]' has size 8 on axis 0.* 3 microbatches") as info:
        second({"ids": rows(8)}, n=3)
    assert "drop_last" in str(info.value)
    assert isinstance(info.value, ValueError)


def test_tensor_without_batch_axis_is_suspected_by_name() -> None:
    with pytest.raises(ShapeError, match="'flag' has size 1 on axis 0") as info:
        split("m", rows(4), flag=rows(1))
    assert "non_split_inputs" in str(info.value)
    assert "'batch' 4" in str(info.value)


def test_differing_but_divisible_sizes_are_split_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(mb, "once", lambda logger, level, message, *values: lines.append(message % values))
    parts = split("m", [rows(8), rows(8)], n=4, flag=rows(512))
    assert parts[0].kwargs["flag"].shape == (128, 3)
    assert len(lines) == 1
    assert "'flag' differs from 'batch[0]'" in lines[0]
    assert "non_split_inputs" in lines[0]
    split("m", [rows(8), rows(8)], n=4, flag=rows(8))
    assert len(lines) == 1


def test_bad_axis_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"'batch' is \[4, 3\] and has no axis 2"):
        second(rows(4), axes={"batch": 2})


def test_data_loader_and_packed_sequence_are_refused() -> None:
    loader: Any = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(UsageError, match="'batch' of the step function is a DataLoader") as info:
        second(loader)
    assert "for batch in loader" in str(info.value)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(UsageError, match=r"'batch\[0\]' is a PackedSequence"):
        second([packed])


def test_names_in_options_are_checked() -> None:
    def plain(x: Any, y: Any) -> None: ...

    signature = inspect.signature(plain)
    mb.check_split_names(signature, ["x"], {"y": 1})
    with pytest.raises(UsageError, match=r"non_split_inputs names 'z'.*\n.*use one of: x, y"):
        mb.check_split_names(signature, ["z"], {})
    with pytest.raises(UsageError, match="input_split_axes names 'w'"):
        mb.check_split_names(signature, [], {"w": 1})
    with pytest.raises(UsageError, match="'x' is named in non_split_inputs and in input_split_axes"):
        mb.check_split_names(signature, ["x"], {"x": 1})
    mb.check_split_names(SIGNATURE, ["anything"], {})


def test_call_that_does_not_fit_raises_type_error() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        split()


def test_uneven_split_for_forward_only_steps() -> None:
    parts = split("m", rows(7), n=3, uneven=True)
    assert [m.num_samples for m in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([m.args[1] for m in parts]), rows(7))
    assert [m.num_samples for m in split("m", rows(1), n=4, uneven=True)] == [1]
    with pytest.raises(ShapeError, match="'flag'"):
        split("m", rows(7), n=3, uneven=True, flag=rows(1))


@settings(deadline=None)
@given(size=st.integers(0, 40), n=st.integers(1, 9), dims=st.integers(1, 3), data=st.data())
def test_splitting_then_joining_is_identity(size: int, n: int, dims: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-dims, dims - 1))
    shape = [2] * dims
    shape[axis] = size
    x = torch.rand(shape)
    uneven = size % n != 0
    parts = second(x, n=n, axes={"batch": axis}, uneven=uneven)
    assert torch.equal(torch.cat(parts, dim=axis), x)
    sizes = [p.shape[axis] for p in parts]
    assert max(sizes) - min(sizes) <= (1 if uneven else 0)
    assert len(parts) == (max(1, min(n, size)) if uneven else n)
