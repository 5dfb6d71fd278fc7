"""Describing a nested value and building it again is identity: kinds, contents, shared references, cycles."""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import functools
import pickle
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UsageError
from shardwright.transport.structure import (
    Builder,
    Skeleton,
    Walker,
    build,
    fingerprint,
    is_data,
    nodes_of,
    pickled,
    skeleton_of,
    type_name,
)


class Pair(NamedTuple):
    left: Any
    right: Any


class Color(enum.Enum):
    RED = "red"


@dataclass
class Record:
    value: Any
    more: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    value: Any


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: Any, hidden: Any) -> None:
        self.shown = shown
        self.__hidden = hidden

    def hidden(self) -> Any:
        return self.__hidden


class MoreSlots(Slots):
    __slots__ = ("extra",)


class SlotsAndDict(Slots):
    pass


class MyList(list):  # type: ignore[type-arg]
    note: str


class Hostile:
    """Whatever runs code of this class fails."""

    def __init__(self) -> None:
        raise AssertionError("__init__ ran")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("__eq__ ran")

    def __hash__(self) -> int:
        raise AssertionError("__hash__ ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("__getattr__ ran")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("__setattr__ ran")

    def __bool__(self) -> bool:
        raise AssertionError("__bool__ ran")

    @property
    def trap(self) -> Any:
        raise AssertionError("a property ran")


def hostile(**attributes: Any) -> Hostile:
    made = object.__new__(Hostile)
    object.__getattribute__(made, "__dict__").update(attributes)
    return made


# ------------------------------------------------------------------ comparison of nested values


def alike(left: Any, right: Any, seen: dict[int, tuple[Any, Any]] | None = None) -> bool:
    """The same kinds and contents, tensors and opaque objects by identity, sharing and cycles included."""
    seen = {} if seen is None else seen
    if isinstance(left, (torch.Tensor, types.FunctionType, torch.nn.Module, type)):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and left != left:
        return bool(right != right)
    if left is None or isinstance(
        left, (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.Size, range)
    ):
        return bool(left == right)
    if id(left) in seen:
        return seen[id(left)][1] is right
    seen[id(left)] = (left, right)
    if isinstance(left, Mapping) and not hasattr(left, "data"):
        pairs = zip(left.items(), right.items(), strict=True)
        if len(left) != len(right) or not all(alike(a, b, seen) for a, b in pairs):
            return False
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right) or not all(alike(a, b, seen) for a, b in zip(left, right, strict=True)):
            return False
    elif isinstance(left, (set, frozenset)):
        return bool(left == right)
    elif isinstance(left, slice):
        return alike((left.start, left.stop, left.step), (right.start, right.stop, right.step), seen)
    mine, other = getattr(left, "__dict__", {}), getattr(right, "__dict__", {})
    return list(mine) == list(other) and all(alike(mine[k], other[k], seen) for k in mine)


def again(value: Any) -> Any:
    skeleton, tensors = skeleton_of(value)
    travelled = pickle.loads(pickle.dumps(skeleton))
    assert travelled == skeleton or "nan" in repr(skeleton)  # which has lost its identity, and equals nothing
    return build(travelled, tensors)


# ------------------------------------------------------------------ random values

TENSORS = [torch.zeros(2), torch.ones(()), torch.zeros(0, 3), torch.tensor([50000]), torch.tensor([True])]

constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4),
    st.sampled_from([Color.RED, torch.float16, torch.device("cpu"), torch.Size([2, 3]), ..., range(3), 1j]),
)  # fmt: skip
hashable = st.one_of(st.booleans(), st.integers(), st.text(max_size=4), st.tuples(st.integers(), st.text(max_size=2)))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(hashable, inner, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(MyList),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda d: collections.defaultdict(None, d)),
        dicts.map(collections.UserDict),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, lists),
        st.builds(Frozen, inner),
        st.builds(lambda a, b: Plain(a=a, b=b), inner, inner),
        st.builds(lambda a: argparse.Namespace(a=a), inner),
        st.builds(lambda a: types.SimpleNamespace(a=a), inner),
        st.builds(slice, inner, inner),
    )


values = st.recursive(st.one_of(constants, st.sampled_from(TENSORS)), containers, max_leaves=25)


@given(values)
def test_describe_then_build_is_identity(value: Any) -> None:
    assert alike(value, again(value))


@given(values)
def test_equal_values_have_equal_skeletons(value: Any) -> None:
    first, tensors = skeleton_of(value)
    second, _ = skeleton_of(again(value))
    third, _ = skeleton_of(value)
    assert first == third
    assert first == second
    assert hash(first) == hash(second)
    assert len({id(t) for t in tensors}) == len(tensors)


