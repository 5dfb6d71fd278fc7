"""What save accepts, load returns; the rest is refused by name when it is saved."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import os
import pathlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.checkpoint import safe_loading
from shardwright.errors import CheckpointError

ACCEPTED: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "x", b"y", (1, 2)], 3: {"nested": 2**70}},
    "sets": [{1, 2}, frozenset({"a"}), 1 + 2j, range(3), slice(1, 2), bytearray(b"z")],
    "namespace": argparse.Namespace(lr=0.1, layers=[1, 2]),
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1, collections.deque([2])], maxlen=3),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
    "times": [
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.date(2024, 1, 2),
        datetime.time(3),
        datetime.timedelta(4),
    ],
    "torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu")],
    "numpy scalars": [np.float32(1.5), np.int64(3), np.bool_(True), np.complex64(1j), np.float32],
    "python random": random.getstate(),
}


def scheduler_states() -> list[dict[str, Any]]:
    """Of every scheduler of torch that takes no function, after some steps."""
    kinds = torch.optim.lr_scheduler
    found = []
    for make in (
        lambda o: kinds.StepLR(o, 2),
        lambda o: kinds.MultiStepLR(o, [1, 3]),
        lambda o: kinds.ConstantLR(o),
        lambda o: kinds.LinearLR(o),
        lambda o: kinds.ExponentialLR(o, 0.9),
        lambda o: kinds.PolynomialLR(o),
        lambda o: kinds.CosineAnnealingLR(o, 10),
        lambda o: kinds.CosineAnnealingWarmRestarts(o, 3),
        lambda o: kinds.CyclicLR(o, 0.1, 1.0),
        lambda o: kinds.OneCycleLR(o, 1.0, total_steps=10),
        lambda o: kinds.ReduceLROnPlateau(o),
        lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o), kinds.ExponentialLR(o, 0.9)], [2]),
        lambda o: kinds.LambdaLR(o, lambda step: 0.9**step),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
        scheduler = make(optimizer)
        for _ in range(3):
            optimizer.step()
            scheduler.step(*([0.5] if isinstance(scheduler, kinds.ReduceLROnPlateau) else []))
        found.append(scheduler.state_dict())
    return found


ACCEPTED["schedulers"] = scheduler_states()
ACCEPTED["numpy generator"] = np.random.default_rng(3).bit_generator.state
ACCEPTED["python generator"] = random.Random(3).getstate()


def round_trip(path: Path, value: Any) -> Any:
    safe_loading.write_file(path, value, trust=False)
    return safe_loading.read_file(path, trust=False)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_values_come_back_equal(name: str, tmp_path: Path) -> None:
    """FF-35 b: what save accepts, load gives back."""
    value = ACCEPTED[name]
    back = round_trip(tmp_path / "f", value)
    assert type(back) is type(value)
    assert back == value


def test_numpy_arrays_and_random_state_come_back(tmp_path: Path) -> None:
    """FF-35 b."""
    state = np.random.get_state()
    arrays = [np.arange(5), np.zeros((2, 3), "f4"), np.array(["a", "b"]), np.array([1, None], dtype=object)]
    back_state, back_arrays = round_trip(tmp_path / "f", (state, arrays))
    assert all(np.array_equal(a, b) for a, b in zip(state, back_state, strict=True))
    for array, back in zip(arrays, back_arrays, strict=True):
        assert array.dtype == back.dtype
        assert np.array_equal(array, back)


def test_tensors_come_back_mapped(tmp_path: Path) -> None:
    value = {"w": torch.randn(3, 4, dtype=torch.bfloat16), "p": torch.nn.Parameter(torch.ones(2))}
    back = round_trip(tmp_path / "f", value)
    assert torch.equal(back["w"], value["w"])
    assert isinstance(back["p"], torch.nn.Parameter)


def test_state_files_load_with_plain_torch(tmp_path: Path) -> None:
    safe_loading.write_file(tmp_path / "f", {"w": torch.arange(4)}, trust=False)
    assert torch.equal(torch.load(tmp_path / "f", weights_only=True, mmap=True)["w"], torch.arange(4))


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class DictOfMine(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("value", [Settings(), DictOfMine(a=1), torch.nn.Linear(1, 1), print])
def test_other_types_are_refused_by_name_when_saved(value: Any, tmp_path: Path) -> None:
    """FF-35 b: what could not be given back is refused at save time."""
    name = getattr(value, "__qualname__", type(value).__name__)
    with pytest.raises(CheckpointError, match=name) as caught:
        safe_loading.write_file(tmp_path / "user_content.pt", {"deep": [value]}, trust=False)
    assert "user_content.pt" in caught.value.what
    assert safe_loading.TRUST_ENV in str(caught.value.remedy)


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lambda"):
        safe_loading.write_file(tmp_path / "user_content.pt", {"f": lambda: 1}, trust=False)


def test_trust_opens_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safe_loading.write_file(tmp_path / "f", Settings(0.5), trust=True)
    assert safe_loading.read_file(tmp_path / "f", trust=True) == Settings(0.5)
    with pytest.raises(CheckpointError, match=r"f holds .*Settings.*safe loading refuses"):
        safe_loading.read_file(tmp_path / "f", trust=False)
    assert not safe_loading.trusted(None)
    monkeypatch.setenv(safe_loading.TRUST_ENV, "1")
    assert safe_loading.trusted(None)
    assert not safe_loading.trusted(False)


class MakesMarker:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_hostile_file_runs_nothing_and_is_named(form: str, tmp_path: Path) -> None:
    """FF-35 a."""
    marker, file = tmp_path / "marker", tmp_path / "model_0_0.pt"
    if form == "torch":
        torch.save({"w": MakesMarker(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(MakesMarker(marker)))
    with pytest.raises(CheckpointError, match=r"model_0_0\.pt"):
        safe_loading.read_file(file, trust=False)
    assert not marker.exists()
