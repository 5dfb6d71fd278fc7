"""Constructor arguments are recorded for every module, and keep nothing alive."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from shardwright.tensor_parallel import construction
from shardwright.tensor_parallel.construction import construction_of, forget
from tp_modules import Dense

T = TypeVar("T")


class WithNew(nn.Module):
    """Its own `__new__` drops what the constructor gets."""

    def __new__(cls, *args: Any, **kwargs: Any) -> WithNew:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class Mixin:
    """Comes behind `nn.Module` and has a `__new__` that must run."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["mixed"] = True
        return made


class Mixed(nn.Module, Mixin, Generic[T]):
    def __init__(self, size: int) -> None:
        super().__init__()


class Holder(nn.Module):
    def __init__(self, inner: nn.Module, extra: Any = None) -> None:
        super().__init__()
        self.inner = inner


class Stateful(nn.Module):
    """Its own `__setstate__` doesn't call that of `nn.Module`."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def made(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = construction_of(module)
    assert found is not None
    return found.args, found.kwargs


def test_arguments_of_a_module_and_of_those_it_makes() -> None:
    assert made(Dense(3, bias=False)) == ((3,), {"bias": False})
    assert made(nn.Linear(2, 5)) == ((2, 5), {})
    layer = nn.TransformerEncoderLayer(8, nhead=2)
    assert made(layer.linear1)[0][:2] == (8, 2048)


def test_copies_are_built_like_their_originals() -> None:
    original = Dense(3, 5)
    for twin in (copy.deepcopy(original), copy.copy(original), copy.deepcopy(copy.deepcopy(original))):
        assert made(twin) == ((3, 5), {})
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, nhead=2), 2)
    assert [made(layer) for layer in stack.layers] == [((8,), {"nhead": 2})] * 2
    twin = copy.deepcopy(original)
    del original
    gc.collect()
    assert made(twin) == ((3, 5), {})


def test_a_copy_with_a_setstate_of_its_own_has_no_wrong_arguments() -> None:
    original = Stateful(7)
    twin = copy.deepcopy(original)
    assert construction_of(twin) is None or made(twin) == ((7,), {})
    assert construction_of(Stateful.__new__(Stateful)) is None


def test_pickles_know_nothing_in_another_process() -> None:
    original = nn.Linear(2, 3)
    data = pickle.dumps(original)
    assert made(pickle.loads(data)) == ((2, 3), {})
    program = """
import pickle, sys
import torch.nn, shardwright.tensor_parallel.construction as c
made = [torch.nn.Linear(1, 1) for _ in range(100)]
loaded = pickle.loads(sys.stdin.buffer.read())
assert c.construction_of(loaded) is None
assert loaded.in_features == 2
"""
    subprocess.run([sys.executable, "-c", program], input=data, check=True, timeout=60)
    plain = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).in_features)"
    assert subprocess.run([sys.executable, "-c", plain], input=data, check=True, capture_output=True).stdout == b"2\n"


def test_classes_with_a_new_of_their_own() -> None:
    plain = WithNew(4)
    assert plain.size == 4
    assert construction_of(plain) is None
    mixed = Mixed[int](3)
    assert mixed.__dict__["mixed"]


def test_class_exchanged_afterwards() -> None:
    module = nn.Linear(4, 4)
    nn.utils.parametrizations.orthogonal(module)
    assert construction_of(module) is None


def test_nothing_is_kept_alive() -> None:
    gc.collect()
    before = len(construction._records)
    inner, tensor = Dense(2), torch.zeros(3)
    holder = Holder(inner, extra={"x": [tensor]})
    assert made(holder)[0][0] is inner
    assert made(holder)[1]["extra"]["x"][0] is tensor
    watched = weakref.ref(inner), weakref.ref(tensor)
    holder.inner = nn.Identity()
    del inner, tensor
    gc.collect()
    assert [w() for w in watched] == [None, None]
    assert construction_of(holder) is None
    del holder
    gc.collect()
    assert len(construction._records) == before


def test_a_constructor_that_raises_leaves_nothing() -> None:
    gc.collect()
    before = len(construction._records)
    for _ in range(3):
        with pytest.raises(TypeError):
            Dense()  # type: ignore[call-arg]
    gc.collect()
    assert len(construction._records) == before


def test_signatures_of_classes_stay_what_they_were() -> None:
    class Child(Dense):
        pass

    for cls in (Dense, Child):
        assert list(inspect.signature(cls).parameters) == ["num_inputs", "num_outputs", "bias"]
    assert list(inspect.signature(Child(2)).parameters) == ["args", "kwargs"]
    older = construction._ConstructorSignature()  # what Python 3.10 is given
    assert older.__get__(None, Child) == inspect.signature(Dense)
    with pytest.raises(AttributeError):
        older.__get__(Child(2), Child)


def test_forget() -> None:
    module = nn.Sequential(Dense(2), nn.ReLU())
    forget(module)
    assert construction_of(module[0]) is None
    assert not any(key.startswith("_shardwright") for m in module.modules() for key in vars(m))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_script_modules_and_saving() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    scripted = torch.jit.script(module)
    x = torch.ones(1, 2)
    assert torch.equal(scripted(x), module(x))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), module(x))