@given(values, values)
def test_cells_can_be_given_other_contents(old: Any, new: Any) -> None:
    """A list of the first value is changed, in place, into a list of the second; what is in it stays itself."""
    target = [old]
    walker = Walker()
    walker.describe(target)
    other = Walker()
    other.adopt(walker.tensors, walker.cells, walker.opaques)
    target[0] = new
    other.reread()
    node = ("cell", 0)
    target[0] = old
    builder = Builder(other.tensors, other.cells, other.contents)
    for number in range(len(other.cells)):
        builder.write(number)
    assert builder.value(node) is target
    assert alike(target[0], new)


# ------------------------------------------------------------------ kinds one by one


def test_model_output() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=TENSORS[0], hidden_states=(TENSORS[1], TENSORS[1]))
    made = again(output)
    assert type(made) is BaseModelOutput
    assert list(made) == ["last_hidden_state", "hidden_states"]
    assert made.last_hidden_state is made["last_hidden_state"] is TENSORS[0]
    assert made.hidden_states == (TENSORS[1], TENSORS[1])
    assert made.attentions is None


def test_batch_encoding() -> None:
    from transformers import BatchEncoding

    made = again(BatchEncoding({"input_ids": TENSORS[3]}, n_sequences=1))
    assert type(made) is BatchEncoding
    assert made["input_ids"] is made.input_ids is TENSORS[3]
    assert made.n_sequences == 1


def test_key_value_cache() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    walker = Walker()
    root = walker.describe(cache)
    opaques = dict(enumerate(walker.opaques))
    made = Builder(walker.tensors, (), walker.contents, opaques).value(root)
    assert type(made) is DynamicCache
    assert made.get_seq_length() == 3
    assert made.layers[0].keys is cache.layers[0].keys


@pytest.mark.parametrize("cls", [Slots, MoreSlots, SlotsAndDict])
def test_slots(cls: Any) -> None:
    value = cls(TENSORS[0], [TENSORS[1]])
    if cls is SlotsAndDict:
        value.free = "free"
    made = again(value)
    assert type(made) is cls
    assert made.shown is TENSORS[0]
    assert made.hidden()[0] is TENSORS[1]
    assert getattr(made, "free", None) == getattr(value, "free", None)
    assert not hasattr(made, "extra")


def test_slots_that_become_empty() -> None:
    value = MoreSlots(1, 2)
    value.extra = 3
    walker = Walker()
    walker.describe(value)
    value.extra = 4
    del value.shown
    after = Walker()
    after.adopt((), walker.cells, ())
    after.reread()
    value.extra, value.shown = 3, 1
    Builder([], after.cells, after.contents).write(0)
    assert value.extra == 4
    assert not hasattr(value, "shown")


def test_no_code_of_a_class_runs() -> None:
    value = hostile(a=TENSORS[0], trap=[1])
    made = again(value)
    assert type(made) is Hostile
    attributes = object.__getattribute__(made, "__dict__")
    assert attributes["a"] is TENSORS[0]
    assert attributes["trap"] == [1]


def test_list_subclass_with_attributes() -> None:
    value = MyList([TENSORS[0]])
    value.note = "note"
    made = again(value)
    assert type(made) is MyList
    assert made[0] is TENSORS[0]
    assert made.note == "note"


def test_default_dict_keeps_its_factory() -> None:
    value = collections.defaultdict(list, a=[TENSORS[0]])
    walker = Walker()
    root = walker.describe(value)
    made = Builder(walker.tensors, (), walker.contents, dict(enumerate(walker.opaques))).value(root)
    assert made["a"][0] is TENSORS[0]
    assert made["missing"] == []


def test_return_types_of_torch() -> None:
    value = torch.max(torch.zeros(2, 3), dim=0)
    made = again(value)
    assert type(made) is type(value)
    assert made.indices is value.indices


# ------------------------------------------------------------------ identity


def test_shared_references_stay_shared() -> None:
    inner = [TENSORS[0]]
    made = again({"a": inner, "b": (inner, TENSORS[0])})
    assert made["a"] is made["b"][0]
    assert made["a"][0] is made["b"][1]


def test_cycles() -> None:
    value: list[Any] = [1]
    value.append({"self": value, "object": Plain(back=value)})
    made = again(value)
    assert made[1]["self"] is made
    assert made[1]["object"].back is made


def test_keys_that_are_objects_keep_their_identity() -> None:
    key = Plain(name="key")
    table = {key: TENSORS[0]}
    walker = Walker()
    root = walker.describe((key, table))
    made = Builder([TENSORS[1]], walker.cells, walker.contents, {}).value(root)
    assert made[0] is key
    Builder([TENSORS[1]], walker.cells, walker.contents, {}).write(1)
    assert table == {key: TENSORS[1]}


