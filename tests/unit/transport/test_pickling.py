"""Python values to bytes and back."""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.transport import pickling

CPU = torch.device("cpu")


def there_and_back(value: Any) -> Any:
    head, bulk = pickling.encode(value)
    received = memoryview(bytearray(head))
    assert pickling.bulk_sizes(received) == [piece.numel() for piece in bulk]
    return pickling.decode(received, [piece.clone() for piece in bulk], CPU)


class Special(dict):
    """A subclass, as configuration objects are."""


@dataclass
class Record:
    name: str
    values: torch.Tensor


@pytest.mark.parametrize(
    "value", [None, 0, "text", b"bytes", [1, (2, {3})], {"a": 1.5}, range(3), float, bytearray(b"x")]
)
def test_plain_values(value: Any) -> None:
    assert there_and_back(value) == value


def test_dict_subclasses_keep_their_class() -> None:
    value = there_and_back({"o": OrderedDict(b=1, a=2), "s": Special(x=torch.ones(2))})
    assert type(value["o"]) is OrderedDict
    assert list(value["o"]) == ["b", "a"]
    assert type(value["s"]) is Special
    assert torch.equal(value["s"]["x"], torch.ones(2))


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (300, 500)])
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(3).to(dtype)
    other = there_and_back([tensor])[0]
    assert other.dtype == dtype
    assert torch.equal(other, tensor)
    if tensor.numel():
        other.zero_()  # it is writable


def test_strides_are_kept_and_only_a_views_own_elements_travel() -> None:
    big = torch.arange(1_000_000.0)
    transposed = torch.arange(12.0).view(3, 4).t()
    head, bulk = pickling.encode([big[5:8], big[::250_000], transposed, torch.ones(1).expand(4)])
    assert len(head) < 2000
    assert bulk == []
    few, stepped, other, expanded = pickling.decode(memoryview(bytearray(head)), bulk, CPU)
    assert torch.equal(few, big[5:8])
    assert torch.equal(stepped, big[::250_000])
    assert other.stride() == transposed.stride()
    assert torch.equal(other, transposed)
    assert torch.equal(expanded, torch.ones(4))


def test_the_same_object_twice_stays_one_object() -> None:
    tensor = torch.ones(3)
    first, second = there_and_back([tensor, tensor])
    assert first is second


def test_parameters_gradients_flags_and_records() -> None:
    parameter = nn.Parameter(torch.ones(2))
    value = there_and_back({"p": parameter, "f": nn.Parameter(torch.ones(1), requires_grad=False)})
    assert isinstance(value["p"], nn.Parameter)
    assert value["p"].requires_grad
    assert not value["f"].requires_grad
    assert there_and_back(torch.ones(2, requires_grad=True) * 2).requires_grad
    record = there_and_back(Record("x", torch.ones(2)))
    assert record.name == "x"
    assert torch.equal(record.values, torch.ones(2))


def test_modules_and_unusual_tensors() -> None:
    module = nn.Linear(2, 3)
    other = there_and_back(module)
    assert torch.equal(other.weight, module.weight)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), torch.eye(3))
    tagged = torch.ones(2)
    tagged.tag = "kept"
    assert there_and_back(tagged).tag == "kept"
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(there_and_back(conjugate), conjugate)
    assert there_and_back(torch.empty(2, 3, device="meta")).shape == (2, 3)


def test_arrays() -> None:
    small, large = np.arange(5), np.arange(100_000.0).reshape(100, 1000)
    large.flags.writeable = False
    got = there_and_back({"small": small, "large": large, "empty": np.zeros(0)})
    assert np.array_equal(got["small"], small)
    assert np.array_equal(got["large"], large)
    got["small"][0] = 7
    assert got["empty"].shape == (0,)


sizes = st.integers(0, 70_000)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(sizes, st.sampled_from(DTYPES))))
def test_any_mixture_of_sizes(pieces: list[tuple[int, torch.dtype]]) -> None:
    tensors = [torch.arange(size).to(dtype) for size, dtype in pieces]
    for tensor, other in zip(tensors, there_and_back(tensors), strict=True):
        assert other.dtype == tensor.dtype
        assert torch.equal(other, tensor)


def test_a_small_value_is_a_small_message() -> None:
    head, bulk = pickling.encode(("module.path", (4, 128, 512), torch.float32, True))
    assert len(head) < 200
    assert bulk == []
    assert struct.unpack_from("<Q", head)[0] < len(head)