def test_results_refer_to_arguments() -> None:
    argument = [TENSORS[0]]
    walker = Walker()
    walker.describe(argument)
    after = Walker()
    after.adopt(walker.tensors, walker.cells, walker.opaques)
    argument.append(TENSORS[1])
    after.reread()
    assert after.describe((argument, TENSORS[0])) == ("tuple", tuple, (("cell", 0), ("tensor", 0)))
    assert after.contents[0] != walker.contents[0]
    assert after.tensors == [TENSORS[0], TENSORS[1]]


# ------------------------------------------------------------------ constants


@pytest.mark.parametrize(("left", "right"), [(1, True), (1, 1.0), (0, False), ("a", b"a"), ((1,), [1]), (None, False)])
def test_values_of_other_types_differ(left: Any, right: Any) -> None:
    assert skeleton_of(left)[0] != skeleton_of(right)[0]


def test_not_a_number_is_itself() -> None:
    assert skeleton_of(float("nan"))[0] == skeleton_of([float("nan")][0])[0]
    assert len({skeleton_of(float("nan"))[0] for _ in range(3)}) == 1


def test_sets_have_one_order() -> None:
    assert skeleton_of({"b", "a", "c"})[0] == skeleton_of({"c", "b", "a"})[0]
    assert again({TENSORS[0]}) == {TENSORS[0]}
    with pytest.raises(UsageError, match="no order that is the same on every rank"):
        skeleton_of({TENSORS[0], TENSORS[1]})
    with pytest.raises(UsageError, match="use a list"):
        skeleton_of(frozenset([object(), object()]))


# ------------------------------------------------------------------ what is opaque


def local(x: Any) -> Any:
    return x


def generator() -> Iterator[int]:
    yield 1


OPAQUE = [
    local, len, generator(), torch.nn.Linear(1, 1), torch.Generator(), functools.partial(local, 1), types, Plain,
    torch.optim.SGD([torch.zeros(1)], lr=1.0), object(), collections.deque(), numpy.arange(3), [].append,
]  # fmt: skip


@pytest.mark.parametrize("value", OPAQUE, ids=lambda value: type(value).__name__)
def test_opaque(value: Any) -> None:
    walker = Walker()
    root = walker.describe([value, value])
    skeleton = walker.skeleton(root)
    assert skeleton.opaque == type_name(value)
    assert walker.opaques == [value] or len(walker.opaques) == 1
    with pytest.raises(TypeError, match="cannot be rebuilt"):
        build(skeleton, walker.tensors)
    made = Builder(walker.tensors, (), walker.contents, dict(enumerate(walker.opaques))).value(root)
    assert made[0] is made[1] is value


def test_left_alone() -> None:
    own = Plain(a=TENSORS[0])
    walker = Walker(lambda value: value is own)
    root = walker.describe({"own": own, "device": torch.device("cpu"), "other": Plain(a=1)})
    assert walker.tensors == []
    assert walker.opaques == [own, torch.device("cpu")]
    made = Builder([], (), walker.contents, opaque=lambda node: node[1]).value(root)
    assert made["own"].endswith("Plain")
    assert made["other"].a == 1


def test_fingerprints_of_arrays() -> None:
    array = numpy.arange(3)
    before = fingerprint(array)
    assert before == fingerprint(numpy.arange(3)) != fingerprint(numpy.arange(3.0))
    array[0] = 5
    assert fingerprint(array) != before
    assert fingerprint(local) == 0


def test_what_can_be_told() -> None:
    assert is_data(numpy.float32(1.5))
    assert pickle.loads(pickled(numpy.arange(3))).tolist() == [0, 1, 2]  # type: ignore[arg-type]
    assert pickle.loads(pickled(Plain)) is Plain  # type: ignore[arg-type]
    assert pickled(lambda: None) is None
    assert pickled(torch.nn.Linear(1, 1)) is None


def test_nodes() -> None:
    walker = Walker()
    root = walker.describe((1, {"k": (TENSORS[0], None)}, Plain(a=slice(2))))
    kinds = collections.Counter(node[0] for node in nodes_of(root, walker.contents))
    assert kinds == {"tuple": 2, "const": 3, "cell": 2, "tensor": 1, "none": 3, "slice": 1}
    assert Skeleton(root, tuple(walker.contents)).has_constants


def test_describing_changes_nothing() -> None:
    value = {"a": [TENSORS[0], Plain(b=1)], "c": Pair(1, 2)}
    before = copy.copy(value["a"][1].__dict__)  # type: ignore[index]
    skeleton_of(value)
    assert value["a"][1].__dict__ == before  # type: ignore[index]
